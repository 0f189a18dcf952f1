"""Decode-true runs: one dense prefill, shared by several selectors, then single-token steps through each of them.

A selector acts in decode steps alone. A number from one forward over all tokens would never have called it, so every
decoder counts, and what it decoded without the selector acting in every step, layer and head is refused.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sparsesel.config import BackendName
from sparsesel.eval.observe import ObserveAll
from sparsesel.hf import compat
from sparsesel.hf.cache import fork
from sparsesel.hf.inject import Selection, Session, selectors_by_layer, sparsify
from sparsesel.hf.stats import Stats
from sparsesel.selector import Selector, SelectorState

_COUNTS = frozenset({"steps", "selected", "visible", "candidates"})  # counters that are no path of a step


class MeasurementError(RuntimeError):
    """What was run did not measure what it claims to, so it is not reported."""


class Prefill:
    """Tokens prefilled once, from which each of several selectors decodes.

    Args:
        model: In evaluation mode.
        tokens: `[P]` int64, the prompt without its last token: that one is the first to decode.
        selectors: All that will decode, by name, each for the whole model, as `sparsify` takes them; each sees the
            prefill.
        backend: What runs them.
        seed: Of torch's generator, set before the prefill and before each decoder; None leaves it alone.
        advance: Called after each step of any decoder.
        begin: Called with the selector's name when a decoder is made.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        selectors: Mapping[str, Selection],
        *,
        backend: BackendName = "auto",
        seed: int | None = None,
        advance: Callable[[], object] = lambda: None,
        begin: Callable[[str], object] = lambda name: None,
    ) -> None:
        self.model = model
        self.length = len(tokens)
        self._backend: BackendName = backend
        self._seed = seed
        self._advance = advance
        self._begin = begin
        self._selectors = {name: selectors_by_layer(model, selector) for name, selector in selectors.items()}
        _seed(seed)
        # Copies of the cache are made outside of this session, so that no selector's steps are counted in it.
        with torch.inference_mode(), sparsify(model, self._watchers(), backend=backend):
            output = model(tokens.to(model.device)[None], use_cache=True, logits_to_keep=1)
            self._cache = compat.cache_of(output)

    def decoder(self, name: str) -> "Decoder":
        """A decoder that continues with selector `name` from a copy of the cache; a context manager."""
        self._begin(name)
        _seed(self._seed)
        with torch.inference_mode():
            cache = fork(self._cache, self._pick(name))
        return Decoder(self.model, cache, self._selectors[name], name, backend=self._backend, advance=self._advance)

    def _watchers(self) -> dict[int, ObserveAll]:
        """For each layer, one that watches for all the selectors that serve it."""
        chosen = self._selectors.values()
        layers = sorted(set().union(*chosen))
        return {layer: ObserveAll([each[layer] for each in chosen if layer in each]) for layer in layers}

    def _pick(self, name: str) -> Callable[[int, Any], tuple[Selector | None, SelectorState | None]]:
        """For `fork`: continue with what selector `name` is in each layer and a copy of its state there."""
        before = list(self._selectors)[: list(self._selectors).index(name)]

        def choose(layer_idx: int, layer: Any) -> tuple[Selector | None, SelectorState | None]:
            selector = self._selectors[name].get(layer_idx)
            if selector is None:
                return None, None
            index = sum(layer_idx in self._selectors[other] for other in before)
            return selector, layer.state.states[index].clone()

        return choose


class Decoder:
    """Single-token steps of one selector. Made by `Prefill.decoder`; the model is sparsified until it is closed.

    Attributes:
        session: The model's session.
        steps: How many steps were taken.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        selectors: Mapping[int, Selector],
        name: str,
        *,
        backend: BackendName,
        advance: Callable[[], object],
    ) -> None:
        self.steps = 0
        self._model = model
        self._cache = cache
        self._name = name
        self._advance = advance
        self._clock = clock(model.device)
        self.session: Session = sparsify(model, selectors, backend=backend)

    def step(self, token: Tensor | int) -> Tensor:
        """Consume one token, teacher-forced or chosen from the step before; returns the logits `[V]` of the next.

        On CUDA nothing waits for the device: a token may stay there, as a tensor.
        """
        device = self._model.device
        tokens = torch.as_tensor(token, device=device, dtype=torch.int64).view(1, 1)
        with torch.inference_mode():
            self._clock.start()
            output = self._model(tokens, use_cache=True, **{compat.CACHE_ARGUMENT: self._cache})
            self._clock.stop()
        self.steps += 1
        self._advance()
        return output.logits[0, -1]

    def stats(self) -> Stats:
        """What the selector did (waits for the device).

        Raises:
            MeasurementError: It did not act in every step, layer and head.
        """
        stats = self.session.stats()
        layers = len(self.session.selectors)
        heads = self._model.config.get_text_config(decoder=True).num_attention_heads
        acted, expected = stats.total.get("steps", 0.0), self.steps * layers * heads
        if acted != expected or not expected:
            raise MeasurementError(
                f"selector {self._name} acted in {acted:.0f} of {expected} "
                f"({self.steps} steps, {layers} layers, {heads} heads): this would not measure it, so nothing is "
                "reported"
            )
        return stats

    def metrics(self) -> dict[str, float | None]:
        """What every task reports of a selector: path shares, candidates, density, attended keys, time of a step.

        Raises:
            MeasurementError: As `stats`.
        """
        return {**selector_metrics(self.stats()), "ms_per_step": 1000 * statistics.median(self.seconds())}

    def seconds(self) -> list[float]:
        """Time of each step so far (waits for the device)."""
        return self._clock.seconds()

    def close(self) -> None:
        """Restore the model."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def selector_metrics(stats: Stats) -> dict[str, float | None]:
    """Metrics of what a selector did; None for a path that it does not have."""
    paths = {name: value for name, value in stats.total.items() if name not in _COUNTS}
    standard = ("exact", "reuse", "fallback", "refresh")
    shares = {f"{name}_share": stats.share(name) if name in paths else None for name in (*standard, *paths)}
    return {
        **shares,
        "candidates": None if math.isnan(stats.candidates) else stats.candidates,
        "density": stats.density,
        "attended": stats.total["selected"] / stats.total["steps"],
    }


class Clock(Protocol):
    """Times one thing after another."""

    def start(self) -> None:
        """It begins."""
        ...

    def stop(self) -> None:
        """It ends."""
        ...

    def seconds(self) -> list[float]:
        """How long each took (waits for the device)."""
        ...


def clock(device: torch.device) -> Clock:
    """A clock for what runs on `device`, where nothing waits while it is timed."""
    return _EventClock(device) if device.type == "cuda" else _Clock()


class _Clock:
    """Times steps that are over when they return."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)

    def seconds(self) -> list[float]:
        return self._seconds


class _EventClock:
    """Times steps on a CUDA device by events in its queue, without waiting for any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._events[-1][0].record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        self._events[-1][1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [began.elapsed_time(ended) / 1000 for began, ended in self._events]


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)
