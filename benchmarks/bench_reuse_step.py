"""ReTopK's reuse step beside Exact Top-K's and dense attention's step, on the CPU, from one run.

    make bench-reuse          # or: pytest benchmarks/bench_reuse_step.py

28 query heads, 4 key-value heads, head_dim 128, float32, batch 1: one layer's decode step at 16K, 64K and 128K keys.
Queries are correlated, as in decoding, so that ReTopK reuses; a measurement in which it did not is refused. Nothing
is asserted about time.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparsesel.kv import KVView
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 28, 4, 128
LENGTHS = {"16K": 16 * 1024, "64K": 64 * 1024, "128K": 128 * 1024}
SELECTORS = ("full", "exact_topk", "retopk")
SCALE = HEAD_DIM**-0.5
RECENT = 32  # past queries shown to the selectors
ROUNDS = 15


@pytest.fixture(scope="module")
def layer() -> LayerSpec:
    return LayerSpec(0, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=LENGTHS)
def case(request: pytest.FixtureRequest) -> tuple[str, KVView, torch.Tensor]:
    """Name of the length, the cache, and the last `RECENT` + 1 queries: a walk whose neighbours have cosine 0.97."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, NUM_KV_HEADS, LENGTHS[request.param], HEAD_DIM)
    keys = torch.randn(shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    walk = [torch.randn(1, NUM_HEADS, 1, HEAD_DIM, generator=generator)]
    for _ in range(RECENT):
        fresh = torch.randn(1, NUM_HEADS, 1, HEAD_DIM, generator=generator)
        walk.append(0.97 * walk[-1] + (1 - 0.97**2) ** 0.5 * fresh)
    return request.param, KVView.dense(keys, values), torch.cat(walk, dim=2)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], tuple[float, str]]]:
    """Median milliseconds and a remark by (length, selector), printed side by side at the end."""
    rows: dict[tuple[str, str], tuple[float, str]] = {}
    yield rows
    lines = [f"{'keys':>6} {'full':>9} {'exact_topk':>11} {'retopk reuse':>13} {'exact/reuse':>12}  reuse path"]
    for length in LENGTHS:
        if all((length, name) in rows for name in SELECTORS):
            full, exact, reuse = (rows[length, name][0] for name in SELECTORS)
            remark = rows[length, "retopk"][1]
            lines.append(f"{length:>6} {full:9.2f} {exact:11.2f} {reuse:13.2f} {exact / reuse:11.2f}x  {remark}")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\nOne decode step, median ms of {ROUNDS}, {torch.get_num_threads()} threads", *lines, sep="\n")


@pytest.mark.parametrize("name", SELECTORS)
def test_step(name, case, layer, table, benchmark):
    length, kv, queries = case
    selector = make_selector(name)
    state = selector.init_state(layer)
    selector.observe_prefill(queries[:, :, :-1], kv.drop_last(1), state, scale=SCALE)
    current = queries[:, :, -1:]
    # A step may be repeated at one position: its own entry is never among those that it can recall. The first
    # one also builds the supports of the prompt's queries, so it is not timed.
    selector.attend(current, kv, state, scale=SCALE)
    benchmark.pedantic(
        selector.attend, args=(current, kv, state), kwargs={"scale": SCALE}, rounds=ROUNDS, warmup_rounds=2
    )
    total = {key: float(value.sum()) for key, value in state.counters.read().items()}
    remark = ""
    if name == "retopk":
        share = total["reuse"] / total["steps"]
        candidates = total["candidates"] / max(total["reuse"], 1)
        remark = f"{share:.1%} of heads, {candidates:.0f} candidates"
        benchmark.extra_info.update(reuse_share=share, candidates=candidates)
        if share < 1:
            pytest.fail(f"at {length} only {remark} reused: this would time another path", pytrace=False)
    if benchmark.stats is not None:  # None under --benchmark-disable
        table[length, name] = (benchmark.stats.stats.median * 1e3, remark)
