"""Runs texts through a model and shows a calibrator what every layer holds.

Texts are read, hashed and tokenised in pieces, and each window of tokens has a cache of its own: memory depends on
the window, not on the length of the text.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import SelectorConfig
from sparsesel.eval.texts import pieces
from sparsesel.hf.inject import sparsify
from sparsesel.kv import KVView
from sparsesel.selector import Calibrator, LayerSpec, SelectorState, StepCost


def token_windows(
    paths: Sequence[str], tokenizer: Any, *, size: int, max_tokens: int | None = None
) -> Iterator[list[int]]:
    """Windows of up to `size` tokens, file by file, `max_tokens` in all.

    Each begins with what the tokenizer puts before a text (a BOS token, if any), as texts do when a model is used.
    Windows of a single token are left out.
    """
    prefix = _prefix(tokenizer)
    room = max(1, size - len(prefix))
    left = max_tokens
    for path in paths:
        tokens: list[int] = []
        for piece in itertools.chain(_words(path), [""]):  # the empty one is the end
            if piece:
                tokens += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            while len(tokens) >= room or (not piece and tokens):
                window = prefix + tokens[:room]
                tokens = tokens[room:]
                window = window if left is None else window[:left]
                if len(window) > 1:
                    yield window
                if left is not None:
                    left -= len(window)
                    if left < 2:
                        return


def calibrate(
    model: Any,
    windows: Iterator[list[int]],
    calibrator: Calibrator,
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Show `calibrator` every window; returns how many tokens there were.

    Args:
        model: In evaluation mode.
        windows: From `token_windows`.
        calibrator: Learns from them.
        advance: Called with the number of tokens after each window.
    """
    total = 0
    # In PyTorch on any device: what is learned does not depend on what will run.
    with torch.inference_mode(), sparsify(model, Watcher(calibrator), backend="eager"):
        for window in windows:
            tokens = torch.tensor([window], device=model.device)
            model(tokens, use_cache=True, logits_to_keep=1)
            total += len(window)
            advance(len(window))
    return total


class WatcherConfig(SelectorConfig):
    """Nothing to configure."""

    name: str = "watcher"


@dataclass(frozen=True)
class Watcher:
    """A selector that only watches prefills, for a calibrator."""

    calibrator: Calibrator

    @property
    def config(self) -> WatcherConfig:
        """Its name."""
        return WatcherConfig()

    def init_state(self, layer: LayerSpec) -> SelectorState:
        """Nothing to remember."""
        return SelectorState(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> None:
        """Hand on what is seen."""
        self.calibrator.observe(state.layer, query, kv)

    def discover(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise RuntimeError("a model under calibration was asked to decode")

    aggregate = attend = discover

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Refused."""
        self.discover()


def _prefix(tokenizer: Any) -> list[int]:
    """Special tokens that come before a text."""
    with_special = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


def _words(path: str) -> Iterator[str]:
    """Pieces cut before white space, so that no word is, where there is any."""
    rest = ""
    for piece in pieces(path):
        text = rest + piece
        cut = max(text.rfind(" "), text.rfind("\n"))
        cut = cut if cut > 0 else len(text)
        yield text[:cut]
        rest = text[cut:]
    if rest:
        yield rest
