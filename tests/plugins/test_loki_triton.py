"""Loki's kernel and step, in Triton's interpreter, against its eager path and float64."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.config import resolve_topk
from sparsesel.explain import trace
from sparsesel.ops import backend
from sparsesel.ops.launch import launch
from sparsesel.ops.primitives import bfloat16_parts
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel.testing.tolerances import assert_close_to_float64, gamma, unit_roundoff
from sparsesel_loki import state as state_module

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "static": DenseLayout(static=True),
    "paged": PagedLayout(block_size=4),
    "paged, tokens first": PagedLayout(block_size=3, order="token"),
}


class Both:
    """One life on both backends."""

    def __init__(self, selector, stream, layout=None):
        self.eager, self.triton = (Replay(make_selector(selector), stream, layout=layout) for _ in range(2))

    def each(self, operation, *args):
        getattr(self.eager, operation)(*args)
        with backend.using("triton"):
            getattr(self.triton, operation)(*args)
        return self

    def steps(self, count):
        for _ in range(count):
            expected = self.eager.step()
            with backend.using("triton"):
                actual = self.triton.step()
            assert torch.equal(actual.support.counts, expected.support.counts)
            check_state(self.triton, self.eager)
            check_choice(actual, self.triton)
            assert_close_to_float64(actual.output, actual.expected())
        return self


def check_state(replay, other):
    """Components and what they were fitted to are the same; keys along them are float64's, but for rounding."""
    state = replay.state
    for name in ("basis", "fitted", "indexed"):
        assert torch.equal(getattr(state, name), getattr(other.state, name)), name
    counters, wanted = state.counters.read(), other.state.counters.read()
    assert set(counters) == set(wanted)
    assert all(torch.equal(counters[name], wanted[name]) for name in wanted)
    keys, _ = replay.stream.logical(replay.length)
    keys, basis = keys.double(), state.basis.double()
    exact = keys @ basis
    bound = gamma(keys.shape[3] + 2) * (keys.abs() @ basis.abs())
    bound += unit_roundoff(state.reduced.dtype) * (exact.abs() + bound)
    seen = torch.arange(keys.shape[2]) < state.indexed[:, None]
    wrong = seen[:, None, :, None] & exact.isfinite() & ((state.seen(keys.shape[2]) - exact).abs() > bound)
    assert not wrong.any()


def check_choice(step, replay):
    """No key left out is better than one taken, along the components in the state, but for what float32 rounds."""
    state, lengths = replay.state, step.lengths.tolist()
    group = step.query.shape[1] // step.keys.shape[1]
    along = step.query.double() @ state.basis.double().repeat_interleave(group, dim=1)
    reduced = state.seen(step.keys.shape[2]).double().repeat_interleave(group, dim=1)
    merits = (along @ reduced.transpose(2, 3))[:, :, 0]
    sizes = (along.abs() @ reduced.abs().transpose(2, 3))[:, :, 0]
    merits = merits.masked_fill(merits.isnan(), -torch.inf)
    for row, length in enumerate(lengths):
        taken = step.mask[row, :, :length]
        assert bool((taken.sum(-1) == min(length, resolve_topk(replay.selector.config.topk, length))).all())
        merit, size = merits[row, :, :length], sizes[row, :, :length].nan_to_num(0.0, 0.0, 0.0)
        tolerance = 4 * gamma(step.keys.shape[3] * 2) * size.amax(-1)
        worst = merit.masked_fill(~taken, torch.inf).amin(-1)
        best = merit.masked_fill(taken, -torch.inf).amax(-1)
        assert bool((best <= worst + tolerance).all())


@pytest.mark.parametrize("layout", ["dense", "static", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_life_is_the_same_on_both_backends(layout, dtype):
    stream = random_stream(1, lengths=[60, 51, 40], head_dim=10).to(dtype)
    both = Both("loki,topk=8,rank=5", stream, LAYOUTS[layout]).each("prefill", 40).steps(1)
    both.each("prefill", 3).steps(1).each("crop", 2).steps(1).each("reorder", torch.tensor([2, 0, 1])).steps(1)
    both.each("crop", 15).steps(1).each("skip", 5).steps(1)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rank"), [(64, 64), (80, 1), (96, 33), (128, 32), (256, 200)])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (7, 1), (16, 1)])
def test_every_shape(layout, dtype, dim, rank, heads):
    stream = random_stream(
        2, lengths=[100, 57], head_dim=dim, num_attention_heads=heads[0], num_key_value_heads=heads[1]
    ).to(dtype)
    Both(f"loki,topk=20,rank={rank}", stream, LAYOUTS[layout]).each("prefill", 98).steps(1)


@given(
    topk=st.sampled_from([1, 7, 20, 60, "20%", "3%"]),
    rank=st.integers(1, 8),
    lengths=st.sampled_from([[60], [60, 57], [24, 60]]),
    heads=st.sampled_from([(2, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
)
@settings(max_examples=8)
def test_any_configuration(topk, rank, lengths, heads, seed, paged):
    stream = random_stream(
        seed, lengths=lengths, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8
    )
    layout = PagedLayout(block_size=3) if paged else None
    Both(make_selector("loki", topk=topk, rank=rank).config, stream, layout).each("prefill", 46).steps(2)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input(kind):
    stream = hostile_stream(random_stream(9, lengths=[44, 41], head_dim=8), kind)
    Both("loki,topk=7,rank=3", stream).each("prefill", 41).steps(2)


def test_ties_go_to_the_earlier_key():
    stream = hostile_stream(random_stream(9, length=44, head_dim=8), "equal keys")
    replay = Replay(make_selector("loki,topk=7,rank=3"), stream).prefill(41)
    with backend.using("triton"):
        assert replay.step().mask[0, 0].nonzero().flatten().tolist() == list(range(7))


@pytest.mark.parametrize(
    ("dtype", "dim", "rank", "layout"),
    [
        (torch.bfloat16, 80, 33, "paged"),
        (torch.float16, 128, 64, "dense"),
        (torch.float32, 256, 17, "paged, tokens first"),
        (torch.float32, 36, 1, "channel-major"),
    ],
)
def test_shapes(dtype, dim, rank, layout):
    """Ranks and dimensions that fill no tile, of three query heads; keys in several parts."""
    stream = random_stream(4, lengths=[300, 97], head_dim=dim, num_attention_heads=3, num_key_value_heads=1).to(dtype)
    Both(f"loki,topk=9,rank={rank}", stream, LAYOUTS[layout]).each("prefill", 298).steps(2)


def test_a_sequence_that_has_not_begun_changes_nothing():
    stream = random_stream(3, lengths=[30, 8], head_dim=6)
    both = Both("loki,topk=4,rank=3", stream).each("skip", 20)
    expected = both.eager.attend()
    with backend.using("triton"):
        output = both.triton.attend()
    torch.testing.assert_close(output, expected)
    assert not output[1].any()
    check_state(both.triton, both.eager)
    both.each("skip", 5).steps(1)


def test_attend_is_discover_and_aggregate():
    stream = random_stream(10, lengths=[60, 40], head_dim=8)
    with backend.using("triton"):
        replay = Replay(make_selector("loki,topk=9,rank=4"), stream).prefill(50)
        other = replay.fork()
        for _ in range(2):
            assert torch.equal(replay.attend(), other.step().output)


def test_state_stays_where_it_is():
    """So that a step captured in a CUDA graph finds it there."""
    replay = Replay(make_selector("loki,topk=9,rank=4"), random_stream(11, length=60, head_dim=6)).prefill(30)
    with backend.using("triton"):
        replay.step()
        before = {name: part.data_ptr() for name, part in replay.state.tensors().items()}
        replay.steps(2)
        replay.crop(10).step()
        replay.state.reset()
        replay.step()
    assert {name: part.data_ptr() for name, part in replay.state.tensors().items()} == before


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_keys_that_need_a_gradient_leave_no_graph(name):
    stream = random_stream(12, length=40, head_dim=6)
    stream.query.requires_grad_()
    stream.key.requires_grad_()
    replay = Replay(make_selector("loki,topk=9,rank=4"), stream).prefill(30)
    with backend.using(name):
        replay.steps(2)
    assert not any(part.requires_grad for part in replay.state.tensors().values())


@pytest.fixture
def looks(monkeypatch):
    """Lengths at which it was looked whether a sequence has to be fitted, which waits for its device."""
    found = []
    original = state_module.row_topk

    def row_topk(topk, lengths):
        found.append(int(lengths.max()))
        return original(topk, lengths)

    monkeypatch.setattr(state_module, "row_topk", row_topk)
    return found


def test_no_step_after_the_fit_looks_whether_to_fit(looks):
    replay = Replay(make_selector("loki,topk=9,rank=4"), random_stream(13, length=60, head_dim=6)).prefill(30)
    replay.steps(9)
    assert looks == [31]


def test_a_short_sequence_is_looked_at_when_it_is_long_enough(looks):
    """Of 20 tokens more, one sequence outgrows a budget of 9 with the 6th step."""
    stream = random_stream(13, lengths=[60, 34], head_dim=6)
    replay = Replay(make_selector("loki,topk=9,rank=4"), stream).prefill(30)
    replay.steps(9)
    assert looks == [31, 36]
    assert replay.state.fitted.tolist() == [30, 9]
    replay.crop(8).reorder(torch.tensor([1, 0]))
    replay.steps(6)
    assert looks == [31, 36, 32, 36]
    assert replay.state.fitted.tolist() == [9, 30]


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("topk", [512, "1%"])
def test_a_step_waits_for_no_device(page_size, topk):
    """On tensors without content, which cannot be looked at."""
    layer = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("meta"), batch_size=2)
    found = trace(make_selector("loki", topk=topk), layer, 8192, page_size=page_size)
    names = [launch.kernel.split(":")[1] for launch in found.step.launches]
    assert names[:2] == ["project_kernel", "qk_scores_kernel"]
    assert names[-2:] == ["sparse_attention_kernel", "combine_kernel"]
    assert len(names) <= 6


@triton.jit
def parts_kernel(p_in, p_out, BLOCK: tl.constexpr):
    """The sum of the parts."""
    o = tl.arange(0, BLOCK)
    b_high, b_mid, b_low = bfloat16_parts(tl.load(p_in + o))
    tl.store(p_out + o, b_high.to(tl.float32) + b_mid.to(tl.float32) + b_low.to(tl.float32))


def test_parts_of_float32_numbers_lose_nothing():
    """What tensor cores are given where a float32 query meets 16-bit keys."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(256, generator=generator) * 10.0 ** torch.linspace(-30, 37, 256)
    largest = torch.finfo(torch.float32).max
    numbers[:6] = torch.tensor([0.0, largest, -largest, float("inf"), float("-inf"), float("nan")])
    total = torch.empty_like(numbers)
    launch(parts_kernel, (1,), p_in=numbers, p_out=total, BLOCK=256)
    torch.testing.assert_close(total, numbers, rtol=0, atol=0, equal_nan=True)
