"""Attention over chosen positions in Triton against float64, over layouts, shapes, types, parts and hostile numbers."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.kv import KVView
from sparsesel.ops import backend, indexed_qk, softmax_values, sparse_attention
from sparsesel.ops.launch import recording
from sparsesel.testing import (
    DenseLayout,
    PagedLayout,
    assert_close_to_float64,
    expected_attention,
    hostile_stream,
    random_stream,
)
from sparsesel.testing.inputs import HOSTILE

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=4),
    "paged by token": PagedLayout(block_size=16, order="token"),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The operation's name in its package is the function.
MODULE = importlib.import_module("sparsesel.ops.sparse_attention")


@pytest.fixture(autouse=True)
def triton():
    with backend.using("triton"):
        yield


@pytest.fixture
def in_parts(monkeypatch):
    """Have slots split into so many parts, which so few would not be by themselves."""
    return lambda count: monkeypatch.setattr(MODULE, "num_splits", lambda *_, **__: count)


def streams(seed, lengths, dtype=torch.float32, *, group=2, head_dim=24):
    return random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)


def positions(seed, stream, heads, slots):
    """`[B, heads, slots]` int32: distinct visible positions, ascending, with -1 anywhere; a row may have none."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((stream.batch_size, heads, slots), -1, dtype=torch.int32)
    for row, length in enumerate(stream.lengths(stream.length).tolist()):
        for head in range(heads):
            count = int(torch.randint(0, min(slots, length) + 1, (), generator=generator))
            chosen = torch.randperm(length, generator=generator)[:count].sort().values
            at = torch.randperm(slots, generator=generator)[:count].sort().values
            indices[row, head, at] = chosen.int()
    return indices


def chosen_attention(query, stream, indices, scale):
    """Attention over them in float64."""
    keys, values = stream.logical(stream.length)
    heads = query.shape[1]
    mask = torch.zeros(*indices.shape[:2], keys.shape[2] + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(indices < 0, keys.shape[2], indices).long(), True)
    mask = mask[..., :-1].repeat_interleave(heads // indices.shape[1], dim=1)
    return expected_attention(query, keys, values, mask, scale=scale)


def check(stream, indices, layout="dense", scale=0.15, query=None):
    """Both operations: with scores of their own, and with scores that are known."""
    query = stream.query[:, :, -1:] if query is None else query
    kv = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    output = sparse_attention(query, kv, indices[:, :, None], scale=scale)
    assert output.dtype == query.dtype
    expected = chosen_attention(query, stream, indices, scale)
    assert_close_to_float64(output, expected)
    assert torch.equal(output.isnan(), expected.output.isnan())

    with backend.using("eager"):
        scores = indexed_qk(query, kv, indices, scale=scale)
    known = softmax_values(scores, kv, indices)
    assert known.dtype == torch.float32
    expected = chosen_attention(query.float(), stream, indices, scale)
    assert_close_to_float64(known, expected)
    assert torch.equal(known.isnan(), expected.output.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 4])
def test_layouts_types_and_sharing(layout, dtype, heads):
    stream = streams(0, [63, 17], dtype)
    check(stream, positions(0, stream, heads, 40), layout)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_head_dims(head_dim, dtype, heads):
    stream = streams(1, [40, 33], dtype, head_dim=head_dim)
    check(stream, positions(1, stream, heads, 33), "paged")


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_groups(group, shared):
    stream = streams(2, [20, 9], torch.bfloat16, group=group)
    check(stream, positions(2, stream, 2 if shared else 2 * group, 18))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 64, 65, 130])
@pytest.mark.parametrize("heads", [2, 4])
def test_parts_of_any_number_make_the_whole(in_parts, parts, slots, heads):
    in_parts(parts)
    stream = streams(3, [131, 64])
    check(stream, positions(3, stream, heads, slots))


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 6),
    head_dim=st.integers(1, 40),
    slots=st.integers(1, 100),
    sharing=st.sampled_from(["all", "group", "none"]),
    parts=st.integers(1, 3),
)
@settings(max_examples=15)
def test_any_shape(seed, lengths, layout, dtype, group, head_dim, slots, sharing, parts):
    stream = streams(seed, lengths, dtype, group=group, head_dim=head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "num_splits", lambda *_, **__: parts)
        check(stream, positions(seed, stream, {"all": 1, "group": 2, "none": 2 * group}[sharing], slots), layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dense", "paged by channel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 7, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_every_combination(in_parts, layout, dtype, head_dim, group, shared):
    in_parts(2)
    stream = streams(4, [111, 63, 1], dtype, group=group, head_dim=head_dim)
    check(stream, positions(4, stream, 2 if shared else 2 * group, 111), layout)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("heads", [2, 4])
def test_hostile_numbers_are_those_of_a_softmax(in_parts, kind, heads):
    in_parts(2)
    stream = hostile_stream(random_stream(5, lengths=[90, 66], head_dim=24), kind)
    check(stream, positions(5, stream, heads, 70), query=stream.query[:, :, -2:-1])


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_chosen_gives_zeros(in_parts, heads, parts):
    in_parts(parts)
    stream = streams(6, [80, 80])
    indices = torch.full((2, heads, 70), -1, dtype=torch.int32)
    indices[1, -1, 66] = 3
    check(stream, indices)
    with backend.using("triton"):
        kv = LAYOUTS["dense"](stream.key, stream.value, stream.starts)
        assert not sparse_attention(stream.query[:, :, -1:], kv, indices[:, :, None], scale=0.2)[0].any()


@pytest.mark.parametrize("score", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("heads", [2, 4])
def test_scores_that_are_no_numbers_alone(in_parts, score, heads):
    """Without any finite score a softmax is not a number, other than one over nothing, which is zero."""
    in_parts(2)
    stream = streams(7, [90])
    stream.key[:] = 0.0
    stream.query[:], stream.key[..., 0] = 1.0, score
    indices = positions(7, stream, heads, 70)
    indices[:, 0] = -1
    check(stream, indices)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_part_without_a_finite_score_leaves_the_others_alone(in_parts, heads):
    in_parts(2)
    stream = streams(8, [128])
    stream.query[..., 0] = 1.0
    stream.key[:, :, :64, 0] = float("-inf")
    check(stream, torch.arange(128, dtype=torch.int32).expand(1, heads, -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [2, 4])
def test_what_is_not_chosen_does_not_matter(layout, bad, heads):
    stream = streams(9, [63, 40])
    indices = torch.tensor([-1, 1, 5, -1, 20], dtype=torch.int32).expand(2, heads, 1, 5)
    query = stream.query[:, :, -1:].clone()
    clean = sparse_attention(query, LAYOUTS[layout](stream.key, stream.value, stream.starts), indices, scale=0.2)
    for row, start in enumerate(stream.starts.tolist()):
        for position in set(range(63 - start)) - {1, 5, 20}:
            stream.key[row, :, start + position] = bad
            stream.value[row, :, start + position] = bad
    poisoned = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    assert torch.equal(clean, sparse_attention(query, poisoned, indices, scale=0.2))
    assert clean.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_positions_and_scores_of_any_strides(dtype):
    stream = streams(10, [60, 20])
    indices = positions(10, stream, 4, 20).to(dtype)
    turned = indices.transpose(0, 2).contiguous().transpose(0, 2)
    check(stream, turned)
    check(stream, indices[:, :, ::3])
    check(stream, indices[:, :1].expand(-1, 4, -1))
    query, kv = stream.query[:, :, -1:], LAYOUTS["dense"](stream.key, stream.value, stream.starts)
    scores = indexed_qk(query, kv, indices, scale=0.2)
    other = scores.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(softmax_values(scores, kv, indices), softmax_values(other, kv, turned))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_dim", [3, 40])
@pytest.mark.parametrize("heads", [2, 4])
def test_values_may_have_channels_of_their_own_number(layout, value_dim, heads):
    stream = streams(11, [63, 20])
    value = torch.randn(2, 2, 63, value_dim, generator=torch.Generator().manual_seed(5))
    kv = LAYOUTS[layout](stream.key, value, stream.starts)
    query, indices = stream.query[:, :, -1:], positions(11, stream, heads, 30)
    output = sparse_attention(query, kv, indices[:, :, None], scale=0.2)
    with backend.using("eager"):
        expected = sparse_attention(query, kv, indices[:, :, None], scale=0.2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_addresses_pass_two_to_the_31(tmp_path):
    """Three heads 2^30 numbers apart, in a file that is mostly holes."""
    apart = 1 << 30
    storage = torch.from_file(str(tmp_path / "cache"), shared=True, size=2 * apart + 64, dtype=torch.float16)
    stream = random_stream(12, length=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8).to(torch.float16)
    strided = storage.as_strided((1, 3, 4, 8), (3 * apart, apart, 8, 1))
    strided.copy_(stream.key)
    far, near = KVView.dense(strided, strided), KVView.dense(stream.key, stream.key)
    query = stream.query[:, :, -1:]
    for heads in (3, 6):
        indices = positions(12, stream, heads, 9)
        scores = indexed_qk(query, near, indices, scale=0.3)
        assert torch.equal(softmax_values(scores, far, indices), softmax_values(scores, near, indices))
        indices = indices[:, :, None]
        other = sparse_attention(query, near, indices, scale=0.3)
        assert torch.equal(sparse_attention(query, far, indices, scale=0.3), other)


def test_launches_without_a_look_at_the_device():
    """Heads that share their positions are served by one program; a meta tensor has nothing to look at."""
    meta = torch.device("meta")
    key = torch.empty(2, 2, 600, 64, device=meta)
    kv = KVView.dense(key, key, lengths=torch.empty(2, dtype=torch.int64, device=meta))
    query, scores = torch.empty(2, 8, 1, 64, device=meta), torch.empty(2, 8, 500, device=meta)
    grids = {}
    for heads in (1, 2, 8):
        indices = torch.empty(2, heads, 500, dtype=torch.int32, device=meta)
        with recording() as launches:
            assert sparse_attention(query, kv, indices[:, :, None], scale=0.3).shape == (2, 8, 1, 64)
            assert softmax_values(scores, kv, indices).shape == (2, 8, 1, 64)
        names = [launch.kernel.split(":")[1] for launch in launches]
        assert names == ["sparse_attention_kernel", "combine_kernel", "softmax_values_kernel", "combine_kernel"]
        assert launches[0].grid == launches[2].grid
        grids[heads] = launches[0].grid
    assert grids == {1: (8, 2, 2), 2: (8, 2, 2), 8: (8, 8, 2)}
