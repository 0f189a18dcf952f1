"""Exact Top-K and dense attention against their plain-loop references, and what a step of theirs costs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.config import resolve_topk
from sparsesel.ops import row_topk, topk_indices
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_exact_topk import reference as exact_reference
from sparsesel_full import reference as full_reference

LAYER = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))


def check_step(step, topk, scale):
    """A step's support and output against the loops, row by row and head by head."""
    group = step.query.shape[1] // step.keys.shape[1]
    for row, length in enumerate(step.lengths.tolist()):
        for head in range(step.query.shape[1]):
            query = step.query[row, head, 0].tolist()
            keys, values = (part[row, head // group, :length].tolist() for part in (step.keys, step.values))
            support = exact_reference.support(query, keys, resolve_topk(topk, length), scale=scale)
            assert step.mask[row, head].nonzero().flatten().tolist() == support
            scores = [sum(q * k for q, k in zip(query, keys[at], strict=True)) for at in support]
            if all(math.isfinite(score) for score in scores):
                expected = exact_reference.attend(query, keys, values, support, scale=scale)
                torch.testing.assert_close(
                    step.output[row, head, 0].double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5
                )


@given(
    seed=st.integers(0, 1000),
    lengths=st.sampled_from([[24], [24, 24], [24, 9, 17]]),
    topk=st.sampled_from([1, 5, 23, 24, 40, "6.25%", "50%", "100%"]),
    kind=st.sampled_from(["as it is", *HOSTILE]),
    paged=st.booleans(),
)
def test_exact_topk_matches_the_loops(seed, lengths, topk, kind, paged):
    stream = random_stream(seed, lengths=lengths, head_dim=8)
    if kind != "as it is":
        stream = hostile_stream(stream, kind)
    replay = Replay(make_selector("exact_topk", topk=topk), stream, layout=PagedLayout() if paged else None)
    replay.prefill(20)
    for step in replay.steps(4):
        check_step(step, topk, replay.scale)
    counters = {name: float(value.sum()) for name, value in replay.state.counters.read().items()}
    assert counters["exact"] == counters["steps"] == 4 * 4 * len(lengths)


@given(seed=st.integers(0, 1000), lengths=st.sampled_from([[20], [20, 7]]))
def test_full_matches_the_loops(seed, lengths):
    replay = Replay(make_selector("full"), random_stream(seed, lengths=lengths, head_dim=8)).prefill(17)
    for step in replay.steps(3):
        for row, length in enumerate(step.lengths.tolist()):
            for head in range(4):
                keys, values = (part[row, head // 2, :length].tolist() for part in (step.keys, step.values))
                query = step.query[row, head, 0].tolist()
                expected = full_reference.attend(query, keys, values, scale=replay.scale)
                torch.testing.assert_close(
                    step.output[row, head, 0].double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5
                )


@given(
    percent=st.one_of(st.integers(1, 100), st.floats(0.001, 100).map(lambda x: round(x, 3)).filter(bool)),
    lengths=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20),
)
def test_budget_of_rows_is_the_budget_of_each(percent, lengths):
    topk = f"{percent}%"
    rows = row_topk(topk, torch.tensor(lengths))
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [resolve_topk(topk, length) for length in lengths]
    assert row_topk(7, torch.tensor(lengths)) == 7


@given(seed=st.integers(0, 10_000), levels=st.integers(1, 6), columns=st.integers(1, 40), data=st.data())
def test_topk_of_tied_rows_with_budgets_and_lengths_of_their_own(seed, levels, columns, data):
    """Ties across each row's own edge, which a partial sort to the widest budget does not settle."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (5, columns), generator=generator).float()
    scores[torch.rand(5, columns, generator=generator) < 0.1] = -math.inf
    scores[torch.rand(5, columns, generator=generator) < data.draw(st.sampled_from([0.0, 0.1]))] = math.nan
    draw_rows = st.lists(st.integers(1, columns), min_size=5, max_size=5)
    topk, lengths = data.draw(draw_rows), data.draw(st.one_of(st.just([columns] * 5), draw_rows))
    found = topk_indices(scores, torch.tensor(topk), torch.tensor(lengths), widest=max(topk))
    for row in range(5):
        ranked = [(math.inf if math.isnan(s) else -s, at) for at, s in enumerate(scores[row, : lengths[row]].tolist())]
        expected = sorted(at for _, at in sorted(ranked)[: topk[row]])
        assert [at for at in found[row].tolist() if at >= 0] == expected


def test_costs_are_the_stated_fractions_of_dense_attention():
    """Of 2·L·D numbers per key-value head: all for full, 0.502 and score traffic for Exact Top-K at 128K, K = 512."""
    length = 128 * 1024
    full = make_selector("full").cost(LAYER, length)
    exact = make_selector("exact_topk").cost(LAYER, length)
    assert full.bytes_read == 2 * 4 * length * 128 * 2
    assert (exact.key_bytes + exact.value_bytes) / full.bytes_read == pytest.approx(0.502, abs=5e-4)
    assert exact.score_bytes == 2 * 4 * 28 * length
    assert (full.attended, exact.attended) == (length, 512)
    assert full.state_bytes == exact.state_bytes == exact.metadata_bytes == 0
    assert make_selector("exact_topk,topk=6.25%").cost(LAYER, length).attended == length / 16
    assert make_selector("exact_topk").cost(LAYER, 100).attended == 100
