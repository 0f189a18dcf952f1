"""What the testing helpers promise of their inputs and their bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.testing import (
    HOSTILE,
    DenseLayout,
    PagedLayout,
    assert_close_to_float64,
    assert_same_output,
    expected_attention,
    hostile_scores,
    hostile_stream,
    random_stream,
    rounding_tolerance,
)


def equal(one, other):
    return torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0))


def test_same_seed_same_stream():
    one, same, other = (random_stream(seed, lengths=[40, 9]) for seed in (1, 1, 2))
    assert equal(one.query, same.query)
    assert equal(one.key, same.key)
    assert not equal(one.key, other.key)


def test_scores_are_exact_in_float32_and_numbers_in_bfloat16():
    stream = random_stream(1, length=111, num_key_value_heads=4)
    single = stream.query @ stream.key.transpose(2, 3)
    double = stream.query.double() @ stream.key.double().transpose(2, 3)
    assert torch.equal(single.double(), double)
    assert torch.equal(stream.to(torch.bfloat16).key.float(), stream.key)


def test_queries_drift_at_the_asked_correlation():
    query = torch.nn.functional.normalize(random_stream(1, length=300, jump=0.0).query, dim=-1)
    cosine = (query[:, :, 1:] * query[:, :, :-1]).sum(-1)
    assert abs(float(cosine.mean()) - 0.97) < 0.01


def test_padding_holds_nan_and_nothing_else_does():
    stream = random_stream(1, lengths=[40, 9])
    padding = (torch.arange(40) < torch.tensor([0, 31])[:, None])[:, None, :, None]
    for part in (stream.query, stream.key, stream.value):
        assert torch.equal(part.isnan(), padding.expand_as(part))


def test_diverging_stream_is_the_same_up_to_there():
    stream = random_stream(1, lengths=[40, 9])
    other = stream.diverging(35, seed=2)
    assert equal(stream.key[:, :, :35], other.key[:, :, :35])
    assert (stream.key[:, :, 35:] != other.key[:, :, 35:]).any(dim=(1, 3)).all()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_stream_differs_and_keeps_its_padding(kind):
    stream = random_stream(1, lengths=[40, 20])
    hostile = hostile_stream(stream, kind)
    assert not (equal(stream.query, hostile.query) and equal(stream.key, hostile.key))
    assert hostile.key[1, :, :20].isnan().all()
    assert equal(stream.key, random_stream(1, lengths=[40, 20]).key)


def test_unknown_hostility_is_refused():
    with pytest.raises(InputError, match="nan query"):
        hostile_stream(random_stream(1, length=9), "rude")


def test_stream_without_a_length_is_refused():
    with pytest.raises(InputError, match="length"):
        random_stream(1)


def test_hostile_scores_hold_everything():
    scores = hostile_scores(1, 1000)
    assert scores.isnan().any()
    assert scores.isposinf().any()
    assert scores.isneginf().any()
    assert len(scores[scores.isfinite()].unique()) < scores.isfinite().sum()


def test_layouts_leave_nan_around_what_they_hold():
    stream = random_stream(1, length=10)
    dense = DenseLayout()(stream.key, stream.value, None).keys
    assert not dense.is_contiguous()
    paged = PagedLayout(block_size=4, order="channel")(stream.key, stream.value, None).keys
    assert paged.stride(3) != 1
    assert int(paged.isfinite().sum()) == stream.key.numel()


def attention(query, keys, values, mask, scale):
    scores = (query @ keys.transpose(2, 3) * scale).masked_fill(~mask[:, :, None], float("-inf"))
    return scores.softmax(-1) @ values


def attention_case(seed, length, spread):
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(1, 2, n, 64, generator=generator) for n in (1, length, length))
    mask = torch.rand(1, 2, length, generator=generator) < 0.7
    mask[..., -1] = True
    return query * spread, keys, values, mask


@given(st.integers(0, 1000), st.sampled_from([1, 7, 111, 600]), st.sampled_from([0.01, 1.0, 30.0]))
def test_float32_attention_lies_within_its_bound(seed, length, spread):
    query, keys, values, mask = attention_case(seed, length, spread)
    expected = expected_attention(query, keys, values, mask, scale=0.125)
    output = attention(query, keys, values, mask, 0.125)
    assert_close_to_float64(output, expected)
    tolerance = rounding_tolerance(query, keys, values, scale=0.125)
    assert float((2 * expected.bound).max()) <= tolerance * 1.001


@given(st.integers(0, 1000))
def test_bounds_are_small_enough_to_mean_something(seed):
    query, keys, values, mask = attention_case(seed, 111, 1.0)
    expected = expected_attention(query, keys, values, mask, scale=0.125)
    assert float(expected.bound.max()) < 3e-4
    assert rounding_tolerance(query, keys, values, scale=0.125) < 4e-3
    half = expected_attention(query.bfloat16(), keys, values, mask, scale=0.125)
    assert float(half.bound.max()) < 3e-2


def test_what_is_out_of_bounds_is_refused():
    query, keys, values, mask = attention_case(0, 111, 1.0)
    expected = expected_attention(query, keys, values, mask, scale=0.125)
    for wrong in (expected.output + 1e-3, expected.output * float("nan"), expected.output[..., :1]):
        with pytest.raises(AssertionError):
            assert_close_to_float64(wrong.float(), expected)


def test_same_output_wants_the_same_type_shape_numbers_and_gaps():
    one = torch.tensor([1.0, float("nan"), 3.0])
    assert_same_output(one, one + 1e-4, 1e-3)
    for other in (one + 1e-2, one.double(), one[:2], torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(AssertionError):
            assert_same_output(one, other, 1e-3)
