"""How long one decode step of one layer takes, each selector beside the others, in and out of a CUDA graph.

What a model's other layers would leave of a step's data in the cache is nothing, so the cache is overwritten before
every step that is timed. Keys and values lie in memory of a fixed size, and the lengths on the device: what a graph
replays, and what is launched step by step, are the very same steps from the same state.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu.graphs import Outputs, captured
from gpu.inputs import drifting, keys_alone
from gpu.selectors import build
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.selector import Counters, Selector

NO_PATHS = ("steps", "selected", "visible", "candidates")
SHOWN = 40  # queries of the prompt's end

SCENARIOS = {"reuse": 0.0, "mixed": 0.1}
"""How often queries break off from the ones before. Queries that never do are what ReTopK reuses in every step."""


@dataclass(frozen=True)
class Sizes:
    """Of the layer that is timed.

    Attributes:
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: D.
        dtype: Of everything.
        settling: Steps before any is timed, so that states hold supports of steps.
        warmup: Steps not timed after that, in each mode.
        rounds: Steps timed.
    """

    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    settling: int = 40
    warmup: int = 5
    rounds: int = 60


class Layer:
    """A layer's cache at one context: the last timed step sees as many keys."""

    def __init__(self, sizes: Sizes, context: int, jump: float, device: str) -> None:
        self.sizes, self.device = sizes, device
        generator = torch.Generator(device).manual_seed(context)
        self._timed = sizes.warmup + sizes.rounds
        steps = SHOWN + sizes.settling + self._timed
        dtype = getattr(torch, sizes.dtype)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        walk = drifting(noise(1, sizes.heads, steps, sizes.head_dim), generator, 0.97, jump)
        self.queries = walk.to(dtype)
        cache = (1, sizes.kv_heads, context, sizes.head_dim)
        keys, values = (noise(*cache).to(dtype) for _ in range(2))
        self.lengths = torch.zeros(1, dtype=torch.int64, device=device)
        self.kv = KVView.dense(keys, values, lengths=self.lengths)
        self.query = self.queries[:, :, :1].clone()
        self.spec = keys_alone(self.queries, keys, values).layer_spec()

    def at(self, step: int) -> None:
        """Be at that step after the prompt."""
        self.query.copy_(self.queries[:, :, SHOWN + step : SHOWN + step + 1])
        self.lengths.fill_(self.kv.max_length - self.sizes.settling - self._timed + step + 1)

    def settled(self, selector: Selector, scale: float) -> Any:
        """A state that has seen the prompt's end and some steps."""
        state = selector.init_state(self.spec)
        self.at(-1)
        selector.observe_prefill(self.queries[:, :, :SHOWN], self.kv, state, scale=scale)
        for step in range(self.sizes.settling):
            self.at(step)
            selector.attend(self.query, self.kv, state, scale=scale)
        return state


class Timer:
    """Times steps by events on the device, its cache overwritten before each."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = max(256 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._other = torch.empty(size, dtype=torch.int8, device=device)

    def time(
        self, step: Callable[[], Any], prepare: Callable[[int], None], first: int, rounds: int, *, idle: bool
    ) -> list[float]:
        """Milliseconds of each round.

        Args:
            step: What is timed.
            prepare: Called with the number of the round before each, and not timed.
            first: Number of the first round.
            rounds: How many.
            idle: Whether the device waits when a round begins, so that what the host takes to launch it shows; else
                the host is ahead of the device.
        """
        pairs = []
        for at in range(first, first + rounds):
            prepare(at)
            self._other.zero_()
            if idle:
                torch.cuda.synchronize()
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            step()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


class HostTimer(Timer):
    """Times by the host's clock, for a run without a device: of no meaning but that everything runs."""

    def __init__(self, device: str) -> None:
        self.device = device

    def time(
        self, step: Callable[[], Any], prepare: Callable[[int], None], first: int, rounds: int, *, idle: bool
    ) -> list[float]:
        """Milliseconds of each round."""
        times = []
        for at in range(first, first + rounds):
            prepare(at)
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
        return times


Capture = Callable[[Callable[[], Outputs], str], Callable[[], Outputs]]


def time_selector(
    spec: str,
    level: int | None,
    context: int,
    scenario: str,
    bandwidth: float | None,
    device: str,
    sizes: Sizes = Sizes(),
    timer: Callable[[str], Timer] = Timer,
    capture: Capture = captured,
) -> dict[str, Any]:
    """One selector at one context: milliseconds, paths of the timed steps, bytes by design."""
    selector, scale = build(spec, level), sizes.head_dim**-0.5
    layer, clock = Layer(sizes, context, SCENARIOS[scenario], device), timer(device)
    row: dict[str, Any] = {"context": context, "scenario": scenario, "selector": named(spec, level)}
    with backend.using("triton"):
        settled = layer.settled(selector, scale)
        for mode in ("launched", "graph"):
            state = settled.clone()

            def step(state: Any = state) -> Outputs:
                return (selector.attend(layer.query, layer.kv, state, scale=scale),)

            layer.at(sizes.settling)
            step()  # a new state has taken its memory, and everything is compiled
            try:
                run, idle = (capture(step, device), False) if mode == "graph" else (step, True)
            except RuntimeError as error:
                row["error"] = f"not captured in a graph: {str(error).strip()[:500]}"
                break
            clock.time(run, layer.at, sizes.settling + 1, sizes.warmup - 1, idle=idle)
            if mode == "launched":
                state.counters = Counters()  # of the timed steps alone
            times = clock.time(run, layer.at, sizes.settling + sizes.warmup, sizes.rounds, idle=idle)
            row |= _summary(times, mode)
            if mode == "launched":
                row["shares"] = shares(state.counters)
    cost = selector.cost(layer.spec, context)
    row |= {"bytes": cost.bytes_read, "state_bytes": cost.state_bytes}
    return row | roofline(row, bandwidth)


def named(spec: str, level: int | None) -> str:
    """A selector's name in tables."""
    return spec if level is None else f"{spec} L{level}"


def shares(counters: Counters) -> dict[str, float]:
    """Share of (head, step) that each path took, and keys per head and step."""
    total = {name: float(values.sum()) for name, values in counters.read().items()}
    found = {name: value / total["steps"] for name, value in total.items() if name not in NO_PATHS}
    found["attended"] = total["selected"] / total["steps"]
    if total.get("reuse"):
        found["candidates"] = total.get("candidates", math.nan) / total["reuse"]
    return found


SDPA = {
    "sdpa flash": (SDPBackend.FLASH_ATTENTION, False),
    "sdpa efficient": (SDPBackend.EFFICIENT_ATTENTION, False),
    "sdpa flash, grouped": (SDPBackend.FLASH_ATTENTION, True),
}
"""torch's own dense attention: over keys repeated for every query head, and where it can, over shared ones."""


def time_sdpa(
    name: str,
    context: int,
    bandwidth: float | None,
    device: str,
    sizes: Sizes = Sizes(),
    timer: Callable[[str], Timer] = Timer,
    capture: Capture = captured,
) -> dict[str, Any]:
    """One of `SDPA` at one context; a kernel that torch does not have here is said to be missing."""
    kind, grouped = SDPA[name]
    layer, clock = Layer(sizes, context, 0.0, device), timer(device)
    keys, values = layer.kv.keys, layer.kv.values
    if not grouped:
        keys, values = (part.repeat_interleave(sizes.heads // sizes.kv_heads, dim=1) for part in (keys, values))

    def step() -> Outputs:
        with sdpa_kernel(kind):
            return (scaled_dot_product_attention(layer.query, keys, values, enable_gqa=grouped),)

    row: dict[str, Any] = {"context": context, "scenario": "reuse", "selector": name}
    try:
        step()
    except RuntimeError as error:
        return row | {"missing": str(error).strip().splitlines()[0][:300]}
    for mode in ("launched", "graph"):
        run, idle = (capture(step, device), False) if mode == "graph" else (step, True)
        clock.time(run, layer.at, 0, sizes.warmup, idle=idle)
        row |= _summary(clock.time(run, layer.at, sizes.warmup, sizes.rounds, idle=idle), mode)
    row["bytes"] = 2 * keys.numel() * keys.element_size()
    return row | roofline(row, bandwidth)


def _summary(times: list[float], mode: str) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {f"{mode}_ms": middle, f"{mode}_ms_25": low, f"{mode}_ms_75": high}


def roofline(row: dict[str, Any], bandwidth: float | None) -> dict[str, Any]:
    """Share of the measured bandwidth that the bytes by design make of the time in a graph."""
    if bandwidth is None or "graph_ms" not in row:
        return {"roofline_share": None}
    return {"roofline_share": row["bytes"] / bandwidth / (row["graph_ms"] / 1e3)}
