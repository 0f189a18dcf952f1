"""TokenSelect's kernels, in Triton's interpreter, against its eager path and float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.explain import trace
from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel.testing.tolerances import assert_same_output
from sparsesel_tokenselect import kernels
from sparsesel_tokenselect.config import TokenSelectConfig
from sparsesel_tokenselect.selector import similarity, soft_vote

LAYOUTS = {
    "dense": DenseLayout(),
    "channel-major": DenseLayout(channel_major=True),
    "static": DenseLayout(static=True),
    "paged": PagedLayout(block_size=4),
    "paged, tokens first": PagedLayout(block_size=3, order="token"),
}


class Both:
    """One life on both backends."""

    def __init__(self, config, stream, layout=None):
        selector = make_selector(config)
        self.eager, self.triton = (Replay(selector, stream, layout=layout) for _ in range(2))

    def each(self, operation, *args):
        for replay in (self.eager, self.triton):
            getattr(replay, operation)(*args)
        return self

    def step(self):
        expected = self.eager.step()
        with backend.using("triton"):
            actual = self.triton.step()
        assert torch.equal(actual.mask, expected.mask)
        assert torch.equal(actual.support.counts, expected.support.counts)
        assert_same_output(actual.output, expected.output, expected.tolerance())
        counted, wanted = (replay.state.counters.read() for replay in (self.triton, self.eager))
        assert set(counted) == set(wanted)
        assert all(torch.equal(counted[name], wanted[name]) for name in wanted)

    def steps(self, count):
        for _ in range(count):
            self.step()
        state, other = self.triton.state, self.eager.state
        assert torch.equal(state.stamps, other.stamps)
        valid = state.stamps >= 0
        for name in ("queries", "selected"):
            here, there = (getattr(part, name)[valid] for part in (state, other))
            torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)
        return self

    def hits(self):
        return float(self.triton.state.counters.read()["hit"][0])


def strict(topk=16, sink_size=2, local_size=3, **values):
    return TokenSelectConfig(topk=topk, sink_size=sink_size, local_size=local_size, **values)


@pytest.mark.parametrize("layout", ["dense", "static", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_life_is_the_same_on_both_backends(layout, dtype):
    stream = random_stream(1, lengths=[70, 61, 33], head_dim=10, jump=0.03).to(dtype)
    both = Both(strict(), stream, LAYOUTS[layout]).each("prefill", 37).steps(4)
    both.each("crop", 2).steps(2).each("reorder", torch.tensor([2, 0, 1])).steps(2).each("prefill", 2).steps(2)
    assert 0 < both.hits() < 30


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (7, 1), (16, 1)])
def test_every_shape(layout, dtype, dim, heads):
    stream = random_stream(
        2, lengths=[150, 97], head_dim=dim, num_attention_heads=heads[0], num_key_value_heads=heads[1]
    ).to(dtype)
    Both(strict(topk=40), stream, LAYOUTS[layout]).each("prefill", 140).steps(3)


@given(
    topk=st.sampled_from([7, 12, 20, "20%", "3%"]),
    sink_size=st.integers(0, 3),
    local_size=st.integers(1, 4),
    threshold=st.sampled_from([0.9, 0.97, -1.0, 1.5]),
    lengths=st.sampled_from([[60], [60, 57], [44, 60]]),
    heads=st.sampled_from([(2, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
)
@settings(max_examples=8)
def test_any_configuration(topk, sink_size, local_size, threshold, lengths, heads, seed, paged):
    config = strict(topk=topk, sink_size=sink_size, local_size=local_size, similarity_threshold=threshold)
    stream = random_stream(
        seed, lengths=lengths, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8
    )
    Both(config, stream, PagedLayout(block_size=3) if paged else None).each("prefill", 46).steps(3)


@pytest.mark.parametrize("prompt", [16, 17, 18])
def test_sequences_about_the_budget(prompt):
    """K = 16 and lengths one less, one more, and of which one has but a token."""
    stream = random_stream(3, lengths=[30, 28, 14], head_dim=4)
    Both(strict(), stream).each("skip", prompt).steps(2)


def test_a_sequence_that_has_not_begun_changes_nothing():
    stream = random_stream(3, lengths=[30, 10], head_dim=4)
    both = Both(strict(), stream).each("skip", 17)
    expected = both.eager.attend()
    with backend.using("triton"):
        output = both.triton.attend()
    torch.testing.assert_close(output, expected)
    assert not output[1].any()
    assert torch.equal(both.triton.state.stamps, both.eager.state.stamps)
    both.each("skip", 5).steps(2)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input(kind):
    stream = hostile_stream(random_stream(9, lengths=[48, 41], head_dim=8, jump=0.03), kind)
    Both(strict(topk=12), stream).each("prefill", 43).steps(4)


def scored(seed, between, dim=16, group=3, dtype=torch.float32, layout=None):
    """A query and a view of sequences with so many tokens between 2 first and 3 last ones."""
    lengths = [count + 5 for count in between]
    stream = random_stream(
        seed, lengths=lengths, head_dim=dim, num_attention_heads=2 * group, num_key_value_heads=2
    ).to(dtype)
    return stream.query[:, :, -1:], (layout or DenseLayout())(stream.key, stream.value, stream.starts)


def vote(query, kv, between):
    return kernels.votes(strict(), query, kv, torch.tensor(between, dtype=torch.int32), scale=0.3)


def exact_votes(query, kv, between):
    """In float64."""
    group = query.shape[1] // kv.num_heads
    keys = kv.logical_keys().double().repeat_interleave(group, dim=1)[:, :, 2 : kv.max_length - 3]
    counts = torch.arange(keys.shape[2]) < torch.tensor(between)[:, None]
    return soft_vote((query.double() @ keys.transpose(2, 3))[:, :, 0] * 0.3, counts)


@pytest.mark.parametrize(
    ("dtype", "dim", "group", "layout"),
    [
        (torch.float32, 16, 3, "dense"),
        (torch.bfloat16, 80, 7, "paged"),
        (torch.float16, 6, 1, "channel-major"),
        (torch.float32, 8, 16, "paged, tokens first"),
    ],
)
def test_votes_are_those_of_float64(dtype, dim, group, layout):
    """Over lengths of which some need several parts, and tiles that end within."""
    between = [275, 256, 33, 1]
    query, kv = scored(5, between, dim, group, dtype, LAYOUTS[layout])
    found, expected = vote(query, kv, between), exact_votes(query, kv, between)
    for row, count in enumerate(between):
        torch.testing.assert_close(found[row, :count].double(), expected[row, :count], rtol=2e-5, atol=1e-9)
        assert float(found[row, :count].sum()) == pytest.approx(query.shape[1], rel=1e-5)


def test_votes_do_not_change_from_run_to_run():
    query, kv = scored(6, [300, 300])
    assert torch.equal(vote(query, kv, [300, 300]), vote(query, kv, [300, 300]))


def test_a_head_whose_softmax_is_not_defined_casts_no_vote():
    query, kv = scored(7, [40], group=1)
    query = torch.stack([query[0, 0], torch.full_like(query[0, 1], float("nan"))])[None]
    torch.testing.assert_close(vote(query, kv, [40]), exact_votes(query, kv, [40]).float())
    assert float(vote(query, kv, [40]).sum()) == pytest.approx(1.0)
    kv.keys[:, 1] = float("inf")
    assert float(vote(query.nan_to_num(1.0), kv, [40]).sum()) == pytest.approx(1.0)


def test_nothing_is_scored_for_a_hit():
    """What is not written stays as it was: no number."""
    query, kv = scored(8, [40, 40])
    found = vote(query, kv, [0, 40])
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("name", ["eager", "triton"])
@pytest.mark.parametrize(
    "size", [1.0, 1e19, 3e38, 1e-30, 1e-42], ids=["usual", "squares overflow", "largest", "tiny", "subnormal"]
)
def test_similarity_does_not_depend_on_the_size_of_queries(name, size):
    """Queries turn by 0.1 a step: cos 0.4 = 0.92, cos 0.5 = 0.88."""
    stream = random_stream(2, length=50, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    angles = 0.1 * torch.arange(50.0)
    stream.query.zero_()
    stream.query[..., 0], stream.query[..., 1] = size * angles.cos(), size * angles.sin()
    stream.key.mul_(1e-3)
    replay = Replay(make_selector(strict()), stream).prefill(42)
    misses = []
    with backend.using(name):
        for _ in range(7):
            replay.step()
            misses.append(float(replay.state.counters.read()["miss"][0]))
    assert misses == [1, 1, 1, 1, 1, 2, 2]


def test_similarity_of_what_has_no_norm_is_zero():
    one = torch.tensor([[[3.0, 4.0]]])
    assert float(similarity(one, one * 2.0**124)) == 1.0
    for other in (0.0, float("inf"), float("nan")):
        assert float(similarity(one, torch.full_like(one, other))) == 0.0


def test_attend_is_discover_and_aggregate():
    stream = random_stream(10, lengths=[60, 40], head_dim=8)
    replay = Replay(make_selector(strict()), stream).prefill(50)
    other = replay.fork()
    with backend.using("triton"):
        for _ in range(3):
            assert torch.equal(replay.attend(), other.step().output)


def test_state_stays_where_it_is():
    """So that a step captured in a CUDA graph finds it there."""
    replay = Replay(make_selector(strict()), random_stream(11, length=60, head_dim=4)).prefill(30)
    with backend.using("triton"):
        replay.step()
        before = {name: part.data_ptr() for name, part in replay.state.tensors().items()}
        replay.steps(2)
    assert {name: part.data_ptr() for name, part in replay.state.tensors().items()} == before


def test_queries_that_need_a_gradient_leave_no_graph():
    stream = random_stream(12, length=40, head_dim=4)
    stream.query.requires_grad_()
    stream.key.requires_grad_()
    for name in ("eager", "triton"):
        replay = Replay(make_selector(strict()), stream).prefill(30)
        with backend.using(name):
            replay.step()
        assert not any(part.requires_grad for part in replay.state.tensors().values())


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("topk", [512, "6.25%"])
def test_a_step_waits_for_no_device(page_size, topk):
    """On tensors without content, which cannot be looked at."""
    layer = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("meta"), batch_size=2)
    found = trace(make_selector("tokenselect", topk=topk), layer, 8192, page_size=page_size)
    names = [launch.kernel.split(":")[1] for launch in found.step.launches]
    assert names[:3] == ["compare_kernel", "between_scores_kernel", "votes_kernel"]
    assert names[-3:] == ["set_kernel", "sparse_attention_kernel", "combine_kernel"]
    assert not found.prefill.launches


def test_a_budget_without_a_selection_scores_nothing():
    layer = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("meta"))
    found = trace(make_selector("tokenselect", topk=96), layer, 8192)
    names = [launch.kernel.split(":")[1] for launch in found.step.launches]
    assert names == ["compare_kernel", "set_kernel", "sparse_attention_kernel", "combine_kernel"]


def test_static_views_need_no_more_room_as_they_fill():
    """The grid is that of the longest sequence there may be, whatever lengths the device knows."""
    query, kv = scored(13, [60, 60])
    short = KVView.dense(kv.keys, kv.values, lengths=torch.tensor([30, 65]))
    found = vote(query, short, [25, 60])
    torch.testing.assert_close(
        found[0, :25], vote(query[:1], KVView.dense(kv.keys[:1, :, :30], kv.values[:1, :, :30]), [25])[0]
    )
