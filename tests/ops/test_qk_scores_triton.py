"""Scores of every key in Triton: the reference's on numbers whose products are exact, float64's on others."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.kv import KVView
from sparsesel.ops import backend, qk_scores, reference
from sparsesel.ops.launch import recording
from sparsesel.testing import DenseLayout, PagedLayout, gamma, hostile_stream, random_stream
from sparsesel.testing.inputs import HOSTILE

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "static": DenseLayout(spare=41, static=True),
    "paged": PagedLayout(block_size=4),
    "paged by token": PagedLayout(block_size=16, order="token"),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILES = [8, 16, 32, 64, 128]
# The operation's name in its package is the function.
MODULE = importlib.import_module("sparsesel.ops.qk_scores")


@pytest.fixture(autouse=True)
def triton():
    with backend.using("triton"):
        yield


@pytest.fixture
def in_parts(monkeypatch):
    """Have keys split into so many parts, which so few keys would not be by themselves."""
    return lambda count: monkeypatch.setattr(MODULE, "num_splits", lambda *_: count)


def streams(seed, lengths, dtype=torch.float32, *, group=2, head_dim=24):
    return random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check(stream, layout="dense", tile=None, scale=0.15):
    """Scores of the last token of every sequence, and the maxima of their tiles where a size is given."""
    query = stream.query[:, :, -1:]
    kv = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    expected = reference.qk_scores(query, kv, scale=scale)
    if tile is None:
        same(qk_scores(query, kv, scale=scale), expected)
        return
    scores, maxima = MODULE.scores_and_maxima(query, kv, scale=scale, tile=tile)
    assert maxima.shape == (*scores.shape[:2], -(-kv.max_length // tile))
    for row, length in enumerate(kv.lengths.tolist()):
        visible = expected[row, :, :length]
        same(scores[row, :, :length], visible)
        tiles = visible.masked_fill(visible.isnan(), float("-inf")).split(tile, dim=1)
        for at, part in enumerate(tiles if length else ()):
            same(maxima[row, :, at], part.amax(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout, dtype):
    check(streams(0, [63, 17], dtype), layout)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(head_dim, dtype):
    check(streams(1, [70, 33], dtype, head_dim=head_dim), "paged", 32)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_groups(group):
    check(streams(2, [40, 9], torch.bfloat16, group=group), "paged", 16)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [[1], [63, 64], [65, 1], [128, 2, 129]])
def test_parts_of_any_number_make_the_whole(in_parts, parts, lengths):
    in_parts(parts)
    check(streams(3, lengths), "paged by token")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [64, 9], [129, 127]])
@pytest.mark.parametrize("tile", TILES)
def test_maxima_of_tiles_of_any_size(in_parts, parts, lengths, tile):
    """Tiles shorter and longer than what a program looks at in one go."""
    in_parts(parts)
    check(streams(4, lengths), tile=tile)


@pytest.mark.parametrize("tile", [None, 8, 128])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers(in_parts, kind, tile):
    in_parts(2)
    check(hostile_stream(random_stream(5, lengths=[101, 66], head_dim=24), kind), tile=tile)


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 16),
    head_dim=st.integers(1, 40),
    parts=st.integers(1, 4),
    tile=st.sampled_from([None, *TILES]),
)
@settings(max_examples=15)
def test_any_shape(seed, lengths, layout, dtype, group, head_dim, parts, tile):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "num_splits", lambda *_: parts)
        check(streams(seed, lengths, dtype, group=group, head_dim=head_dim), layout, tile)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_combination(in_parts, layout, dtype, head_dim):
    in_parts(2)
    for group in (1, 2, 5, 7, 16):
        stream = streams(6, [111, 63, 1], dtype, group=group, head_dim=head_dim)
        for tile in (None, 8, 32, 128):
            check(stream, layout, tile)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_stays_within_its_bound(dtype):
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(2, heads, n, 80, generator=generator).to(dtype) for heads, n in ((6, 1), (2, 90)))
    scores = qk_scores(query, KVView.dense(key, key), scale=0.1).double()
    q, k = query.double().view(2, 2, 3, 80), key.double().transpose(2, 3)
    bound = (gamma(82) * 0.1 * (q.abs() @ k.abs())).view(2, 6, 90)
    assert bool(((scores - (q @ k * 0.1).view(2, 6, 90)).abs() <= bound).all())


def test_a_sequence_without_tokens_has_no_scores(in_parts):
    in_parts(2)
    stream = streams(8, [70, 70])
    kv = KVView.dense(stream.key, stream.value, lengths=torch.tensor([0, 33]))
    scores = qk_scores(stream.query[:, :, -1:], kv, scale=0.15)
    assert bool((scores[0] == float("-inf")).all())
    same(scores, reference.qk_scores(stream.query[:, :, -1:], kv, scale=0.15))


@pytest.mark.parametrize("paged", [False, True])
def test_a_step_waits_for_no_device(paged):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    if paged:
        table, lengths = empty(2, 64, dtype=torch.int64), empty(2, dtype=torch.int64)
        pool = empty(99, 2, 16, 128)
        kv = KVView.paged(pool, pool, block_table=table, lengths=lengths, max_length=1000)
    else:
        kv = KVView.dense(empty(2, 2, 1000, 128), empty(2, 2, 1000, 128))
    with recording() as launches:
        assert qk_scores(empty(2, 8, 1, 128), kv, scale=0.1).shape == (2, 8, 1000)
    assert [launch.kernel.split(":")[1] for launch in launches] == ["qk_scores_kernel"]
    assert launches[0].grid[1:] == (2, 2)
