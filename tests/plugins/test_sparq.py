"""SparQ against its plain-loop reference over random lives of a cache, what it keeps, and what a step costs."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.registry import make_config, make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_sparq import reference
from sparsesel_sparq.config import SparQConfig
from sparsesel_sparq.state import BLOCK, SparQState

LAYER = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
HEAD_DIM = 8


def check_step(step, config):
    """A step against the loops; returns (1 - α) by query head, summed over rows.

    Near a tie float32 may choose otherwise than float64, so what was chosen must be as good as what the loops chose;
    the output is then held against the loops' output for the support that was chosen.
    """
    group = step.query.shape[1] // step.keys.shape[1]
    reallocated = torch.zeros(step.query.shape[1], dtype=torch.float64)
    for row, length in enumerate(step.lengths.tolist()):
        for kv_head in range(step.keys.shape[1]):
            heads = range(kv_head * group, (kv_head + 1) * group)
            queries = [step.query[row, head, 0].tolist() for head in heads]
            keys, values = (part[row, kv_head, :length].tolist() for part in (step.keys, step.values))
            choice = reference.choose(config, queries, keys, scale=step.scale)
            support = step.mask[row, heads[0]].nonzero().flatten().tolist()
            assert len(support) == len(choice.support) <= reference.budget(config, length)
            merit = [sum(weights[i] for weights in choice.weights) for i in range(length)]
            for taken, wanted in zip(
                sorted(set(support) - set(choice.support)), sorted(set(choice.support) - set(support)), strict=True
            ):
                assert merit[taken] == pytest.approx(merit[wanted], rel=1e-4, abs=1e-30)
            for head, query, weights in zip(heads, queries, choice.weights, strict=True):
                expected = reference.attend(config, query, keys, values, weights, support, scale=step.scale)
                expected = torch.tensor(expected, dtype=torch.float64)
                if expected.isfinite().all():
                    torch.testing.assert_close(step.output[row, head, 0].double(), expected, rtol=1e-4, atol=1e-5)
                reallocated[head] += reference.left_out(weights, support)
    return reallocated


@st.composite
def configs(draw) -> SparQConfig:
    topk = draw(st.sampled_from([1, 3, 8, 13, "20%", "45%"]))
    return SparQConfig(
        topk=topk,
        rank=draw(st.integers(1, HEAD_DIM)),
        local_size=draw(st.sampled_from(["topk/4", 0, 1, topk if isinstance(topk, int) else 5])),
        reallocate=draw(st.sampled_from([True, True, False])),
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 9)),
        st.tuples(st.just("steps"), st.integers(1, 5)),
        st.tuples(st.just("attend"), st.integers(1, 3)),
        st.tuples(st.just("skip"), st.integers(1, 4)),
        st.tuples(st.just("crop"), st.integers(1, 30)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=7,
)


def live(replay, operation, argument):
    """One operation on a replay; the steps it made."""
    rows = replay.stream.batch_size
    match operation:
        case "steps":
            return replay.steps(argument)
        case "attend":
            for _ in range(argument):
                replay.attend()
        case "crop":
            longest = 0 if replay.stream.starts is None else int(replay.stream.starts.max())
            replay.crop(min(argument, replay.length - longest - 1))
            replay.stream = replay.stream.diverging(replay.length, seed=argument + replay.length)
        case "reorder":
            replay.reorder((torch.arange(rows) + argument) % rows)
        case "select":
            replay.select(torch.arange(rows)[: 1 + argument % rows])
        case "repeat":
            if rows < 3:
                replay.repeat(argument)
        case "reset":
            replay.state.reset()
        case _:
            getattr(replay, operation)(argument)
    return []


@given(
    config=configs(),
    lengths=st.sampled_from([[190], [190, 190], [190, 187], [185, 190, 188]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
    prompt=st.sampled_from([6, 20, BLOCK - 1, BLOCK, BLOCK + 20]),
    operations=OPERATIONS,
)
def test_any_life_matches_the_loops(config, lengths, heads, seed, paged, prompt, operations):
    stream = random_stream(
        seed, lengths=lengths, head_dim=HEAD_DIM, num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    layout = PagedLayout(block_size=3, order="channel") if paged else DenseLayout()
    replay = Replay(make_selector(config), stream, layout=layout).prefill(prompt)
    reallocated, counted, steps = torch.zeros(heads[0], dtype=torch.float64), True, 0
    for operation, argument in [*operations, ("steps", 3)]:
        counted &= operation != "attend"
        for step in live(replay, operation, argument):
            reallocated += check_step(step, config)
            steps += len(step.lengths)
    counters = replay.state.counters.read()
    if counted:
        assert counters["steps"].tolist() == [steps] * heads[0]
        assert ("reallocated" in counters) == config.reallocate
        if config.reallocate:
            torch.testing.assert_close(counters["reallocated"], reallocated, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 1000), kind=st.sampled_from(HOSTILE), rank=st.sampled_from([1, 3, HEAD_DIM]))
def test_hostile_input_matches_the_loops(seed, kind, rank):
    config = SparQConfig(topk=7, rank=rank)
    stream = hostile_stream(random_stream(seed, lengths=[40, 31], head_dim=HEAD_DIM), kind)
    for step in Replay(make_selector(config), stream).prefill(32).steps(8):
        check_step(step, config)


def test_ties_go_to_the_lower_component_and_position():
    """A query of ones ties all components: the first three score. Equal keys tie all positions."""
    stream = random_stream(5, length=30, head_dim=HEAD_DIM, num_attention_heads=2)
    ones = dataclasses.replace(stream, query=torch.ones_like(stream.query), key=torch.ones_like(stream.key))
    telling = dataclasses.replace(ones, key=torch.zeros_like(stream.key))
    telling.key[..., 2] = torch.arange(30.0)  # for the latest positions
    telling.key[..., 7] = -2 * torch.arange(30.0)  # against them
    selector = make_selector("sparq,topk=9,rank=3,local_size=2")
    for inputs, expected in ((ones, [*range(7), 19, 20]), (telling, [*range(12, 21)])):
        step = Replay(selector, inputs).prefill(20).step()
        assert step.mask[0, 0].nonzero().flatten().tolist() == expected
        check_step(step, selector.config)


@pytest.mark.parametrize("padded", [False, True])
def test_mean_value_is_exact_after_any_crop(padded):
    """What a crop leaves behind: no trace of the values taken back, not even of one that was not finite."""
    total = 3 * BLOCK + 10
    stream = random_stream(7, batch=2, length=total, lengths=[total, total - 9] if padded else None, head_dim=HEAD_DIM)
    selector = make_selector("sparq,topk=4,rank=4")
    for left in (BLOCK - 1, BLOCK, 2 * BLOCK + 5, total - 3):
        spoiled = dataclasses.replace(stream, value=stream.value.clone())
        spoiled.value[:, :, left:] = math.inf
        replay = Replay(selector, spoiled).prefill(total - 8)
        replay.steps(5)
        replay.crop(replay.length - left)
        replay.stream = stream
        step = replay.step()
        expected = step.values.double().sum(2) / step.lengths[:, None, None]
        torch.testing.assert_close(replay.state.mean_value(replay.kv()).double(), expected, rtol=1e-5, atol=1e-6)


def test_sums_keep_no_graph():
    stream = random_stream(6, length=40, head_dim=HEAD_DIM)
    stream.value.requires_grad_()
    replay = Replay(make_selector("sparq,topk=4,rank=2"), stream).prefill(30)
    replay.step().output.sum().backward()
    assert stream.value.grad is not None
    assert not replay.state.value_sum.requires_grad
    assert not replay.state.block_sums.requires_grad


def test_appending_copies_nothing_that_is_there():
    """Buffers grow by halves: the tokens copied over a long decode stay below a few times those there are."""
    replay = Replay(make_selector("sparq,topk=4,rank=2"), random_stream(1, length=900, head_dim=HEAD_DIM)).prefill(100)
    copied, buffer = 0, replay.state.components
    for _ in range(800):
        replay.attend()
        if replay.state.components is not buffer:
            copied, buffer = copied + buffer.shape[3], replay.state.components
    assert copied < 3 * 900
    assert buffer.shape[3] <= 1.5 * 900 + 64


def test_a_step_reads_what_its_cost_says(gathered):
    """Keys, values and components gathered in a step, in bytes, group by group: the eager step is the design."""
    stream = random_stream(2, batch=2, length=201, num_attention_heads=6, num_key_value_heads=2)
    selector = make_selector("sparq,topk=16,rank=8")
    replay = Replay(selector, stream).prefill(199)
    replay.step()
    gathered.clear()
    gathered.count(SparQState, "rows", "components")
    replay.attend()
    cost = selector.cost(stream.layer_spec(), 201)
    appended = 2 * 2 * 64 * 4  # the current token's key and value, taken into the state
    mean = 2 * 2 * 64 * 4
    assert gathered == {
        "keys": cost.key_bytes + appended,
        "values": cost.value_bytes + appended,
        "components": cost.metadata_bytes - mean,
    }


def test_costs_are_the_stated_fractions_of_dense_attention():
    """r/2D + K/L of dense attention at 128K: 0.129 for r = 32, 0.254 for r = 64; half the cache again as state."""
    length = 128 * 1024
    dense = make_selector("full").cost(LAYER, length).bytes_read
    for rank, fraction in ((32, 0.129), (64, 0.254)):
        cost = make_selector("sparq:strict", rank=rank).cost(LAYER, length)
        assert (cost.key_bytes + cost.value_bytes + cost.metadata_bytes) / dense == pytest.approx(fraction, abs=5e-4)
        assert cost.attended == 512
    cost = make_selector("sparq").cost(LAYER, length)
    # A float32 for every 64 values, where keys and values are bfloat16.
    assert cost.state_bytes / dense == pytest.approx(0.5 + 1 / 64, abs=1e-4)
    bare = make_selector("sparq,reallocate=false").cost(LAYER, length)
    assert bare.state_bytes / dense == pytest.approx(0.5, abs=1e-5)
    assert make_selector("sparq,topk=6.25%").cost(LAYER, length).attended == length / 16


def test_state_is_what_its_cost_says():
    """But for room to grow: by half at most, and what rounding up takes."""
    stream = random_stream(3, batch=2, length=700)
    replay = Replay(make_selector("sparq"), stream).prefill(699)
    replay.step()
    stated = replay.selector.cost(stream.layer_spec(), 700).state_bytes
    assert stated <= replay.state.nbytes() <= 1.6 * stated


def test_presets_and_defaults():
    assert make_config("sparq") == make_config("sparq:strict") == SparQConfig(topk=512, rank=32, reallocate=True)
    assert make_config("sparq:paper") == SparQConfig(topk=128)
    assert make_config("sparq,local_size=7").local_size == 7
    assert make_config("sparq,local_size=topk/4").local_size == "topk/4"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", 2.5),
        ("local_size", -1),
        ("local_size", 513),
        ("local_size", "half"),
        ("reallocate", "perhaps"),
        ("topk", 0),
        ("page_size", 16),
    ],
)
def test_refused(field, value):
    with pytest.raises(InputError) as caught:
        make_config("sparq", **{field: value})
    assert field in caught.value.field
    assert caught.value.expected
    assert caught.value.remedy


def test_rank_is_held_against_the_layer():
    with pytest.raises(InputError, match=r"at most 128.*got 129"):
        make_selector("sparq,rank=129").init_state(LAYER)
    make_selector("sparq,rank=128").init_state(LAYER)


def test_a_sequence_without_tokens_gives_zeros():
    key = torch.randn(2, 2, 9, 16)
    kv = KVView.dense(key, key, lengths=torch.tensor([9, 0]))
    selector = make_selector("sparq", topk=4, rank=4)
    state = selector.init_state(LayerSpec(0, 4, 2, 16, torch.float32, torch.device("cpu"), 2))
    output = selector.attend(torch.randn(2, 4, 1, 16), kv, state, scale=0.3)
    assert output[0].isfinite().all()
    assert torch.equal(output[1], torch.zeros(4, 1, 16))
