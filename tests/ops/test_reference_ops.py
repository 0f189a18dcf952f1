"""Every operation against plain loops in float64, over every layout of a cache."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import (
    dense_attention,
    indexed_qk,
    qk_scores,
    row_topk,
    scores_at,
    softmax_values,
    sparse_attention,
    topk_indices,
)
from sparsesel.testing import (
    DenseLayout,
    Expected,
    PagedLayout,
    assert_close_to_float64,
    expected_attention,
    gamma,
    hostile_scores,
    hostile_stream,
    random_stream,
)

LAYOUTS = {
    "dense": DenseLayout(),
    "contiguous": DenseLayout(spare=0),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=4),
    "paged by token": PagedLayout(block_size=16, order="token"),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
layouts = st.sampled_from(sorted(LAYOUTS))
lengths = st.sampled_from([[1], [2, 1], [63], [111, 63], [17, 1, 16], [7, 7]])
seeds = st.integers(0, 1000)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def case(seed, lengths, layout, dtype=torch.float32, group=2, head_dim=24):
    """A query at the last position of a batch of such lengths, its cache, and the scale."""
    stream = random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)
    query = stream.query[:, :, -1:].clone()
    return stream, query, LAYOUTS[layout](stream.key, stream.value, stream.starts), head_dim**-0.5


def loop_scores(stream, query, scale):
    """Scores by sequence, head and position, and the bound on the float32 error of each."""
    keys, _ = stream.logical(stream.length)
    group = query.shape[1] // keys.shape[1]
    for row, length in enumerate(stream.lengths(stream.length).tolist()):
        for head in range(query.shape[1]):
            q = query[row, head, 0].double()
            for position in range(length):
                products = q * keys[row, head // group, position].double()
                bound = gamma(len(q) + 2) * abs(scale) * float(products.abs().sum())
                yield (row, head, position), scale * float(products.sum()), bound


def random_indices(seed, stream, heads, slots):
    """`[B, heads, slots]` int32: visible positions, ascending, -1 after them, some rows without any."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((stream.batch_size, heads, slots), -1, dtype=torch.int32)
    for row, length in enumerate(stream.lengths(stream.length).tolist()):
        for head in range(heads):
            count = int(torch.randint(0, min(slots, length) + 1, (), generator=generator))
            chosen = torch.randperm(length, generator=generator)[:count]
            indices[row, head, :count] = chosen.sort().values.int()
    return indices


# qk_scores


@given(seeds, lengths, layouts, dtypes, st.sampled_from([1, 2, 7]))
def test_qk_scores_are_every_visible_score(seed, lengths, layout, dtype, group):
    stream, query, kv, scale = case(seed, lengths, layout, dtype, group)
    scores = qk_scores(query, kv, scale=scale)
    assert scores.dtype == torch.float32
    assert scores.shape == (len(lengths), 2 * group, max(lengths))
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    for at, expected, bound in loop_scores(stream, query, scale):
        assert abs(float(scores[at]) - expected) <= bound
        seen[at] = True
    assert torch.equal(scores.isneginf(), ~seen)


def test_qk_scores_take_their_group_from_the_right_key_value_head():
    key = torch.tensor([1.0, 10.0]).view(1, 2, 1, 1).expand(1, 2, 3, 1)
    kv = KVView.dense(key, key)
    scores = qk_scores(torch.ones(1, 6, 1, 1), kv, scale=1.0)
    assert scores[0, :, 0].tolist() == [1, 1, 1, 10, 10, 10]


# topk_indices


@given(seeds, st.sampled_from([1, 2, 63, 111]), st.integers(1, 120), st.booleans())
def test_topk_indices_are_the_best_by_score_then_index(seed, total, topk, hostile):
    generator = torch.Generator().manual_seed(seed)
    scores = hostile_scores(seed, 3, 2, total) if hostile else torch.randn(3, 2, total, generator=generator)
    lengths = torch.randint(1, total + 1, (3, 2), generator=generator)
    check_topk(scores, topk, lengths)
    check_topk(scores, topk, torch.full((3, 2), total))


@given(seeds, st.sampled_from([2, 63, 111]))
def test_topk_indices_take_a_budget_per_row(seed, total):
    generator = torch.Generator().manual_seed(seed)
    scores = hostile_scores(seed, 3, 2, total)
    lengths = torch.randint(1, total + 1, (3, 2), generator=generator)
    budgets = torch.randint(1, total + 9, (3, 2), generator=generator)
    check_topk(scores, budgets, lengths)
    widest = int(budgets.max()) + 3
    wider = topk_indices(scores, budgets, lengths, widest=widest)
    narrow = topk_indices(scores, budgets, lengths)
    padding = torch.full((3, 2, wider.shape[-1] - narrow.shape[-1]), -1, dtype=torch.int32)
    assert torch.equal(wider, torch.cat([narrow, padding], dim=-1))


def check_topk(scores, topk, lengths):
    before = scores.clone()
    indices = topk_indices(scores, topk, lengths)
    assert torch.equal(before.nan_to_num(7.0), scores.nan_to_num(7.0)), "scores are read only"
    assert indices.dtype == torch.int32
    widest = topk if isinstance(topk, int) else int(topk.max())
    assert indices.shape == (*lengths.shape, min(widest, scores.shape[-1]))
    for row in range(lengths.shape[0]):
        for head in range(lengths.shape[1]):
            budget = topk if isinstance(topk, int) else int(topk[row, head])
            expected = best(scores[row, head, : lengths[row, head]].tolist(), budget)
            padding = [-1] * (indices.shape[-1] - len(expected))
            assert indices[row, head].tolist() == expected + padding


def best(scores, topk):
    ranked = [(-(-math.inf if math.isnan(score) else score), index) for index, score in enumerate(scores)]
    return sorted(index for _, index in sorted(ranked)[:topk])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf"), float("inf")])
def test_topk_indices_of_equal_scores_are_the_first(value):
    indices = topk_indices(torch.full((2, 10), value), 3, torch.tensor([10, 2]))
    assert indices.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_topk_indices_prefer_minus_infinity_to_nothing():
    scores = torch.tensor([[float("-inf"), 1.0, float("nan"), 5.0]])
    assert topk_indices(scores, 3, torch.tensor([3])).tolist() == [[0, 1, 2]]


def test_topk_indices_tell_close_scores_apart():
    scores = torch.full((1, 4096), 1.0)
    scores[0, 4095] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert topk_indices(scores, 2, torch.tensor([4096])).tolist() == [[0, 4095]]


# row_topk


@given(st.sampled_from(["6.25%", "10%", "33.3%", "100%", "0.001%", "7%"]), st.lists(st.integers(1, 10**7), min_size=1))
def test_row_topk_is_resolve_topk_of_each_row(topk, lengths):
    assert row_topk(topk, torch.tensor(lengths)).tolist() == [resolve_topk(topk, length) for length in lengths]


def test_row_topk_of_an_absolute_budget_is_that_budget():
    assert row_topk(512, torch.tensor([3, 4000])) == 512


# indexed_qk


@given(seeds, lengths, layouts, dtypes)
def test_indexed_qk_scores_the_chosen_keys_alone(seed, lengths, layout, dtype):
    stream, query, kv, scale = case(seed, lengths, layout, dtype)
    indices = random_indices(seed, stream, 4, 9)
    scores = indexed_qk(query, kv, indices, scale=scale)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.isneginf(), indices < 0)
    for (row, head, position), expected, bound in loop_scores(stream, query, scale):
        for slot in (indices[row, head] == position).nonzero().flatten().tolist():
            assert abs(float(scores[row, head, slot]) - expected) <= bound


# sparse_attention and softmax_values


@given(seeds, lengths, layouts, dtypes, st.sampled_from([1, 2, 4]))
def test_sparse_attention_is_softmax_over_the_chosen(seed, lengths, layout, dtype, heads):
    stream, query, kv, scale = case(seed, lengths, layout, dtype)
    indices = random_indices(seed, stream, heads, 9)
    output = sparse_attention(query, kv, indices[:, :, None], scale=scale)
    assert output.dtype == dtype
    expected = chosen_attention(stream, query, indices, scale)
    assert_close_to_float64(output, expected)
    # A head's own list says the same as one shared by several.
    each = indices.repeat_interleave(4 // heads, dim=1)
    assert_close_to_float64(sparse_attention(query, kv, each[:, :, None], scale=scale), expected)
    known = softmax_values(indexed_qk(query, kv, indices, scale=scale), kv, indices)
    assert known.dtype == torch.float32
    assert torch.equal(output, known.to(dtype))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_list_that_a_group_shares_is_read_once(heads, monkeypatch):
    stream, query, kv, scale = case(0, [20, 9], "dense")
    read = []
    gather = type(kv)._gather

    def counting(self, base, positions):
        read.append(positions.numel())
        return gather(self, base, positions)

    monkeypatch.setattr(type(kv), "_gather", counting)
    sparse_attention(query, kv, random_indices(0, stream, heads, 9)[:, :, None], scale=scale)
    assert read == [2 * max(heads, kv.num_heads) * 9] * 2  # keys and values


def chosen_attention(stream, query, indices, scale):
    keys, values = stream.logical(stream.length)
    mask = torch.zeros(stream.batch_size, 4, keys.shape[2], dtype=torch.bool)
    for row in range(stream.batch_size):
        for head in range(4):
            chosen = indices[row, head * indices.shape[1] // 4]
            mask[row, head, chosen[chosen >= 0].long()] = True
    return expected_attention(query, keys, values, mask, scale=scale)


def test_sparse_attention_of_nothing_is_zero():
    _, query, kv, scale = case(0, [5, 3], "dense")
    indices = torch.full((2, 4, 1, 6), -1, dtype=torch.int32)
    assert not sparse_attention(query, kv, indices, scale=scale).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_attention_reads_nothing_that_is_not_chosen(layout, bad):
    stream, query, _, scale = case(3, [63, 40], "dense")
    indices = torch.tensor([1, 5, 20, -1, -1], dtype=torch.int32).expand(2, 4, 1, 5)
    clean = sparse_attention(query, LAYOUTS[layout](stream.key, stream.value, stream.starts), indices, scale=scale)
    for row, start in enumerate(stream.starts.tolist()):
        for position in set(range(63 - start)) - {1, 5, 20}:
            stream.key[row, :, start + position] = bad
            stream.value[row, :, start + position] = bad
    poisoned = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    assert torch.equal(clean, sparse_attention(query, poisoned, indices, scale=scale))
    assert clean.isfinite().all()


# dense_attention


@given(seeds, lengths, layouts, dtypes, st.sampled_from([1, 2, 7]))
def test_dense_attention_is_softmax_over_everything(seed, lengths, layout, dtype, group):
    stream, query, kv, scale = case(seed, lengths, layout, dtype, group)
    output = dense_attention(query, kv, scale=scale)
    assert output.dtype == dtype
    keys, values = stream.logical(stream.length)
    visible = torch.arange(keys.shape[2]) < stream.lengths(stream.length)[:, None, None]
    mask = visible.expand(-1, 2 * group, -1)
    assert_close_to_float64(output, expected_attention(query, keys, values, mask, scale=scale))


@given(seeds, lengths, layouts)
def test_dense_attention_equals_sparse_attention_over_everything(seed, lengths, layout):
    stream, query, kv, scale = case(seed, lengths, layout)
    everything = torch.arange(max(lengths), dtype=torch.int32)
    indices = torch.where(everything < torch.tensor(lengths)[:, None], everything, -1)[:, None, None]
    dense = dense_attention(query, kv, scale=scale)
    sparse = sparse_attention(query, kv, indices, scale=scale)
    keys, values = stream.logical(stream.length)
    mask = (indices[:, 0] >= 0).expand(-1, 4, -1)
    bound = expected_attention(query, keys, values, mask, scale=scale).bound
    assert_close_to_float64(dense, Expected(sparse.double(), 2 * bound))


# All of them


@pytest.mark.parametrize("value_dim", [8, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_may_have_channels_of_their_own_number(layout, value_dim):
    stream, query, _, scale = case(5, [63, 20], "dense")
    value = torch.randn(2, 2, 63, value_dim, generator=torch.Generator().manual_seed(5))
    kv = LAYOUTS[layout](stream.key, value, stream.starts)
    indices = random_indices(5, stream, 4, 9)
    assert dense_attention(query, kv, scale=scale).shape == (2, 4, 1, value_dim)
    assert sparse_attention(query, kv, indices[:, :, None], scale=scale).shape == (2, 4, 1, value_dim)


@pytest.mark.parametrize("kind", ["nan key", "inf key", "-inf key", "huge keys", "nan query", "zero query"])
def test_hostile_keys_spoil_only_heads_that_attend_to_them(kind):
    stream = hostile_stream(random_stream(6, lengths=[63, 20], head_dim=24), kind)
    query = stream.query[:, :, -2:-1].clone()
    kv = DenseLayout()(stream.key, stream.value, stream.starts)
    indices = random_indices(6, stream, 4, 5)
    output = sparse_attention(query, kv, indices[:, :, None], scale=0.2)
    assert_close_to_float64(output, chosen_attention(stream, query, indices, 0.2))
    scores = qk_scores(query, kv, scale=0.2)
    chosen = topk_indices(scores, 5, kv.lengths[:, None].expand(2, 4))
    assert bool((chosen < kv.lengths[:, None, None]).all())
    assert bool((chosen >= 0).all())


def test_scores_at_reads_chosen_positions_and_marks_padding():
    scores = torch.tensor([[0.5, -1.0, 2.0], [3.0, float("nan"), 4.0]])
    got = scores_at(scores, torch.tensor([[2, 0, -1], [-1, 2, 0]], dtype=torch.int32))
    assert got.tolist() == [[2.0, 0.5, -float("inf")], [-float("inf"), 4.0, 3.0]]
