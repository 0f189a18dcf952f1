"""StreamingLLM's kernel against what `discover` and `aggregate` say, and against float64."""

import dataclasses
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.explain import trace
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.rotary import Rotary
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel.testing.tolerances import assert_close_to_float64, assert_same_output

LAYOUTS = {
    "dense": DenseLayout(),
    "static": DenseLayout(static=True),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=4),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = importlib.import_module("sparsesel_streaming_llm.kernels")


@pytest.fixture
def in_parts(monkeypatch):
    """Have keys split into so many parts, which so few keys would not be by themselves."""
    return lambda count: monkeypatch.setattr(KERNELS, "num_splits", lambda *_, **__: count)


def check(stream, layout="dense", *, steps=1, **values):
    """The last tokens through the kernel, through the two steps on either backend, and what each counted."""
    layout = LAYOUTS[layout]
    selector = make_selector("streaming_llm", **values)
    fused, parts, eager = (Replay(selector, stream, layout=layout).prefill(stream.length - steps) for _ in range(3))
    for _ in range(steps):
        with backend.using("triton"):
            output, composed = fused.attend(), parts.step()
        expected = eager.step()
        assert torch.equal(composed.mask, expected.mask)
        assert_same_output(output, composed.output, expected.tolerance(), "attend, discover and aggregate")
        assert_same_output(output, expected.output, expected.tolerance(), "triton and eager")
        if values.get("positions", "original") == "original":
            assert_close_to_float64(output, expected.expected())
    counted = [replay.state.counters.read() for replay in (fused, eager)]
    assert counted[0].keys() == counted[1].keys()
    assert all(torch.equal(counted[0][name], counted[1][name]) for name in counted[0])


def streams(seed, lengths, dtype=torch.float32, *, group=2, head_dim=24):
    return random_stream(
        seed, lengths=lengths, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim
    ).to(dtype)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_types_and_positions(layout, dtype, positions):
    steps = 2 if dtype == torch.float32 else 1
    check(streams(0, [63, 17], dtype), layout, steps=steps, topk=20, sink_size=4, positions=positions)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(head_dim, dtype, positions):
    stream = streams(1, [40, 9], dtype, head_dim=head_dim)
    check(stream, "paged", topk=20, sink_size=5, positions=positions)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_groups(group, positions):
    stream = streams(2, [40, 9], torch.bfloat16, group=group)
    check(stream, topk=20, sink_size=5, positions=positions)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("topk", "sink_size"),
    [(128, 64), (128, 63), (129, 65), (65, 64), (512, 4), (90, 0), (1, 0), ("50%", 64), ("1%", 4), ("100%", 4)],
)
def test_budgets_and_parts(in_parts, parts, topk, sink_size, positions):
    in_parts(parts)
    check(streams(3, [140, 64]), topk=topk, sink_size=sink_size, positions=positions)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [0, 1, 5, 12])
def test_rotary_embeddings_of_any_kind(pairs, interleaved):
    """Some turn a part of the channels, some pair neighbours; some layers have none."""
    stream = streams(4, [2000, 900], head_dim=24)
    selector = make_selector("streaming_llm", topk=9, sink_size=4, positions="cache")
    rotary = Rotary(torch.logspace(0, -3, pairs), interleaved)
    state = selector.init_state(dataclasses.replace(stream.layer_spec(), rotary=rotary))
    kv = LAYOUTS["dense"](stream.key, stream.value, stream.starts)
    outputs = {}
    for name in ("triton", "eager"):
        with backend.using(name):
            outputs[name] = selector.attend(stream.query[:, :, -1:], kv, state, scale=0.5)
    torch.testing.assert_close(outputs["triton"], outputs["eager"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_from_the_first_token_on(positions):
    """Sequences begin at different steps, with zeros until then, and the budget exceeds them for a while."""
    stream = streams(4, [8, 4, 1])
    selector = make_selector("streaming_llm", topk=4, sink_size=2, positions=positions)
    fused, eager = Replay(selector, stream), Replay(selector, stream)
    for step in range(8):
        with backend.using("triton"):
            output = fused.attend()
        begun = torch.tensor([True, step >= 4, step == 7])
        assert not output[~begun].any()
        torch.testing.assert_close(output[begun], eager.attend()[begun], rtol=1e-5, atol=1e-5)


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(2, 140), min_size=1, max_size=2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    group=st.integers(1, 6),
    half_dim=st.integers(1, 20),
    topk=st.one_of(st.integers(5, 150), st.sampled_from(["5%", "33.3%"])),
    sink_size=st.integers(0, 4),
    positions=st.sampled_from(["original", "cache"]),
    parts=st.integers(1, 3),
)
@settings(max_examples=15)
def test_any_shape(seed, lengths, layout, dtype, group, half_dim, topk, sink_size, positions, parts):
    stream = streams(seed, lengths, dtype, group=group, head_dim=2 * half_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNELS, "num_splits", lambda *_, **__: parts)
        check(stream, layout, topk=topk, sink_size=sink_size, positions=positions)


@pytest.mark.full
@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 5, 16])
def test_every_combination(in_parts, layout, dtype, head_dim, group, positions):
    in_parts(2)
    stream = streams(5, [130, 63, 3], dtype, group=group, head_dim=head_dim)
    check(stream, layout, topk=70, sink_size=5, positions=positions)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers_are_those_of_a_softmax(in_parts, kind, positions):
    in_parts(2)
    stream = hostile_stream(random_stream(6, lengths=[95, 66], head_dim=24), kind)
    check(stream, topk=70, sink_size=4, positions=positions)


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_what_lies_between_is_not_read(positions):
    stream = streams(7, [80])
    selector = make_selector("streaming_llm", topk=20, sink_size=4, positions=positions)
    with backend.using("triton"):
        clean = Replay(selector, stream).prefill(79).attend()
        stream.key[:, :, 4:64] = stream.value[:, :, 4:64] = float("nan")
        assert torch.equal(clean, Replay(selector, stream).prefill(79).attend())


@pytest.mark.parametrize(("page_size", "left_padded"), [(0, False), (0, True), (16, False)])
@pytest.mark.parametrize("topk", [512, "6.25%"])
def test_launches_without_a_look_at_the_device(page_size, left_padded, topk):
    """One kernel and the combination, one more for sinks of another query; for an absolute budget nothing else."""
    layer = random_stream(0, length=1).layer_spec()
    layer = dataclasses.replace(layer, rotary=Rotary(torch.empty(32, device="meta")))
    attention = "sink_window_attention_kernel"
    for positions, expected in (("original", [attention]), ("cache", [attention] * 2)):
        selector = make_selector("streaming_llm", topk=topk, positions=positions)
        found = trace(selector, layer, 20000, page_size=page_size, left_padded=left_padded)
        assert not found.prefill.launches
        for launches in (found.first.launches, found.step.launches):
            assert [launch.kernel.split(":")[1] for launch in launches] == [*expected, "combine_kernel"]
        if topk == 512 and not left_padded:
            assert found.step.torch_ops == 0


def test_no_list_of_positions_is_made():
    """What a step allocates is for the parts of its output alone."""
    layer = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
    found = trace(make_selector("streaming_llm"), layer, 131072)
    parts = found.step.launches[0].grid[0]
    rows = 28 * parts * (128 + 2) * 4 + 28 * 128 * 2
    assert found.step.workspace - rows <= 64  # the sequences' lengths
