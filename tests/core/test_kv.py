"""KVView: whatever the layout, the same keys and values at the same logical positions."""

import dataclasses

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.testing import DenseLayout, PagedLayout, random_stream

LAYOUTS = {
    "contiguous": DenseLayout(spare=0),
    "with room to grow": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    **{
        f"blocks of {size}, {order}-major": PagedLayout(block_size=size, order=order, seed=size)
        for size in (1, 4, 16)
        for order in ("head", "token", "channel")
    },
}
LENGTHS = [[111], [63, 63], [63, 1, 40]]


def logical(view, lengths):
    """What lies at the visible positions, as the view says."""
    keys, values = view.logical_keys(), view.logical_values()
    return [(keys[row, :, :n], values[row, :, :n]) for row, n in enumerate(lengths)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logical_keys_are_the_sequences(layout, lengths):
    stream = random_stream(0, lengths=lengths, head_dim=24)
    view = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    assert view.lengths.tolist() == lengths
    assert view.max_length == max(lengths)
    assert (view.batch_size, view.num_heads, view.head_dim) == (len(lengths), 2, 24)
    for row, (keys, values) in enumerate(logical(view, lengths)):
        alone = stream.alone(row)
        assert torch.equal(keys, alone.key[0])
        assert torch.equal(values, alone.value[0])
    visible = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    assert torch.equal(view.visible(), visible)


@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(LENGTHS), st.integers(0, 10**6))
def test_gather_reads_logical_positions_and_never_strays(layout, lengths, seed):
    stream = random_stream(1, lengths=lengths, head_dim=24)
    view = LAYOUTS[layout](stream.key, stream.value, stream.starts)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(-1, max(lengths) + 50, (len(lengths), 2, 30), generator=generator, dtype=torch.int32)
    keys, values = view.gather_keys(positions), view.gather_values(positions)
    # Padding, spare columns and foreign blocks hold NaN, or raise: a position outside reads some existing token.
    assert keys.isfinite().all()
    assert values.isfinite().all()
    for row, length in enumerate(lengths):
        alone = stream.alone(row)
        for head in range(2):
            inside = (positions[row, head] >= 0) & (positions[row, head] < length)
            at = positions[row, head][inside].long()
            assert torch.equal(keys[row, head][inside], alone.key[0, head][at])
            assert torch.equal(values[row, head][inside], alone.value[0, head][at])


def test_gathered_keys_are_a_copy():
    stream = random_stream(2, length=9)
    view = DenseLayout(spare=0)(stream.key, stream.value, None)
    view.gather_keys(torch.zeros(1, 2, 9, dtype=torch.int64)).fill_(0.0)
    assert torch.equal(view.keys, stream.key)


def test_logical_keys_of_a_dense_cache_are_a_view():
    stream = random_stream(3, length=9)
    view = DenseLayout()(stream.key, stream.value, None)
    assert view.logical_keys().data_ptr() == view.keys.data_ptr()


def odd_strides():
    base = random_stream(4, batch=2, length=40, head_dim=16)
    key, value = base.key, base.value
    spaced = torch.full((2, 2, 80, 32), float("nan"))
    spaced[:, :, ::2, :16] = key
    expanded = key[:1, :1].expand(2, 2, -1, -1)
    return {
        "every other row of wider rows": (spaced[:, :, ::2, :16], key),
        "every other channel": (torch.stack([key, key.new_full((), float("nan")).expand_as(key)], -1)[..., 0], key),
        "an odd offset": (torch.cat([torch.zeros(7), key.flatten()])[7:].view_as(key), key),
        "rows not a multiple of a vector": (torch.cat([key, key[..., :1]], -1)[..., :16], key),
        "expanded heads and batch": (expanded, expanded.contiguous()),
        "token before head": (key.transpose(1, 2).contiguous().transpose(1, 2), key),
    }, value


@pytest.mark.parametrize("name", odd_strides()[0])
@pytest.mark.parametrize("padded", [False, True])
def test_any_strides_will_do(name, padded):
    cases, value = odd_strides()
    keys, expected = cases[name]
    starts = torch.tensor([0, 13]) if padded else None
    view = KVView.dense(keys, value, starts=starts)
    plain = KVView.dense(expected.contiguous(), value, starts=starts)
    positions = torch.randint(0, 27, (2, 2, 50), generator=torch.Generator().manual_seed(4))
    assert torch.equal(view.gather_keys(positions), plain.gather_keys(positions))
    assert torch.equal(view.logical_keys(), plain.logical_keys())


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 20))
def test_drop_last_is_the_view_from_before(layout, count):
    stream = random_stream(5, lengths=[63, 40], head_dim=24)
    dropped = LAYOUTS[layout](stream.key, stream.value, stream.starts).drop_last(count)
    assert dropped.max_length == 63 - count
    assert dropped.lengths.tolist() == [63 - count, 40 - count]
    key, value = stream.key[:, :, : 63 - count], stream.value[:, :, : 63 - count]
    before = LAYOUTS[layout](key, value, stream.starts)
    after, expected = logical(dropped, [63 - count, 40 - count]), logical(before, [63 - count, 40 - count])
    for pair, expected_pair in zip(after, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected_pair, strict=True))


def test_a_sequence_that_has_not_begun_has_no_token_and_reads_no_stray_memory():
    stream = random_stream(6, batch=2, length=5)
    view = KVView.dense(stream.key, stream.value, starts=torch.tensor([0, 5]))
    assert view.lengths.tolist() == [5, 0]
    assert view.drop_last(2).lengths.tolist() == [3, 0]
    assert view.logical_keys().isfinite().all()
    assert not view.visible()[1].any()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_static_cache_shows_what_its_lengths_say(lengths):
    stream = random_stream(6, lengths=lengths, head_dim=24)
    view = DenseLayout(spare=9, static=True)(stream.key, stream.value, stream.starts)
    grown = DenseLayout()(stream.key, stream.value, stream.starts)
    assert view.max_length == stream.length + 9
    assert view.lengths.tolist() == lengths
    for pair, expected in zip(logical(view, lengths), logical(grown, lengths), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))
    assert view.logical_keys().isfinite().all()  # the room to grow holds NaN
    assert torch.equal(view.visible()[:, : max(lengths)], grown.visible()[:, : max(lengths)])
    assert not view.visible()[:, max(lengths) :].any()
    assert view.drop_last(2).lengths.tolist() == [max(0, n - 2) for n in lengths]


def test_a_static_caches_lengths_are_those_of_the_moment():
    stream = random_stream(6, batch=2, length=30)
    lengths = torch.tensor([4, 9])
    view = KVView.dense(stream.key, stream.value, lengths=lengths)
    lengths += 3
    assert view.lengths.tolist() == [7, 12]
    assert view.visible().sum(-1).tolist() == [7, 12]


def test_only_a_dense_batch_without_padding_is_uniform():
    stream = random_stream(7, batch=2, length=9)
    starts = torch.tensor([0, 3])
    views = {
        "dense": (DenseLayout()(stream.key, stream.value, None), True, True),
        "padded": (DenseLayout()(stream.key, stream.value, starts), False, True),
        "static": (DenseLayout(static=True)(stream.key, stream.value, None), False, False),
        "paged": (PagedLayout()(stream.key, stream.value, None), False, False),
    }
    for view, uniform, aligned in views.values():
        assert (view.uniform, view.aligned) == (uniform, aligned)
        assert (view.drop_last(2).uniform, view.drop_last(2).aligned) == (uniform, aligned)


def test_a_view_cannot_be_changed():
    stream = random_stream(8, length=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DenseLayout()(stream.key, stream.value, None).max_length = 3


# Bad input. Shape annotations are checked in tests alone, so what a user meets is tested without them.


@pytest.fixture
def unchecked_annotations():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


KEYS = torch.zeros(2, 3, 8, 4)
TABLE = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("keys", "values", "rows", "field"),
    [
        (KEYS[0], KEYS[0], {}, "keys, values"),
        (KEYS, KEYS[:, :, :7], {}, "keys, values"),
        (KEYS, KEYS[:, :1], {}, "keys, values"),
        (KEYS, KEYS[:1], {}, "keys, values"),
        (KEYS, KEYS[..., 0], {}, "keys, values"),
        (KEYS, KEYS.bfloat16(), {}, "keys, values"),
        (KEYS, KEYS.to("meta"), {}, "keys, values"),
        (KEYS, KEYS, {"starts": torch.zeros(3, dtype=torch.int64)}, "starts"),
        (KEYS, KEYS, {"starts": torch.zeros(2, 1, dtype=torch.int64)}, "starts"),
        (KEYS, KEYS, {"lengths": torch.ones(3, dtype=torch.int64)}, "lengths"),
        (KEYS, KEYS, {"lengths": torch.ones(2, 1, dtype=torch.int64)}, "lengths"),
    ],
)
def test_dense_refuses_what_does_not_belong_together(keys, values, rows, field):
    with pytest.raises(InputError) as error:
        KVView.dense(keys, values, **rows)
    assert error.value.field == field


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"values": KEYS[:1]}, "keys, values"),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, "lengths"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": 33}, "max_length"),
    ],
)
def test_paged_refuses_what_does_not_belong_together(changed, field):
    arguments = {"values": KEYS, "lengths": torch.ones(2, dtype=torch.int64), "max_length": 32, "block_table": TABLE}
    KVView.paged(KEYS, **arguments)
    with pytest.raises(InputError) as error:
        KVView.paged(KEYS, **{**arguments, **changed})
    assert error.value.field == field


def test_annotations_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        KVView.dense(KEYS[0], KEYS[0])


def test_fresh_memory_is_poisoned_in_tests():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(3).new_empty(2).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) < -(10**6)).all()
