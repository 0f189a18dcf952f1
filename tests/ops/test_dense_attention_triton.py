"""Dense attention in Triton against float64, over layouts, shapes, types, parts and hostile numbers."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention
from sparsesel.ops.launch import recording
from sparsesel.ops.split_k import num_splits
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
MODULE = importlib.import_module("sparsesel.ops.dense_attention")


@pytest.fixture(autouse=True)
def triton():
    with backend.using("triton"):
        yield


@pytest.fixture
def in_parts(monkeypatch):
    """Have keys split into so many parts, which so few keys would not be by themselves."""
    return lambda count: monkeypatch.setattr(MODULE, "num_splits", lambda *_, **__: count)


def check(stream, layout="dense", scale=0.15):
    """Attention of the last token of every sequence."""
    query = stream.query[:, :, -1:]
    output = dense_attention(query, LAYOUTS[layout](stream.key, stream.value, stream.starts), scale=scale)
    assert output.dtype == query.dtype
    keys, values = stream.logical(stream.length)
    visible = torch.arange(keys.shape[2]) < stream.lengths(stream.length)[:, None, None]
    mask = visible.expand(-1, query.shape[1], -1)
    expected = expected_attention(query, keys, values, mask, scale=scale)
    assert_close_to_float64(output, expected)
    assert torch.equal(output.isnan(), expected.output.isnan())


def streams(seed, lengths, dtype=torch.float32, *, group=2, head_dim=24):
    return random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout, dtype):
    check(streams(0, [63, 17], dtype), layout)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(head_dim, dtype):
    check(streams(1, [70, 33], dtype, head_dim=head_dim), "paged")


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_groups(group, layout):
    check(streams(2, [40, 9], torch.bfloat16, group=group), layout)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [[1], [63, 64], [65, 1], [128, 2, 129]])
def test_parts_of_any_number_make_the_whole(in_parts, parts, lengths):
    in_parts(parts)
    check(streams(3, lengths), "paged by token")


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 16),
    head_dim=st.integers(1, 40),
    parts=st.integers(1, 4),
)
@settings(max_examples=15)
def test_any_shape(seed, lengths, layout, dtype, group, head_dim, parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "num_splits", lambda *_, **__: parts)
        check(streams(seed, lengths, dtype, group=group, head_dim=head_dim), layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dense", "paged by channel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 7, 16])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_combination(in_parts, layout, dtype, head_dim, group, parts):
    in_parts(parts)
    check(streams(4, [111, 63, 1], dtype, group=group, head_dim=head_dim), layout)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers_are_those_of_a_softmax(in_parts, kind):
    in_parts(2)
    check(hostile_stream(random_stream(5, lengths=[101, 66], head_dim=24), kind))


@pytest.mark.parametrize("score", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("parts", [1, 2])
def test_scores_that_are_no_numbers_alone(in_parts, score, parts):
    """Without any finite score a softmax is not a number, in whatever parts it is taken."""
    in_parts(parts)
    stream = streams(6, [90])
    stream.key[:] = 0.0
    stream.query[:], stream.key[..., 0] = 1.0, score
    check(stream, "paged")


def test_a_part_without_a_finite_score_leaves_the_others_alone(in_parts):
    in_parts(2)
    stream = streams(7, [128])
    stream.query[..., 0] = 1.0
    stream.key[:, :, :64, 0] = float("-inf")
    check(stream)


def test_a_sequence_without_tokens_gives_zeros(in_parts):
    in_parts(2)
    stream = streams(8, [70, 70])
    kv = KVView.dense(stream.key, stream.value, starts=torch.tensor([70, 5]))
    output = dense_attention(stream.query[:, :, -1:], kv, scale=0.2)
    assert not output[0].any()
    assert output[1].all()


def test_lengths_are_those_of_the_device():
    """Columns past a length are room to grow: neither read nor counted."""
    stream = streams(9, [80, 80])
    lengths, query = torch.tensor([33, 64]), stream.query[:, :, -1:]
    kv = KVView.dense(stream.key, stream.value, lengths=lengths)
    output = dense_attention(query, kv, scale=0.2)
    for row, length in enumerate(lengths.tolist()):
        alone = KVView.dense(stream.key[row : row + 1, :, :length], stream.value[row : row + 1, :, :length])
        assert torch.equal(output[row : row + 1], dense_attention(query[row : row + 1], alone, scale=0.2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_dim", [3, 40])
def test_values_may_have_channels_of_their_own_number(layout, value_dim):
    stream = streams(10, [63, 20])
    value = torch.randn(2, 2, 63, value_dim, generator=torch.Generator().manual_seed(5))
    kv = LAYOUTS[layout](stream.key, value, stream.starts)
    query = stream.query[:, :, -1:]
    output = dense_attention(query, kv, scale=0.2)
    with backend.using("eager"):
        torch.testing.assert_close(output, dense_attention(query, kv, scale=0.2), rtol=1e-5, atol=1e-5)


def test_queries_of_any_strides():
    stream = streams(11, [40, 40])
    kv = DenseLayout()(stream.key, stream.value, stream.starts)
    query = stream.query[:, :, -1:]  # heads lie T · D apart
    turned = query.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert turned.stride() != query.stride()
    assert torch.equal(dense_attention(query, kv, scale=0.2), dense_attention(turned, kv, scale=0.2))


def test_addresses_pass_two_to_the_31(tmp_path):
    """Three heads 2^30 numbers apart, in a file that is mostly holes."""
    apart = 1 << 30
    storage = torch.from_file(str(tmp_path / "cache"), shared=True, size=2 * apart + 64, dtype=torch.float16)
    stream = random_stream(12, length=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8).to(torch.float16)
    strided = storage.as_strided((1, 3, 4, 8), (3 * apart, apart, 8, 1))
    strided.copy_(stream.key)
    query = stream.query[:, :, -1:]
    output = dense_attention(query, KVView.dense(strided, strided), scale=0.3)
    assert torch.equal(output, dense_attention(query, KVView.dense(stream.key, stream.key), scale=0.3))


def test_more_query_heads_than_a_tile_has_rows_are_refused():
    stream = random_stream(0, length=4, num_attention_heads=17, num_key_value_heads=1, head_dim=8)
    with pytest.raises(InputError, match=r"group size.*at most 16.*backend=eager"):
        dense_attention(stream.query[:, :, -1:], KVView.dense(stream.key, stream.value), scale=0.3)


@pytest.mark.parametrize("page_size", [0, 16])
def test_launches_without_a_look_at_the_device(page_size):
    """Two kernels, and splits by what the host knows."""
    layout = PagedLayout(page_size) if page_size else DenseLayout()
    stream = random_stream(0, length=600, batch=2, head_dim=16)
    kv = layout(stream.key, stream.value, None)
    with recording() as launches:
        dense_attention(stream.query[:, :, -1:], kv, scale=0.3)
    assert [launch.kernel.split(":")[1] for launch in launches] == ["dense_attention_kernel", "combine_kernel"]
    assert launches[0].grid == (num_splits(4, 600), 2, 2)


@given(st.integers(1, 4096), st.integers(0, 5_000_000), st.sampled_from([16, 64, 256]))
def test_splits_keep_a_device_busy_and_are_few_enough_to_combine(programs, keys, least):
    splits = num_splits(programs, keys, least=least)
    assert 1 <= splits <= 128
    assert splits == 1 or (splits - 1) * least < keys
