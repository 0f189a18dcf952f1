"""The K largest scores of each row in Triton: the very indices of the reference, whatever the scores."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.ops import backend, reference, topk_indices
from sparsesel.ops.launch import recording
from sparsesel.testing import hostile_scores

MODULE = importlib.import_module("sparsesel.ops.topk")


@pytest.fixture(autouse=True)
def triton():
    with backend.using("triton"):
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Have short rows treated as long ones are: in tiles, and in several blocks of them."""
    shrink(monkeypatch)


def shrink(patch, block=32):
    patch.setattr(MODULE, "_BLOCK", block)
    patch.setattr(MODULE, "_BLOCK_NEAR", block)


def check(scores, topk, lengths=None, widest=None):
    lengths = torch.full(scores.shape[:-1], scores.shape[-1]) if lengths is None else lengths
    found = topk_indices(scores, topk, lengths, widest=widest)
    assert found.dtype == torch.int32
    assert torch.equal(found, reference.topk_indices(scores, topk, lengths, widest=widest))


KINDS = {
    "random": lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)),
    "hostile": lambda *shape: hostile_scores(0, *shape),
    "constant": lambda *shape: torch.full(shape, -1.5),
    "nan": lambda *shape: torch.full(shape, math.nan),
    "-inf": lambda *shape: torch.full(shape, -math.inf),
    "inf": lambda *shape: torch.full(shape, math.inf),
    "nan and -inf": lambda *shape: torch.full(shape, -math.inf).index_fill_(
        -1, torch.arange(1, shape[-1], 3), math.nan
    ),
    "zeros of both signs": lambda *shape: torch.zeros(shape).index_fill_(-1, torch.arange(0, shape[-1], 3), -0.0),
    "few levels": lambda *shape: torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(1)).float(),
    "rising": lambda *shape: torch.arange(shape[-1]).float().expand(shape).contiguous(),
    "falling": lambda *shape: -torch.arange(shape[-1]).float().expand(shape).contiguous(),
    # Apart in their last bits only, of either sign: every digit of the selection is needed.
    "clustered": lambda *shape: 1e4 + torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(2)) / 1024,
    "clustered below zero": lambda *shape: (
        -1e4 - torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3)) / 1024
    ),
    "denormal": lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(4)) * 1e-42,
    # All of the support in adjacent positions, as attention often has it.
    "peak": lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(5)).add_(
        9.0 * ((torch.arange(shape[-1]) - shape[-1] // 3).abs() < 9)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [30, 200])
def test_every_kind_of_scores(small_blocks, kind, length):
    check(KINDS[kind](2, length), 7)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 1000])
def test_every_kind_of_scores_at_every_size(monkeypatch, kind, length):
    shrink(monkeypatch, 64)
    lengths = torch.tensor([length, length // 2, 1])
    for topk in (1, 2, 15, 16, 17, 31, 100, 300):
        check(KINDS[kind](3, length), topk, lengths)
        check(KINDS[kind](3, length), torch.tensor([topk, 1, 3]), lengths, widest=max(topk, 3))


@pytest.mark.parametrize("topk", [1, 8, 16, 25, 199, 200, 201, 1000])
def test_budgets_around_what_there_is(small_blocks, topk):
    check(hostile_scores(2, 2, 200), topk)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_blocks_and_tiles(small_blocks, length):
    check(hostile_scores(3, 2, length), 3)
    check(hostile_scores(4, 3, 129), 3, torch.tensor([length, 0, 129]))


def test_rows_have_lengths_and_budgets_of_their_own(small_blocks):
    scores = hostile_scores(5, 2, 3, 150)
    lengths = torch.tensor([[150, 0, 1], [77, 149, 33]])
    topk = torch.tensor([[1, 5, 9], [20, 3, 9]])
    check(scores, topk, lengths)
    check(scores, topk, lengths, widest=20)
    check(scores, topk.int(), lengths.int(), widest=40)  # a bound need not be reached


@pytest.mark.parametrize("topk", [[0, 3], [3, 0], [0, 0]])
def test_a_budget_may_be_nothing(small_blocks, topk):
    """In a row as long as others, of which nothing may be written past its end."""
    scores, lengths = hostile_scores(12, 2, 200), torch.tensor([200, 200])
    check(scores, torch.tensor(topk), lengths)
    check(scores, torch.tensor(topk), lengths, widest=3)


@st.composite
def rows(draw):
    """Rows of any numbers, most of them ties or clusters."""
    length = draw(st.integers(1, 180))
    levels = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, math.inf, -math.inf, math.nan, 3e38, -1e-45])
    numbers = st.one_of(levels, st.floats(width=32, allow_subnormal=True))
    palette = draw(st.lists(numbers, min_size=1, max_size=12))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, len(palette), (2, length), generator=generator)
    scores = torch.tensor(palette, dtype=torch.float32)[pick]
    noisy = torch.rand(2, length, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    return torch.where(noisy, torch.randn(2, length, generator=generator), scores)


@given(rows(), st.data())
@settings(max_examples=15)
def test_any_scores(scores, data):
    length = scores.shape[1]
    topk = data.draw(st.lists(st.integers(0, length + 3), min_size=2, max_size=2))
    lengths = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, data.draw(st.sampled_from([32, 64])))
        check(scores, torch.tensor(topk), torch.tensor(lengths), widest=max(topk))
        check(scores, topk[0])


@pytest.mark.parametrize(("length", "topk"), [(5000, 40), (9000, 512), (20_000, 512)])
def test_blocks_as_they_are(length, topk):
    check(hostile_scores(6, 1, length), topk)
    check(KINDS["clustered"](1, length), topk)


@pytest.mark.full
@pytest.mark.parametrize(("length", "topk"), [(131_072, 512), (131_072, 8192), (1_000_003, 512), (5_000_000, 512)])
def test_long_rows(length, topk):
    check(torch.randn(1, length, generator=torch.Generator().manual_seed(7)), topk)
    check(torch.full((1, length), 0.25), topk)


def test_rows_need_not_touch(small_blocks):
    room = hostile_scores(8, 2, 3, 200)
    check(room[:, :, :150], 6)
    check(room[:, ::2, 10:150], 6)
    check(room.transpose(1, 2)[:, :, :2], 2)  # nor scores
    check(room[:, :, :150].half(), 6)


def test_numbers_may_be_one_expanded(small_blocks):
    scores = hostile_scores(9, 1, 1, 90)
    lengths = torch.tensor([[77]]).expand(2, 3)
    check(scores.expand(2, 3, 90), 6, lengths)
    check(scores[..., :1].expand(2, 3, 90), torch.tensor([[5]]).expand(2, 3), lengths)


def test_a_budget_beyond_its_bound_is_cut_to_it(small_blocks):
    scores, lengths = hostile_scores(10, 2, 120), torch.tensor([120, 100])
    found = topk_indices(scores, torch.tensor([9, 4]), lengths, widest=6)
    assert torch.equal(found, reference.topk_indices(scores, torch.tensor([6, 4]), lengths, widest=6))


def test_sums_are_added_to(small_blocks):
    scores, lengths = hostile_scores(11, 2, 3, 120), torch.tensor([120, 4])
    counters = torch.ones(4, 3, dtype=torch.float64)
    MODULE.largest(scores.flatten(0, 1), lengths, topk=7, p_topk=None, widest=7, counters=counters)
    assert counters.tolist() == [[12.0] * 3, [125.0] * 3, [3.0] * 3, [3.0] * 3]


def test_nothing_at_all():
    assert topk_indices(torch.empty(2, 0, 9), 3, torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 3)
    assert topk_indices(torch.empty(2, 9), 0, torch.full((2,), 9)).shape == (2, 0)
    assert topk_indices(torch.empty(2, 0), 3, torch.zeros(2, dtype=torch.int64)).shape == (2, 0)


def test_scores_that_float32_does_not_hold_are_refused():
    with pytest.raises(InputError, match=r"scores.*float64"):
        topk_indices(torch.zeros(2, 9, dtype=torch.float64), 3, torch.full((2,), 9))


@given(total=st.integers(1, 5_000_000), widest=st.integers(1, 20_000))
@settings(max_examples=200)
def test_tiles_outnumber_what_is_kept(total, widest):
    tile = MODULE.tile_size(total, widest)
    assert tile == 0 or (8 <= tile <= 1024 and tile & (tile - 1) == 0 and -(-total // tile) > widest)


def test_tiles_are_of_a_size_that_asks_for_few_looks():
    assert [MODULE.tile_size(total, 512) for total in (2048, 8192, 1 << 15, 1 << 17, 1 << 20)] == [0, 8, 16, 32, 128]
    assert MODULE.tile_size(1 << 17, 1 << 13) == 8  # 6.25%
    assert MODULE.tile_size(1 << 17, 1 << 15) == 0


@pytest.mark.parametrize(
    ("total", "expected"), [(2048, ["topk_kernel"]), (2500, ["tile_maxima_kernel", "topk_kernel"])]
)
def test_a_selection_waits_for_no_device(total, expected):
    scores = torch.empty(2, 8, total, device="meta")
    per_row = torch.empty(2, 8, dtype=torch.int64, device="meta")
    with recording() as launches:
        assert topk_indices(scores, per_row, per_row, widest=300).shape == (2, 8, 300)
    assert [launch.kernel.split(":")[1] for launch in launches] == expected
