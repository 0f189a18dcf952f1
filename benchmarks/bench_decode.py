"""One decode step of every registered selector, side by side in one process, grouped by context.

    make bench                                        # every selector at 4K, 16K and 64K
    make bench ARGS='--contexts 16384 --selectors "full exact_topk retopk" --jump 0'

A selector is shown the last queries of a prompt and decodes some steps before any is timed, so that what it remembers
are supports that it really had. Every timed round is the next step of the same sequence: a new query, one more key.
Queries drift as they do in decoding, and now and then break off; with `--jump 0` they only drift, so that ReTopK's
every step is a reuse step. The summary says which paths the timed steps took. Nothing is asserted about time.
"""

from dataclasses import dataclass

import pytest
import torch

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.rotary import Rotary
from sparsesel.selector import Counters, LayerSpec

LAYER_IDX = 16  # some selectors leave the first layers dense
SHOWN = 32  # queries of the prompt's end
NO_PATHS = ("steps", "selected", "visible", "candidates")


@dataclass(frozen=True)
class Workload:
    """One layer's sequence, of which the last `queries.shape[2]` tokens have a query.

    Attributes:
        queries: `[1, Hq, S, D]`.
        keys: `[1, Hkv, L, D]`.
        values: Likewise.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def step(self, index: int) -> tuple[torch.Tensor, KVView]:
        """Query and cache of the token with query `index`."""
        length = self.keys.shape[2] - self.queries.shape[2] + index + 1
        return self.queries[:, :, index : index + 1], KVView.dense(self.keys[:, :, :length], self.values[:, :, :length])

    def layer(self) -> LayerSpec:
        """The layer it comes from."""
        dim = self.keys.shape[3]
        return LayerSpec(
            layer_idx=LAYER_IDX,
            num_attention_heads=self.queries.shape[1],
            num_key_value_heads=self.keys.shape[1],
            head_dim=dim,
            dtype=self.keys.dtype,
            device=self.keys.device,
            rotary=Rotary(10000.0 ** -(torch.arange(0, dim, 2, device=self.keys.device) / dim)),
        )


@pytest.fixture(scope="module")
def workload(request) -> Workload:
    """The last timed step sees as many keys as the context names."""
    option = request.config.option
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    steps = min(request.param, SHOWN + option.warmup_steps + option.rounds)  # a short prompt shows fewer
    walk = [noise(1, option.heads, 1, option.head_dim)]
    for _ in range(steps - 1):
        fresh = noise(1, option.heads, 1, option.head_dim)
        drifted = option.correlation * walk[-1] + (1 - option.correlation**2) ** 0.5 * fresh
        jumps = torch.rand(1, option.heads, 1, 1, generator=generator) < option.jump
        walk.append(torch.where(jumps, fresh, drifted))
    cache = (1, option.kv_heads, request.param, option.head_dim)
    parts = (torch.cat(walk, dim=2), noise(*cache), noise(*cache))
    return Workload(*(part.to(option.device, getattr(torch, option.dtype)) for part in parts))


@pytest.fixture(autouse=True)
def chosen_backend(request):
    with backend.using(request.config.option.backend):
        yield


def test_step(workload, spec, config_of, record, request, benchmark):
    option = request.config.option
    config = config_of[spec]
    selector, layer = make_selector(config), workload.layer()
    scale = layer.head_dim**-0.5
    state = selector.init_state(layer)
    steps = workload.queries.shape[2]
    shown = steps - option.warmup_steps - option.rounds
    _, kv = workload.step(shown - 1)
    selector.observe_prefill(workload.queries[:, :, :shown], kv, state, scale=scale)
    for index in range(shown, steps - option.rounds):
        query, kv = workload.step(index)
        selector.attend(query, kv, state, scale=scale)
    upcoming = iter(range(steps - option.rounds, steps))
    state.counters = Counters()  # of the timed steps alone

    def attend(query: torch.Tensor, kv: KVView) -> None:
        selector.attend(query, kv, state, scale=scale)
        if option.device != "cpu":
            torch.cuda.synchronize()

    benchmark.group = f"context {workload.keys.shape[2]}"
    benchmark.pedantic(attend, setup=lambda: (workload.step(next(upcoming)), {}), rounds=option.rounds, iterations=1)

    total = {name: float(values.sum()) for name, values in state.counters.read().items()}
    cost = selector.cost(layer, workload.keys.shape[2])
    shares = {name: value / total["steps"] for name, value in total.items() if name not in NO_PATHS}
    row = {
        "selector": spec,
        "context": workload.keys.shape[2],
        # None under --benchmark-disable
        "ms": benchmark.stats.stats.median * 1e3 if benchmark.stats is not None else None,
        "bytes_read": cost.bytes_read,
        "attended": total["selected"] / total["steps"],
        "candidates": total["candidates"] / total["reuse"] if total.get("reuse") else None,
        "shares": shares,
        "config": config.model_dump(mode="json"),
    }
    benchmark.extra_info.update(row)
    record(row)
