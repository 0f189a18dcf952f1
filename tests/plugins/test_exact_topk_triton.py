"""Exact Top-K in Triton: the supports of the eager path, outputs within the bounds of float64, and what it launches."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.explain import trace
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing import (
    DenseLayout,
    PagedLayout,
    Replay,
    assert_close_to_float64,
    assert_same_output,
    hostile_stream,
    random_stream,
)
from sparsesel.testing.inputs import HOSTILE, Stream

LAYOUTS = {
    "dense": DenseLayout(),
    "static": DenseLayout(spare=30, static=True),
    "paged": PagedLayout(block_size=4),
    "paged by channel": PagedLayout(block_size=16, order="channel"),
}
MODULE = importlib.import_module("sparsesel.ops.topk")


def shrink(patch):
    """Have short rows of scores treated as long ones are: in tiles, and in several blocks of them."""
    patch.setattr(MODULE, "_BLOCK", 32)
    patch.setattr(MODULE, "_BLOCK_NEAR", 32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    shrink(monkeypatch)


def check(stream: Stream, layout: str = "dense", topk: int | str = 5) -> None:
    """The last token of every sequence: two steps and the fused one, against the eager path and float64."""
    replay = Replay(make_selector("exact_topk", topk=topk), stream, layout=LAYOUTS[layout]).skip(stream.length - 1)
    in_eager = replay.fork()
    eager, eager_counters = in_eager.step(), in_eager.state.counters.read()
    with backend.using("triton"):
        in_two, fused = replay.fork(), replay.fork()
        step = in_two.step()
        output = fused.attend()
    assert step.support.indices is not None
    assert eager.support.indices is not None
    assert torch.equal(step.support.indices, eager.support.indices)
    assert torch.equal(step.support.counts, eager.support.counts)
    expected = eager.expected()
    for found in (step.output, output):
        assert_close_to_float64(found, expected)
        assert torch.equal(found.isnan(), expected.output.isnan())
    assert_same_output(output, step.output, step.tolerance())
    for taken in (in_two, fused):
        counters = taken.state.counters.read()
        assert counters.keys() == eager_counters.keys()
        for name, value in eager_counters.items():
            assert torch.equal(counters[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout, dtype):
    check(random_stream(0, lengths=[90, 41], head_dim=24).to(dtype), layout)


@pytest.mark.parametrize("topk", [1, 12, 89, 90, 200, "6.25%", "100%"])
def test_budgets(topk):
    check(random_stream(1, lengths=[90, 1, 33], head_dim=16), "paged", topk)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers(kind):
    check(hostile_stream(random_stream(2, lengths=[100, 66], head_dim=16), kind), topk=7)


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    group=st.integers(1, 7),
    topk=st.one_of(st.integers(1, 20), st.sampled_from(["3%", "20%", 150])),
    kind=st.sampled_from([None, *HOSTILE]),
)
@settings(max_examples=10)
def test_any_step(seed, lengths, layout, group, topk, kind):
    stream = random_stream(seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=8)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        check(stream if kind is None else hostile_stream(stream, kind), layout, topk)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 7), (96, 2), (128, 5), (256, 3)])
def test_every_combination(layout, dtype, head_dim, group):
    stream = random_stream(
        3, lengths=[111, 63], num_attention_heads=group, num_key_value_heads=1, head_dim=head_dim
    ).to(dtype)
    for topk in (4, "6.25%"):
        check(stream, layout, topk)


def test_blocks_as_they_are(monkeypatch):
    monkeypatch.undo()
    check(random_stream(4, length=4500, num_attention_heads=2, num_key_value_heads=1, head_dim=8), topk=50)


def test_a_sequence_that_has_not_begun_attends_to_nothing():
    stream = random_stream(5, lengths=[80, 20], head_dim=8)
    replay = Replay(make_selector("exact_topk", topk=5), stream).skip(49)
    with backend.using("triton"):
        assert bool((replay.attend()[1] == 0).all())


@pytest.mark.parametrize("topk", [512, "6.25%"])
@pytest.mark.parametrize("view", [{}, {"page_size": 16}, {"left_padded": True}])
def test_a_step_waits_for_no_device_and_launches_four_kernels(monkeypatch, topk, view):
    monkeypatch.undo()
    layer = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("cpu"), batch_size=2)
    for length in (2000, 100_000):
        found = trace(make_selector("exact_topk", topk=topk), layer, length, **view)
        names = [launch.kernel.split(":")[1] for launch in found.step.launches]
        assert names == ["qk_scores_kernel", "topk_kernel", "softmax_values_kernel", "combine_kernel"]
        if topk == 512:  # a percentage of each length is PyTorch's to compute
            assert found.step.torch_ops == 0
