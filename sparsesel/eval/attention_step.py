"""One decode step of a model's attention alone, over all of its layers, with several selectors in turn.

Queries, keys and values are random; only how queries resemble their past is set. A head's queries lie around a
direction of its own, so that each is near to those before it, and from time to time, as often as a mix of paths says,
the head turns to a new direction, which is near to none.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsesel.errors import InputError
from sparsesel.eval.decode import MeasurementError, selector_metrics
from sparsesel.eval.paths import Geometry, PathMix
from sparsesel.eval.stages import StageClock, keep_busy
from sparsesel.hf.stats import Stats
from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.rotary import Rotary
from sparsesel.selector import LayerSpec, Selector

SHOWN = 40
"""Queries of the prompt's end that selectors are shown."""
SETTLING = 4
"""Steps before any is timed: what remains to be done after a prompt is done then, and kernels are compiled."""
REFRESHES = 2
"""Steps in which all heads turn, timed where the mix has any."""

_STAGE_REPEATS = 3
_COPIED = 1 << 28  # bytes, more than a cache of any device holds


@dataclass(frozen=True)
class Schedule:
    """What is timed.

    Attributes:
        context: Keys that the last step sees.
        steps: Ordinary steps timed.
        repeats: How often each of them is.
        nearness: Cosine of a query to those that it is near to.
    """

    context: int
    steps: int
    repeats: int
    nearness: float

    @property
    def total(self) -> int:
        """Steps after the prompt."""
        return SETTLING + self.steps + REFRESHES

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.context - self.total


@dataclass
class Contestant:
    """A selector in every layer, and its queries.

    Attributes:
        selectors: One for each layer.
        mix: How often its heads turn.
        queries: `[N, 1, Hq, S, D]`, of N layers: the prompt's last, then those of the steps.
        settled: Its states, before the first step timed.
        times: Milliseconds of each repeat's steps.
        grown: Which of them took more memory for a state. That comes once in thousands of steps, so they do not count.
        ordinary: What happened in the ordinary steps.
        refreshes: What happened in the others.
        stages: Milliseconds of a step by stage.
    """

    selectors: Sequence[Selector]
    mix: PathMix
    queries: Tensor
    settled: list[Any] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    grown: set[int] = field(default_factory=set)
    ordinary: dict[str, float | None] = field(default_factory=dict)
    refreshes: dict[str, float | None] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)


class AttentionSteps:
    """The attention layers of a model that need not exist, at one context.

    Args:
        geometry: The layers.
        schedule: What is timed.
        device: Where it runs.
        name: The backend that runs the selectors.
        seed: Of everything random.

    Raises:
        InputError: The context leaves no prompt, or the device has not the memory.
    """

    def __init__(self, geometry: Geometry, schedule: Schedule, device: str, name: Any, seed: int) -> None:
        self.geometry, self.schedule = geometry, schedule
        self.device = torch.device(device)
        self._backend = name
        self._dtype = getattr(torch, geometry.dtype)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        cache = (1, geometry.kv_heads, schedule.context, geometry.head_dim)
        self._refuse_without(2 * len(geometry.layers) * geometry.kv_heads * schedule.context * geometry.head_dim)
        self._keys, self._values = ([self._noise(*cache) for _ in geometry.layers] for _ in range(2))
        self._lengths = torch.zeros(1, dtype=torch.int64, device=self.device)
        rotary = Rotary(10000.0 ** -(torch.arange(0, geometry.head_dim, 2, device=self.device) / geometry.head_dim))
        self.layers = [
            LayerSpec(**{**vars(layer), "device": self._lengths.device, "rotary": rotary}) for layer in geometry.specs()
        ]

    def time(
        self,
        chosen: Mapping[str, tuple[Sequence[Selector], PathMix]],
        advance: Callable[[], object] = lambda: None,
    ) -> dict[str, Contestant]:
        """Time the selectors in turn, step by step.

        Args:
            chosen: Of each, the selector of every layer and how often its heads turn.
            advance: Called after each step of each.

        Raises:
            MeasurementError: A selector did not act in every step, layer and head.
            InputError: A selector cannot serve such layers, or the device has not the memory.
        """
        states = sum(
            selector.cost(layer, self.schedule.context).state_bytes
            for selectors, _ in chosen.values()
            for selector, layer in zip(selectors, self.layers, strict=True)
        )
        self._refuse_without(2 * states / self._dtype.itemsize)  # each has a copy of its own to begin from
        queries = {mix: self._queries(mix) for mix in dict.fromkeys(mix for _, mix in chosen.values())}
        contestants = {name: Contestant(selectors, mix, queries[mix]) for name, (selectors, mix) in chosen.items()}
        with torch.inference_mode(), backend.using(self._backend):
            for contestant in contestants.values():
                self._settle(contestant)
                advance()
            for repeat in range(self.schedule.repeats):
                self._repeat(contestants, repeat, advance)
            for contestant in contestants.values():
                contestant.stages = self._stages(contestant)
        return contestants

    def _repeat(self, contestants: Mapping[str, Contestant], repeat: int, advance: Callable[[], object]) -> None:
        """Every step once, each by all contestants before the next."""
        schedule = self.schedule
        states = {name: [state.clone() for state in one.settled] for name, one in contestants.items()}
        clocks: dict[str, list[Any]] = {name: [] for name in contestants}
        for step in range(SETTLING, schedule.total):
            views = self._views(step)
            if step == SETTLING + schedule.steps and repeat == 0:
                for name, one in contestants.items():
                    one.ordinary = self._counted(name, states[name], schedule.steps)
                    for state in states[name]:
                        state.counters = type(state.counters)()
            for name, one in contestants.items():
                if step >= SETTLING + schedule.steps and not one.mix.refresh:
                    continue
                held = _held(states[name])
                keep_busy(self.device)
                began = self._now()
                self._step(one, states[name], views, step)
                clocks[name].append((began, self._now()))
                if _held(states[name]) > held:
                    one.grown.add(step - SETTLING)
                advance()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, one in contestants.items():
            one.times.append([self._between(*pair) for pair in clocks[name]])
            if repeat == 0 and one.mix.refresh:
                one.refreshes = self._counted(name, states[name], REFRESHES)

    def _settle(self, one: Contestant) -> None:
        """Show the prompt's end and take the first steps."""
        prompt = self._views(-1)
        for index, (selector, layer) in enumerate(zip(one.selectors, self.layers, strict=True)):
            state = selector.init_state(layer)
            selector.observe_prefill(one.queries[index, :, :, :SHOWN], prompt[index], state, scale=self._scale)
            one.settled.append(state)
        for step in range(SETTLING):
            self._step(one, one.settled, self._views(step), step)

    def _stages(self, one: Contestant) -> dict[str, float]:
        """Milliseconds of each stage of a step, as `milliseconds` sums up those of all."""
        ordinary = range(SETTLING, SETTLING + self.schedule.steps)
        steps = range(SETTLING, self.schedule.total) if one.mix.refresh else ordinary
        repeats: list[list[dict[str, float]]] = []
        for _ in range(min(_STAGE_REPEATS, self.schedule.repeats)):
            states = [state.clone() for state in one.settled]
            repeats.append([])
            for step in steps:
                views = self._views(step)
                with StageClock(self.device) as clock:
                    self._step(one, states, views, step)
                repeats[-1].append(clock.milliseconds())
        names = dict.fromkeys(stage for repeat in repeats for step in repeat for stage in step)
        return {
            name: over_steps(
                [statistics.median(each) for each in zip(*_values_of(name, repeats), strict=True)],
                one,
                self.schedule.steps,
            )
            for name in names
        }

    def _step(self, one: Contestant, states: Sequence[Any], views: Sequence[KVView], step: int) -> None:
        queries = one.queries[:, :, :, SHOWN + step : SHOWN + step + 1]
        for index, selector in enumerate(one.selectors):
            selector.attend(queries[index], views[index], states[index], scale=self._scale)

    def _views(self, step: int) -> list[KVView]:
        """What each layer sees in a step; before the first one, the prompt."""
        length = self.schedule.prompt + step + 1
        if backend.current(self.device) == "triton":
            # In memory of one size, as kernels are compiled for; the length is on the device.
            self._lengths.fill_(length)
            pairs = zip(self._keys, self._values, strict=True)
            return [KVView.dense(keys, values, lengths=self._lengths) for keys, values in pairs]
        return [
            KVView.dense(keys[:, :, :length], values[:, :, :length])
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def _queries(self, mix: PathMix) -> Tensor:
        """Queries of all layers, `[N, 1, Hq, S, D]`."""
        heads, count = self.geometry.heads, len(self.geometry.layers)
        shape = (count, 1, heads, self.geometry.head_dim)
        draws = (count, 1, 1 if mix.together else heads, 1)
        turning = mix.fallback / (1 - mix.refresh)
        weights = self.schedule.nearness**0.5, (1 - self.schedule.nearness) ** 0.5
        direction = self._random(*shape)
        queries: list[Tensor] = []
        for step in range(-SHOWN, self.schedule.total):
            fresh = self._random(*shape)
            turns = torch.rand(draws, generator=self._generator, device=self.device) < turning
            if step < SETTLING:
                turns = torch.zeros_like(turns)
            elif step >= SETTLING + self.schedule.steps:
                turns = torch.ones_like(turns)
            direction = torch.where(turns, fresh, direction)
            queries.append(weights[0] * direction + weights[1] * self._random(*shape))
        return torch.stack(queries, dim=3).to(self._dtype)

    def _counted(self, name: str, states: Sequence[Any], steps: int) -> dict[str, float | None]:
        """What the selector did in `steps` steps.

        Raises:
            MeasurementError: It did not act in all of them.
        """
        layers = {layer.layer_idx: state.counters.read() for layer, state in zip(self.layers, states, strict=True)}
        stats = Stats(layers)
        acted, expected = stats.total.get("steps", 0.0), steps * len(layers) * self.geometry.heads
        if acted != expected:
            raise MeasurementError(f"selector {name} acted in {acted:.0f} of {expected} heads and steps")
        return selector_metrics(stats)

    @property
    def _scale(self) -> float:
        return self.geometry.head_dim**-0.5

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self._dtype)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) if self.device.type == "cuda" else 1000 * (ended - began)

    def _refuse_without(self, numbers: float) -> None:
        needed, free = numbers * self._dtype.itemsize, free_memory(self.device)
        if needed > free:
            raise InputError(
                "context",
                expected=f"one whose caches fit into the {free / 1e9:.1f} GB that are free",
                got=f"{self.schedule.context}, which takes {needed / 1e9:.1f} GB in {len(self.geometry.layers)} layers",
                remedy="Choose a smaller --context, fewer layers or fewer selectors.",
            )


def weighed(mix: PathMix, ordinary: float | None, refreshes: float | None) -> float | None:
    """What an ordinary step and one in which all heads turn give, by how often they come."""
    if ordinary is None or not mix.refresh:
        return ordinary
    return None if refreshes is None else (1 - mix.refresh) * ordinary + mix.refresh * refreshes


def over_steps(values: Sequence[float], one: Contestant, steps: int) -> float:
    """Mean of a value over steps, ordinary ones first, weighed against those in which all heads turn."""

    def mean(first: int, last: int) -> float | None:
        counting = [values[step] for step in range(first, last) if step not in one.grown]
        some = counting or values[first:last]  # a state that grows in all of them does so in generation
        return statistics.fmean(some) if some else None

    whole = weighed(one.mix, mean(0, steps), mean(steps, len(values)))
    return 0.0 if whole is None else whole


def milliseconds(one: Contestant, steps: int) -> tuple[float, float, float]:
    """Time of a step, of the median, the fastest and the slowest repeat of every step."""
    by_step = list(zip(*one.times, strict=True))
    middle, fastest, slowest = (
        over_steps([pick(each) for each in by_step], one, steps) for pick in (statistics.median, min, max)
    )
    return middle, fastest, slowest


def _held(states: Sequence[Any]) -> int:
    """Bytes that states take."""
    return sum(state.nbytes() for state in states)


def _values_of(name: str, repeats: Sequence[Sequence[Mapping[str, float]]]) -> list[list[float]]:
    """One stage's times, 0 in steps that do without it."""
    return [[step.get(name, 0.0) for step in repeat] for repeat in repeats]


def counted(one: Contestant) -> dict[str, float | None]:
    """Path shares and the like, both kinds of steps weighed; candidates are those of the ordinary ones.

    Heads that turn together stand for a refresh, though to the selector they are unlike their past.
    """
    names = [name for name in one.ordinary if name != "candidates"]
    shares = {name: weighed(one.mix, one.ordinary[name], one.refreshes.get(name)) for name in names}
    refreshes, fallbacks, moved = (
        shares["refresh_share"],
        shares["fallback_share"],
        one.refreshes.get("fallback_share") or 0.0,
    )
    if refreshes is not None and fallbacks is not None:
        shares["refresh_share"] = refreshes + one.mix.refresh * moved
        shares["fallback_share"] = fallbacks - one.mix.refresh * moved
    return {**shares, "candidates": one.ordinary.get("candidates")}


def copy_bandwidth(device: str) -> float:
    """GB/s of copies within the device's memory, read and written bytes both counted: the median of 10."""
    where = torch.device(device)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(12):
        began = time.perf_counter()
        target.copy_(source)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - began)
    return 2 * _COPIED / statistics.median(times[2:]) / 1e9


def free_memory(device: torch.device) -> float:
    """Bytes that can still be taken."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for later
        return torch.cuda.mem_get_info(device)[0] + kept
    with contextlib.suppress(OSError, StopIteration, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        return 1024 * float(next(line.split()[1] for line in file if line.startswith("MemAvailable")))
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
