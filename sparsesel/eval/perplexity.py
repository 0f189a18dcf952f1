"""Decode-true perplexity of one document: what is scored went through the selector, one token at a time.

For N tokens and a suffix of S: tokens 0 … N-S-2 are a dense prefill, then S single-token steps consume tokens
N-S-1 … N-2 (teacher-forced), each scoring the token after the one it consumed. A perplexity from one forward over
all tokens would never call the selector.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsesel.config import BackendName
from sparsesel.eval.observe import ObserveAll
from sparsesel.hf import compat
from sparsesel.hf.cache import fork
from sparsesel.hf.inject import Selection, selectors_by_layer, sparsify
from sparsesel.hf.stats import Stats
from sparsesel.selector import Selector, SelectorState


class MeasurementError(RuntimeError):
    """What was run did not measure what it claims to, so it is not reported."""


_LARGEST_NLL = math.log(sys.float_info.max)  # per token; a perplexity beyond is no number
_COUNTS = frozenset({"steps", "selected", "visible", "candidates"})  # counters that are no path of a step


class Prefilled:
    """A document prefilled once, from which each of several selectors decodes.

    Args:
        model: In evaluation mode.
        tokens: `[N]` int64, the document.
        suffix: S, tokens scored.
        selectors: All that will decode, each for the whole model, as `sparsify` takes them; each sees the prefill.
        backend: What runs them.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        suffix: int,
        selectors: Sequence[Selection],
        *,
        backend: BackendName = "auto",
    ) -> None:
        self._model = model
        self._backend: BackendName = backend
        self._tokens = tokens.to(model.device)
        self._suffix = suffix
        self._selectors = [selectors_by_layer(model, selector) for selector in selectors]
        self._names = [str(getattr(selector, "config", selector)) for selector in selectors]
        prompt = self._tokens[: len(tokens) - suffix - 1]
        # Copies of the cache are made outside of this session, so that no selector's steps are counted in it.
        with torch.inference_mode(), sparsify(model, self._watchers(), backend=backend):
            output = model(prompt[None], use_cache=True, logits_to_keep=1)
            self._cache = compat.cache_of(output)

    def decode(self, index: int, *, advance: Callable[[], None] = lambda: None) -> dict[str, float | None]:
        """Decode the suffix with selector `index` from a copy of the cache; to be called once for each.

        Args:
            index: Of the selector.
            advance: Called after each step.

        Returns:
            The metrics, by the names of `results.jsonl`; None where one does not apply.

        Raises:
            MeasurementError: The selector did not act in every step, layer and head, or the perplexity is not finite.
        """
        model, tokens, suffix = self._model, self._tokens, self._suffix
        first = len(tokens) - suffix - 1
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        times: list[float] = []
        with torch.inference_mode():
            cache = fork(self._cache, self._pick(index))
            with sparsify(model, self._selectors[index], backend=self._backend) as session:
                for position in range(first, first + suffix):
                    _wait(model.device)
                    began = time.perf_counter()
                    output = model(
                        tokens[None, position : position + 1], use_cache=True, **{compat.CACHE_ARGUMENT: cache}
                    )
                    _wait(model.device)
                    times.append(time.perf_counter() - began)
                    scores = output.logits[0, -1].float().log_softmax(-1)
                    total -= scores[tokens[position + 1]]
                    advance()
                stats = session.stats()
                layers = len(session.selectors)
        heads = model.config.get_text_config(decoder=True).num_attention_heads
        steps = stats.total.get("steps", 0.0)
        if steps != suffix * layers * heads:
            raise MeasurementError(
                f"selector {self._names[index]} acted in {steps:.0f} of {suffix * layers * heads} "
                f"({suffix} steps, {layers} layers, {heads} heads): this would not measure it, so nothing is reported"
            )
        nll = float(total)
        if not nll / suffix < _LARGEST_NLL:  # nor is NaN
            raise MeasurementError(f"selector {self._names[index]}: the text has no finite perplexity")
        return metrics(nll, suffix, times, stats)

    def _watchers(self) -> dict[int, ObserveAll]:
        """For each layer, one that watches for all the selectors that serve it."""
        layers = sorted(set().union(*self._selectors))
        return {layer: ObserveAll([chosen[layer] for chosen in self._selectors if layer in chosen]) for layer in layers}

    def _pick(self, index: int) -> Callable[[int, Any], tuple[Selector | None, SelectorState | None]]:
        """For `fork`: continue with what selector `index` is in each layer and the state it has there."""

        def choose(layer_idx: int, layer: Any) -> tuple[Selector | None, SelectorState | None]:
            selector = self._selectors[index].get(layer_idx)
            if selector is None:
                return None, None
            before = sum(layer_idx in chosen for chosen in self._selectors[:index])
            return selector, layer.state.states[before]

        return choose


def metrics(nll: float, tokens: int, times: Sequence[float], stats: Stats) -> dict[str, float | None]:
    """Metrics of one point.

    Args:
        nll: Total negative log-likelihood in nats.
        tokens: Tokens scored.
        times: Seconds of each step.
        stats: What the selector did.
    """
    paths = {name: value for name, value in stats.total.items() if name not in _COUNTS}
    standard = ("exact", "reuse", "fallback", "refresh")
    shares = {f"{name}_share": stats.share(name) if name in paths else None for name in (*standard, *paths)}
    return {
        "perplexity": math.exp(nll / tokens),
        "nll": nll,
        "tokens": tokens,
        **shares,
        "candidates": None if math.isnan(stats.candidates) else stats.candidates,
        "density": stats.density,
        "attended": stats.total["selected"] / stats.total["steps"],
        "ms_per_step": 1000 * statistics.median(times),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
