"""Scores of chosen keys in Triton against the eager ones: bit for bit, as products of such numbers are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.kv import KVView
from sparsesel.ops import backend, indexed_qk
from sparsesel.ops.indexed_qk import indexed_qk as indexed_qk_triton
from sparsesel.ops.launch import recording
from sparsesel.testing import DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.inputs import HOSTILE

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=4),
    "paged by token": PagedLayout(block_size=16, order="token"),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def streams(seed, lengths, dtype=torch.float32, *, group=2, head_dim=24):
    return random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)


def positions(seed, stream, heads, slots, dtype=torch.int32):
    """`[B, heads, slots]` visible positions in any order, again and again, -1 among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (stream.batch_size, heads, slots)
    drawn = torch.rand(shape, generator=generator) * stream.lengths(stream.length)[:, None, None]
    unused = torch.rand(shape, generator=generator) < 0.2
    return drawn.to(dtype).masked_fill_(unused, -1)


def check(stream, indices, layout="dense", scale=0.15, query=None):
    query = stream.query[:, :, -1:] if query is None else query
    kv = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    with backend.using("triton"):
        scores = indexed_qk(query, kv, indices, scale=scale)
    with backend.using("eager"):
        expected = indexed_qk(query, kv, indices, scale=scale)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_layouts_types_and_sharing(layout, dtype, heads):
    stream = streams(0, [63, 17], dtype)
    check(stream, positions(0, stream, heads, 70), layout)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_head_dims(head_dim, dtype, heads):
    stream = streams(1, [20, 9], dtype, head_dim=head_dim)
    check(stream, positions(1, stream, heads, 20), "paged")


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_groups(group, shared):
    stream = streams(2, [20, 9], torch.bfloat16, group=group)
    check(stream, positions(2, stream, 2 if shared else 2 * group, 20))


@pytest.mark.parametrize("slots", [1, 15, 16, 17, 63, 64, 65, 129])
def test_tiles_of_any_fill(slots):
    stream = streams(3, [30, 1])
    check(stream, positions(3, stream, 4, slots))


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 8),
    head_dim=st.integers(1, 40),
    slots=st.integers(1, 100),
    sharing=st.sampled_from(["all", "group", "none"]),
)
@settings(max_examples=15)
def test_any_shape(seed, lengths, layout, dtype, group, head_dim, slots, sharing):
    stream = streams(seed, lengths, dtype, group=group, head_dim=head_dim)
    check(stream, positions(seed, stream, {"all": 1, "group": 2, "none": 2 * group}[sharing], slots), layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dense", "paged by channel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 7, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_every_combination(layout, dtype, head_dim, group, shared):
    stream = streams(4, [111, 63, 1], dtype, group=group, head_dim=head_dim)
    check(stream, positions(4, stream, 2 if shared else 2 * group, 111), layout)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("heads", [2, 4])
def test_hostile_numbers(kind, heads):
    """What is no number in the one is none in the other, and spoils its own score alone."""
    stream = hostile_stream(random_stream(5, lengths=[40, 21], head_dim=24), kind)
    query = stream.query[:, :, -2:-1]  # the one that is hostile
    check(stream, positions(5, stream, heads, 30), query=query)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_positions_of_any_type_and_strides(dtype):
    stream = streams(6, [40, 20])
    indices = positions(6, stream, 4, 20, dtype)
    check(stream, indices)
    check(stream, indices.transpose(0, 2).contiguous().transpose(0, 2))
    check(stream, indices[:, :, ::3])
    check(stream, indices[:, :1].expand(-1, 4, -1))
    check(stream, indices[1:, :2].expand(2, -1, -1))


def test_queries_of_any_strides():
    stream = streams(7, [40, 20])
    query = stream.query[:, :, -1:].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    check(stream, positions(7, stream, 4, 20), query=query)
    check(stream, positions(7, stream, 2, 20), query=query)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_query_is_not_rounded(dtype):
    """A query that has been turned to another position is float32 whatever the keys are, and the other way round."""
    stream = streams(8, [40, 20])
    query = stream.query[:, :, -1:] + 2.0**-10
    keys = stream.to(dtype)
    for heads in (2, 4):
        check(keys, positions(8, stream, heads, 20), query=query)
        check(stream, positions(8, stream, heads, 20), query=query.to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_are_not_chosen_do_not_matter(layout, bad):
    stream = streams(9, [63, 40])
    indices = torch.tensor([1, 5, -1, 20, -1], dtype=torch.int32).expand(2, 2, 5)
    for row, start in enumerate(stream.starts.tolist()):
        for position in set(range(63 - start)) - {1, 5, 20}:
            stream.key[row, :, start + position] = bad
    check(stream, indices, layout)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_slots_past_a_count_are_left_alone(heads, layout):
    """Neither are their positions looked at, nor their scores written."""
    stream = streams(10, [63, 17])
    query = stream.query[:, :, -1:]
    kv = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    indices = positions(10, stream, heads, 150)
    counts = torch.tensor([[0, 1, 64, 150], [65, 200, 128, 3]], dtype=torch.int32)[:, :heads]
    beyond = torch.arange(150) >= counts[..., None]
    with backend.using("eager"):
        expected = indexed_qk(query, kv, indices, scale=0.2)
    expected = torch.where(beyond.repeat_interleave(4 // heads, dim=1), 7.0, expected)
    indices = indices.masked_fill(beyond, 1 << 30)  # far outside of any cache
    out = torch.full((2, 4, 200), 7.0)[:, :, :150]
    assert indexed_qk_triton(query, kv, indices, scale=0.2, counts=counts, out=out) is out
    assert torch.equal(out, expected)


def test_a_count_for_each_set_of_a_head_that_is_alone():
    """One count for all heads, and strides of its own."""
    stream = streams(11, [63, 17])
    query, kv = stream.query[:, :, -1:], DenseLayout()(stream.key, stream.value, stream.starts)
    indices = positions(11, stream, 4, 80)
    counts = torch.tensor([[9, 70], [70, 9]], dtype=torch.int64).T[:, :1]
    out = torch.full((2, 4, 80), 7.0)
    indexed_qk_triton(query, kv, indices, scale=0.2, counts=counts, out=out)
    with backend.using("eager"):
        expected = indexed_qk(query, kv, indices, scale=0.2)
    assert torch.equal(out, torch.where(torch.arange(80) < counts[:, :, None], expected, 7.0))


def test_addresses_pass_two_to_the_31(tmp_path):
    """Three heads 2^30 numbers apart, in a file that is mostly holes."""
    apart = 1 << 30
    storage = torch.from_file(str(tmp_path / "cache"), shared=True, size=2 * apart + 64, dtype=torch.float16)
    stream = random_stream(12, length=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8).to(torch.float16)
    strided = storage.as_strided((1, 3, 4, 8), (3 * apart, apart, 8, 1))
    strided.copy_(stream.key)
    for heads in (3, 6):
        indices = positions(12, stream, heads, 9)
        with backend.using("triton"):
            scores = indexed_qk(stream.query[:, :, -1:], KVView.dense(strided, strided), indices, scale=0.3)
        with backend.using("eager"):
            near = KVView.dense(stream.key, stream.key)
            assert torch.equal(scores, indexed_qk(stream.query[:, :, -1:], near, indices, scale=0.3))


def test_one_launch_without_a_look_at_the_device():
    """Heads that share their positions are served by one program; a meta tensor has nothing to look at."""
    meta = torch.device("meta")
    key = torch.empty(2, 2, 600, 64, device=meta)
    kv = KVView.dense(key, key, lengths=torch.empty(2, dtype=torch.int64, device=meta))
    query = torch.empty(2, 8, 1, 64, device=meta)
    grids = {}
    for heads in (1, 2, 8):
        indices = torch.empty(2, heads, 500, dtype=torch.int32, device=meta)
        with backend.using("triton"), recording() as launches:
            assert indexed_qk(query, kv, indices, scale=0.3).shape == (2, 8, 500)
        (launch,) = launches
        grids[heads] = launch.grid
    assert grids == {1: (16, 2, 2), 2: (16, 2, 2), 8: (16, 8, 2)}
