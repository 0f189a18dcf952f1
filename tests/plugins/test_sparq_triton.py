"""SparQ in Triton against its eager path and float64: lives of a cache, layouts, shapes, types, hostile numbers."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.explain import trace
from sparsesel.kv import KVView
from sparsesel.ops import backend, sparse_attention, topk
from sparsesel.ops.launch import recording
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing import DenseLayout, PagedLayout, assert_same_output, hostile_stream, random_stream
from sparsesel.testing.inputs import HOSTILE
from sparsesel.testing.replay import Replay
from sparsesel_sparq import kernels, reference
from sparsesel_sparq.state import BLOCK

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "paged": PagedLayout(block_size=5),
    "paged by channel": PagedLayout(block_size=8, order="channel"),
}
OPERATIONS = ["prefill", "step", "skip", "crop", "reorder", "repeat", "select"]
SPECS = ["topk=8,rank=3", "topk=13,rank=8,local_size=0", "topk=20%,rank=1,local_size=5", "topk=9,reallocate=no,rank=4"]
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
        """A step gives the eager path's support and output."""
        wanted = self.eager.step()
        with backend.using("triton"):
            step, output = self.apart.step(), self.fused.attend()
        assert torch.equal(step.support.indices, wanted.support.indices)
        for got in (step.output, output):
            assert_same_output(got, wanted.output, wanted.tolerance())
        for run in (self.apart, self.fused):
            self.check_state(run.state)
        return wanted

    def check_state(self, state):
        """Numbers are on a grid, so that sums are exact in any order."""
        wanted = self.eager.state
        assert torch.equal(state.indexed, wanted.indexed)
        torch.testing.assert_close(state.value_sum, wanted.value_sum, rtol=0, atol=0, equal_nan=True)
        for row, length in enumerate(wanted.indexed.tolist()):
            parts = (
                (state.components[row, ..., :length], wanted.components[row, ..., :length]),
                (state.block_sums[row, :, : -(-length // BLOCK)], wanted.block_sums[row, :, : -(-length // BLOCK)]),
            )
            for got, expected in parts:
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

    def check_counters(self):
        for run in (self.apart, self.fused):
            counters = run.state.counters.read()
            for name, wanted in self.eager.state.counters.read().items():
                torch.testing.assert_close(counters[name], wanted, rtol=1e-5, atol=1e-5)


def streams(seed, lengths, *, heads=(2, 1), head_dim=8, dtype=torch.float32):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    return random_stream(seed, lengths=lengths, **sizes).to(dtype)


@given(
    spec=st.sampled_from(
        [
            "topk=8,rank=3",
            "topk=13,rank=8,local_size=0",
            "topk=20%,rank=1,local_size=5",
            "topk=9,reallocate=false,rank=4",
        ]
    ),
    lengths=st.sampled_from([[170], [170, 167], [170, 151]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    layout=st.sampled_from(list(LAYOUTS)),
    prompt=st.sampled_from([20, BLOCK - 1, BLOCK, 2 * BLOCK + 1]),
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 9)), max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=6)
def test_any_life_is_the_eager_one(spec, lengths, heads, layout, prompt, operations, seed):
    lives = Lives(f"sparq,{spec}", streams(seed, lengths, heads=heads), layout).do("prefill", prompt)
    for operation, amount in operations:
        rows = lives.eager.stream.batch_size
        match operation:
            case "step":
                lives.step()
            case "crop":
                lives.do("crop", min(3 * amount, lives.eager.length - 20))
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
    pytest.param(torch.float32, "dense", (3, 1), 8, "topk=8,rank=4", id="odd group"),
    pytest.param(torch.bfloat16, "paged", (4, 2), 80, "topk=16,rank=70", id="bfloat16, components in two parts"),
    pytest.param(torch.float16, "channel-major", (2, 2), 24, "topk=6,rank=24,local_size=6", id="float16, newest alone"),
    pytest.param(torch.float32, "paged by channel", (16, 1), 8, "topk=1,rank=1", id="one key"),
    pytest.param(torch.float32, "dense", (2, 1), 8, "topk=3%,rank=5,local_size=4", id="less than the newest"),
    pytest.param(torch.float32, "dense", (2, 1), 8, "topk=128,rank=5", id="everything"),
]
WIDE = [
    pytest.param(dtype, layout, heads, dim, spec, marks=pytest.mark.full)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for layout in LAYOUTS
    for heads in ((1, 1), (5, 1), (8, 4))
    for dim in (64, 80, 96, 128, 256)
    for spec in ("topk=16,rank=16", "topk=24,rank=64,reallocate=false")
]


@pytest.mark.parametrize(("dtype", "layout", "heads", "head_dim", "spec"), [*SHAPES, *WIDE])
def test_shapes_and_types(dtype, layout, heads, head_dim, spec):
    """Up to a tile's end and past it; the second sequence has few tokens."""
    stream = streams(3, [66, 6], heads=heads, head_dim=head_dim, dtype=dtype)
    lives = Lives(f"sparq,{spec}", stream, layout).do("prefill", 62).do("skip", 1)
    for _ in range(2):
        lives.step()
    lives.check_counters()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers(kind):
    lives = Lives("sparq,topk=7,rank=3", hostile_stream(streams(7, [44, 33]), kind)).do("prefill", 38)
    for _ in range(2):  # the query of the first is a bad one
        lives.step()


@pytest.mark.parametrize("splits", [2, 5])
def test_in_parts(monkeypatch, splits):
    """Parts of the keys, which so few tokens would not be split into by themselves; some have none."""
    monkeypatch.setattr(kernels, "num_splits", lambda *_: splits)
    lives = Lives("sparq,topk=20,rank=3", streams(4, [150, 141, 9], heads=(4, 2))).do("prefill", 145)
    lives.step()
    lives.do("skip", 3).step()
    lives.check_counters()


def test_against_float64():
    stream = streams(11, [60, 45], heads=(4, 2), head_dim=16)
    selector = make_selector("sparq,topk=12,rank=5")
    replay = Replay(selector, stream).prefill(50)
    with backend.using("triton"):
        steps = replay.steps(2)
    for step in steps:
        for row, length in enumerate(step.lengths.tolist()):
            for kv_head in range(2):
                keys, values = (part[row, kv_head, :length].tolist() for part in (step.keys, step.values))
                heads = (2 * kv_head, 2 * kv_head + 1)
                queries = [step.query[row, head, 0].tolist() for head in heads]
                choice = reference.choose(selector.config, queries, keys, scale=step.scale)
                assert step.mask[row, heads[0]].nonzero().flatten().tolist() == choice.support
                for head, query, weights in zip(heads, queries, choice.weights, strict=True):
                    wanted = reference.attend(
                        selector.config, query, keys, values, weights, choice.support, scale=step.scale
                    )
                    got = step.output[row, head, 0].double()
                    torch.testing.assert_close(got, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-6)


def test_nothing_is_left_out_where_everything_is_chosen():
    """Exactly nothing, though the sum over what is chosen is not rounded as the sum over all."""
    with backend.using("triton"):
        replay = Replay(make_selector("sparq,topk=40,rank=3"), streams(12, [30, 21])).prefill(29)
        replay.attend()
    assert replay.state.counters.read()["reallocated"].tolist() == [0, 0]


def test_any_number_of_tokens_is_taken_in_by_any_launch():
    """What the host knows decides how many programs there are, not what they do."""
    stream = streams(5, [150, 150, 21])
    kv = DenseLayout()(stream.key, stream.value, stream.starts)
    part = KVView.dense(kv.keys, kv.values, starts=kv.starts, lengths=kv.lengths - torch.tensor([150, 87, 20]))
    for lacking in (1, 700):
        components = torch.full((3, 1, 8, 192), torch.nan)
        sums = torch.zeros(3, 1, 8), torch.zeros(3, 1, 3, 8)
        with backend.using("triton"):
            kernels.append(part, torch.tensor([0, 0, 0]), components, sums, span=BLOCK, lacking=lacking)
            kernels.append(kv, part.lengths, components, sums, span=BLOCK, lacking=lacking)
        for row, length in enumerate(kv.lengths.tolist()):
            key, value = (base[row, :, 150 - length :] for base in (stream.key, stream.value))
            assert torch.equal(components[row, ..., :length], key.transpose(1, 2))
            assert torch.equal(sums[0][row], value.sum(1))
            for block, tokens in enumerate(value.split(BLOCK, dim=1)):
                assert torch.equal(sums[1][row, :, block], tokens.sum(1))


def test_selection_from_tiles(monkeypatch):
    """As among many keys: the kernel that scores them gives the largest of each tile as well."""
    monkeypatch.setattr(topk, "_BLOCK", 32)
    lives = Lives("sparq,topk=7,rank=3", hostile_stream(streams(13, [90, 75]), "clustered keys"))
    lives.do("prefill", 86)
    with recording(running=True) as launches:
        lives.step()
    lives.step()
    tiles = [dict(launch.constants)["TILE"] for launch in launches if launch.kernel.endswith("merit_kernel")]
    assert min(tiles) > 0
    assert not any(launch.kernel.endswith("tile_maxima_kernel") for launch in launches)


def test_a_sequence_without_tokens_gives_zeros():
    stream = streams(6, [30, 30])
    kv = KVView.dense(stream.key, stream.value, lengths=torch.tensor([30, 0]))
    query, scale = stream.query[:, :, -1:], 0.3
    for spec in ("sparq,topk=8,rank=3", "sparq,topk=8,rank=3,reallocate=false"):
        selector = make_selector(spec)
        with backend.using("triton"):
            state = selector.init_state(stream.layer_spec())
            support = selector.discover(query, kv, state, scale=scale)
            output = selector.attend(query, kv, state, scale=scale)
            again = selector.aggregate(query, kv, support, state, scale=scale)
        assert support.counts[:, 0, 0].tolist() == [8, 0]
        assert not bool(output[1].any())
        torch.testing.assert_close(output, again)


def test_values_may_have_other_channels():
    stream = streams(8, [40, 33], heads=(6, 2), head_dim=24)
    stream = dataclasses.replace(stream, value=stream.value[..., :10])
    kv, query = DenseLayout()(stream.key, stream.value, stream.starts), stream.query[:, :, -1:]
    state = make_selector("sparq,rank=5").init_state(stream.layer_spec())
    with backend.using("triton"):
        state.record(kv, with_values=True)
        found = kernels.approximate(query, kv, state.components, rank=5, scale=0.2)
        indices = kernels.choose(found, kv, topk=9, local_size="topk/4")
        output, left_out = kernels.reallocated_attention(query, kv, indices, found, state.value_sum, scale=0.2)
    with backend.using("eager"):
        attention = sparse_attention(query, kv, indices[:, :, None], scale=0.2)
    mean = (state.value_sum / kv.lengths[:, None, None]).repeat_interleave(3, dim=1)[:, :, None]
    share = left_out[..., None, None]
    assert output.shape == (2, 6, 1, 10)
    torch.testing.assert_close(output, (1 - share) * attention + share * mean, rtol=1e-5, atol=1e-6)


def test_state_stays_in_place():
    """What a captured graph wrote to is still the state after steps and crops within the room there is."""
    with backend.using("triton"):
        replay = Replay(make_selector("sparq,topk=8,rank=3"), streams(9, [60, 55])).prefill(50).crop(20)
        before = {name: tensor.data_ptr() for name, tensor in replay.state.tensors().items()}
        replay.step()
        replay.crop(1)
        replay.step()
        replay.state.reset()
    assert {name: tensor.data_ptr() for name, tensor in replay.state.tensors().items()} == before


@pytest.mark.parametrize(("page_size", "left_padded"), [(0, False), (0, True), (16, False)])
def test_a_step_waits_for_no_device(page_size, left_padded):
    """A meta tensor has no content, so whoever asked for some would fail."""
    where = {"page_size": page_size, "left_padded": left_padded}
    found = trace(make_selector("sparq"), META, 4099, **where)
    step = [launch.kernel.split(":")[1] for launch in found.step.launches]
    assert step[0] == "append_kernel"
    assert step[-7:-3] == [
        "choose_components_kernel",
        "approximate_scores_kernel",
        "merit_kernel",
        "topk_kernel",
    ]
    assert step[-3:] == ["sparse_attention_kernel", "reallocate_kernel", "count_kernel"]
    assert found.step.torch_ops <= 1  # the new length
    bare = trace(make_selector("sparq,reallocate=false"), META, 4099, **where)
    assert [launch.kernel.split(":")[1] for launch in bare.step.launches][-2:] == ["combine_kernel", "count_kernel"]
