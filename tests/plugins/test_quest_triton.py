"""Quest in Triton against its eager path and float64: lives of a cache, layouts, shapes, types, hostile numbers."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.explain import trace
from sparsesel.kv import KVView
from sparsesel.ops import backend, topk
from sparsesel.ops.launch import recording
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec, Support
from sparsesel.testing import (
    DenseLayout,
    PagedLayout,
    assert_close_to_float64,
    expected_attention,
    hostile_stream,
    random_stream,
)
from sparsesel.testing.inputs import HOSTILE
from sparsesel.testing.replay import Replay
from sparsesel_quest import kernels

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=5),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
OPERATIONS = ["prefill", "step", "skip", "crop", "reorder", "repeat", "select"]
META = LayerSpec(5, 6, 2, 80, torch.bfloat16, torch.device("meta"), batch_size=2)


class Lives:
    """One life of a cache, lived in eager PyTorch and twice in Triton: by discover and aggregate, and by attend."""

    def __init__(self, spec, stream, layout="dense"):
        self.eager = Replay(make_selector(spec), stream, layout=LAYOUTS[layout])
        self.apart, self.fused = self.eager.fork(), self.eager.fork()

    def do(self, operation, *arguments):
        getattr(self.eager, operation)(*arguments)
        with backend.using("triton"):
            getattr(self.apart, operation)(*arguments)
            getattr(self.fused, operation)(*arguments)
        return self

    def step(self):
        """A step gives the eager path's support, and attention over it."""
        wanted = self.eager.step()
        with backend.using("triton"):
            step, output = self.apart.step(), self.fused.attend()
        assert torch.equal(step.support.indices, wanted.support.indices)
        assert torch.equal(step.support.counts, wanted.support.counts)
        for got in (step.output, output):
            assert_close_to_float64(got, wanted.expected())
            assert torch.equal(got.isnan(), wanted.output.isnan())
        self.check_state()
        return wanted

    def check_state(self):
        for run in (self.apart, self.fused):
            assert torch.equal(run.state.indexed, self.eager.state.indexed)
            for name in ("minima", "maxima"):
                for row, length in enumerate(self.eager.state.indexed.tolist()):
                    pages = self.eager.state.pages(length)
                    got, wanted = (getattr(part.state, name)[row, :, :pages] for part in (run, self.eager))
                    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)

    def check_counters(self):
        for run in (self.apart, self.fused):
            counters = run.state.counters.read()
            for name, wanted in self.eager.state.counters.read().items():
                assert counters[name].tolist() == wanted.tolist()


def streams(seed, lengths, *, heads=(2, 1), head_dim=8, dtype=torch.float32):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    return random_stream(seed, lengths=lengths, **sizes).to(dtype)


@given(
    spec=st.sampled_from(["topk=8,page_size=4", "topk=20,page_size=2", "topk=3,page_size=1", "topk=20%,page_size=3"]),
    lengths=st.sampled_from([[80], [80, 77], [80, 61]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    layout=st.sampled_from(list(LAYOUTS)),
    prompt=st.integers(20, 40),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["prefill", "step", "skip", "crop", "reorder", "repeat", "select"]), st.integers(1, 9)
        ),
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_any_life_is_the_eager_one(spec, lengths, heads, layout, prompt, operations, seed):
    lives = Lives(f"quest,{spec}", streams(seed, lengths, heads=heads), layout).do("prefill", prompt)
    for operation, amount in operations:
        rows = lives.eager.stream.batch_size
        match operation:
            case "step":
                lives.step()
            case "crop":
                lives.do("crop", min(amount, lives.eager.length - 20))
                for run in (lives.eager, lives.apart, lives.fused):
                    run.stream = run.stream.diverging(run.length, seed + 1)
            case "reorder":
                lives.do("reorder", (torch.arange(rows) + amount) % rows)
            case "select":
                lives.do("select", torch.arange(rows - 1, -1, -2))
            case "repeat" if rows < 3:
                lives.do("repeat", 2)
            case "prefill" | "skip":
                lives.do(operation, amount)
    lives.step()
    lives.check_counters()


SHAPES = [
    pytest.param(torch.float32, "dense", (3, 1), 8, "topk=8,page_size=4", id="odd group"),
    pytest.param(torch.bfloat16, "paged", (4, 2), 80, "topk=16,page_size=8", id="bfloat16"),
    pytest.param(torch.float16, "channel-major", (2, 2), 24, "topk=6,page_size=3", id="float16"),
    pytest.param(torch.float32, "paged by channel", (16, 1), 8, "topk=4,page_size=4", id="last page alone"),
    pytest.param(torch.float32, "dense", (2, 1), 8, "topk=1,page_size=1", id="one key"),
    pytest.param(torch.float32, "dense", (2, 1), 8, "topk=3%,page_size=16", id="less than a page"),
    pytest.param(torch.float32, "dense", (2, 1), 8, "topk=128,page_size=64", id="page of several tiles"),
    pytest.param(torch.float32, "dense", (2, 1), 8, f"topk={2**30},page_size={2**30}", id="page larger than all"),
]
WIDE = [
    pytest.param(dtype, layout, heads, dim, spec, marks=pytest.mark.full)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for layout in LAYOUTS
    for heads in ((1, 1), (5, 1), (8, 4))
    for dim in (64, 80, 96, 128, 256)
    for spec in ("topk=16,page_size=16", "topk=24,page_size=8")
]


@pytest.mark.parametrize(("dtype", "layout", "heads", "head_dim", "spec"), [*SHAPES, *WIDE])
def test_shapes_and_types(dtype, layout, heads, head_dim, spec):
    """Up to a page's end and past it; the second sequence has few tokens."""
    stream = streams(3, [68, 6], heads=heads, head_dim=head_dim, dtype=dtype)
    lives = Lives(f"quest,{spec}", stream, layout).do("prefill", 62).do("skip", 1)
    for _ in range(3):
        lives.step()
    lives.check_counters()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers(kind):
    lives = Lives("quest,topk=12,page_size=4", hostile_stream(streams(7, [44, 33]), kind)).do("prefill", 38)
    for _ in range(2):  # the query of the first is a bad one
        lives.step()


def test_any_number_of_keys_is_taken_in_by_any_launch():
    """What the host knows decides how many programs there are, not what they do."""
    stream = streams(5, [50, 50, 21])
    kv = DenseLayout()(stream.key, stream.value, stream.starts)
    bounds = []
    for programs in (1, 700):
        minima, maxima = torch.full((2, 3, 1, 20, 8), torch.nan)
        with backend.using("triton"):
            indexed = torch.tensor([0, 0, 0])
            part = KVView.dense(kv.keys, kv.values, starts=kv.starts, lengths=kv.lengths - torch.tensor([50, 17, 20]))
            kernels.update_bounds(part, indexed, minima, maxima, page_size=3, lacking=1)
            kernels.update_bounds(kv, part.lengths, minima, maxima, page_size=3, lacking=programs)
        bounds.append((minima, maxima))
    for row, length in enumerate(kv.lengths.tolist()):
        for page, start in enumerate(range(0, length, 3)):
            held = stream.key[row, :, 50 - length :][:, start : min(start + 3, length)]
            for minima, maxima in bounds:
                assert torch.equal(minima[row, :, page], held.amin(1))
                assert torch.equal(maxima[row, :, page], held.amax(1))


def test_selection_from_tiles(monkeypatch):
    """As among many pages: the kernel that scores them gives the largest of each tile as well."""
    monkeypatch.setattr(topk, "_BLOCK", 32)
    lives = Lives("quest,topk=3,page_size=1", hostile_stream(streams(13, [90, 75]), "clustered keys"))
    lives.do("prefill", 86)
    with recording(running=True) as launches:
        lives.step()
    lives.step()
    tiles = [dict(launch.constants)["TILE"] for launch in launches if launch.kernel.endswith("page_scores_kernel")]
    assert min(tiles) > 0
    assert not any(launch.kernel.endswith("tile_maxima_kernel") for launch in launches)


def test_a_sequence_without_tokens_gives_zeros():
    stream = streams(6, [30, 30])
    kv = KVView.dense(stream.key, stream.value, lengths=torch.tensor([30, 0]))
    selector = make_selector("quest,topk=8,page_size=4")
    query, scale = stream.query[:, :, -1:], 0.3
    with backend.using("triton"):
        state = selector.init_state(stream.layer_spec())
        support = selector.discover(query, kv, state, scale=scale)
        output = selector.attend(query, kv, state, scale=scale)
        again = selector.aggregate(query, kv, support, state, scale=scale)
    assert support.counts[:, 0, 0].tolist() == [6, 0]
    assert not bool(output[1].any())
    torch.testing.assert_close(output, again)


def test_values_may_have_other_channels():
    stream = streams(8, [40, 33], heads=(6, 2), head_dim=24)
    stream = dataclasses.replace(stream, value=stream.value[..., :10])
    replay = Replay(make_selector("quest,topk=12,page_size=4"), stream).prefill(40)
    kv, query, state = replay.kv(), stream.query[:, :, -1:], replay.state
    with backend.using("triton"):
        pages = kernels.choose_pages(query, kv, state.minima, state.maxima, topk=12, page_size=4)
        positions = kernels.page_support(pages, kv)
        output = kernels.page_attention(query, kv, pages, scale=0.2)
    mask = Support.of(positions[:, :, None]).as_mask(kv)[:, :, 0]
    assert_close_to_float64(output, expected_attention(query, *stream.logical(40), mask, scale=0.2))


def test_state_stays_in_place():
    """What a captured graph wrote to is still the state after steps and crops within the room there is."""
    with backend.using("triton"):
        replay = Replay(make_selector("quest,topk=8,page_size=4"), streams(9, [60, 55])).prefill(50).crop(20)
        before = {name: tensor.data_ptr() for name, tensor in replay.state.tensors().items()}
        replay.steps(2)
        replay.crop(3)
        replay.step()
        replay.state.reset()
    assert {name: tensor.data_ptr() for name, tensor in replay.state.tensors().items()} == before


@pytest.mark.parametrize(("page_size", "left_padded"), [(0, False), (0, True), (16, False)])
def test_a_step_waits_for_no_device(page_size, left_padded):
    """A meta tensor has no content, so whoever asked for some would fail."""
    found = trace(make_selector("quest"), META, 4099, page_size=page_size, left_padded=left_padded)
    step = [launch.kernel.split(":")[1] for launch in found.step.launches]
    assert step[:3] == ["update_bounds_kernel", "plan_pages_kernel", "page_scores_kernel"]
    assert step[-2:] == ["page_attention_kernel", "combine_kernel"]
    assert [launch.kernel for launch in found.prefill.launches] == ["sparsesel_quest.kernels:update_bounds_kernel"]
    assert found.step.torch_ops <= 1  # the new length
    dense = trace(make_selector("quest,dense_layers=9"), META, 4099, page_size=page_size, left_padded=left_padded)
    assert [launch.kernel.split(":")[1] for launch in dense.step.launches] == [
        "dense_attention_kernel",
        "combine_kernel",
    ]
