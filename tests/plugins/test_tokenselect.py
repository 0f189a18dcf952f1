"""TokenSelect against its plain-loop reference over random lives of a cache, its vote, its budget and its cost."""

import copy
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.registry import make_config, make_selector, registry
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_tokenselect.config import TokenSelectConfig
from sparsesel_tokenselect.reference import LoopTokenSelect, Selection
from sparsesel_tokenselect.state import STEPS

LAYER = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("cpu"))


class Both:
    """The selector and one reference per sequence, put through the same life."""

    def __init__(self, config, stream, layout=None):
        self.config = config
        self.replay = Replay(make_selector(config), stream, layout=layout)
        self.loops = [LoopTokenSelect(config, scale=self.replay.scale) for _ in range(stream.batch_size)]
        self.counted = Counter()

    def decode(self):
        step = self.replay.step()
        assert step.support.indices.shape[1] == 1
        for row, loop in enumerate(self.loops):
            length = int(step.lengths[row])
            query = step.query[row, :, 0].tolist()
            keys, values = (part[row, :, :length].tolist() for part in (step.keys, step.values))
            is_hit, expected = loop.step(query, keys)
            support = step.mask[row, 0].nonzero().flatten().tolist()
            if support != expected:
                assert not is_hit
                self.accept_tie(loop, query, keys, support, expected)
            if step.query.isfinite().all() and step.keys.isfinite().all():
                for head in range(len(query)):
                    output = torch.tensor(loop.attend(query, keys, values, support, head))
                    torch.testing.assert_close(
                        step.output[row, head, 0].double(), output.double(), rtol=1e-4, atol=1e-5
                    )
            self.counted += Counter(hit=int(is_hit), miss=int(not is_hit), selected=len(support), visible=length)
        counters = self.replay.state.counters.read()
        for name in ("hit", "miss", "selected", "visible"):
            assert counters[name].tolist() == [self.counted[name]] * step.query.shape[1], name

    def accept_tie(self, loop, query, keys, support, expected):
        """Votes are rounded, so of tokens whose votes are all but equal either may be selected; the loop follows."""
        length = len(keys[0])
        first, wanted, last = loop.parts(length)
        votes = loop.votes(query, keys, first, length - last)
        assert len(support) == len(expected)
        edge = sorted(votes.values(), reverse=True)[wanted - 1]
        for position in set(support) ^ set(expected):
            assert votes[position] == pytest.approx(edge, rel=1e-5, abs=1e-12)
        loop.history[-1] = Selection(query, [at for at in support if first <= at < length - last], length - 1)

    def crop(self, count, seed):
        self.replay.crop(count)
        self.replay.stream = self.replay.stream.diverging(self.replay.length, seed)
        for row, loop in enumerate(self.loops):
            loop.crop(int(self.replay.stream.lengths(self.replay.length)[row]))

    def take(self, index):
        self.loops = [copy.deepcopy(self.loops[row]) for row in index]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 8)),
        st.tuples(st.just("decode"), st.integers(1, 8)),
        st.tuples(st.sampled_from(["prefill", "skip", "crop"]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["reorder", "repeat", "fork"]), st.integers(1, 3)),
    ),
    max_size=8,
)


@given(
    topk=st.sampled_from([7, 12, 20, "20%", "35%", "3%"]),
    sink_size=st.integers(0, 3),
    local_size=st.integers(1, 4),
    threshold=st.sampled_from([0.9, 0.8, 0.97, -1.0, 1.5]),
    lengths=st.sampled_from([[140], [140, 140], [140, 137, 131]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
    prompt=st.integers(10, 40),
    operations=OPERATIONS,
)
def test_any_life_matches_the_loops(
    topk, sink_size, local_size, threshold, lengths, heads, seed, paged, prompt, operations
):
    config = TokenSelectConfig(topk=topk, sink_size=sink_size, local_size=local_size, similarity_threshold=threshold)
    stream = random_stream(
        seed, lengths=lengths, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8
    )
    both = Both(config, stream, PagedLayout(block_size=3) if paged else None)
    both.replay.prefill(prompt)
    for at, (operation, amount) in enumerate([*operations, ("decode", 4)]):
        rows = both.replay.stream.batch_size
        match operation:
            case "decode":
                for _ in range(amount):
                    both.decode()
            case "crop":
                if both.replay.length - amount >= 10:
                    both.crop(amount, seed + at)
            case "reorder":
                index = [(row + amount) % rows for row in range(rows)]
                both.replay.reorder(torch.tensor(index))
                both.take(index)
            case "repeat" if rows < 3:
                both.replay.repeat(2)
                both.take([row for row in range(rows) for _ in range(2)])
            case "fork":
                both.replay.fork().steps(amount)
            case "prefill" | "skip":
                getattr(both.replay, operation)(amount)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input_matches_the_loops(kind):
    stream = hostile_stream(random_stream(9, lengths=[60, 41], head_dim=8, jump=0.03), kind)
    both = Both(TokenSelectConfig(topk=12, sink_size=2, local_size=3), stream)
    both.replay.prefill(40)
    for _ in range(20):
        both.decode()


def test_long_decode_hits_and_misses():
    """Queries that drift and now and then break off: both paths are taken, and a hit reads no key but its own."""
    stream = random_stream(1, lengths=[200, 180], head_dim=16, correlation=0.99, jump=0.02)
    both = Both(TokenSelectConfig(topk=24, sink_size=4, local_size=8), stream)
    both.replay.prefill(100)
    for _ in range(100):
        both.decode()
    assert both.counted["hit"] > 50
    assert both.counted["miss"] > 20


def test_a_selection_stays_until_the_query_has_turned_from_the_one_that_made_it():
    """The query of the last miss is what counts, not that of the last step: drift adds up."""
    stream = random_stream(2, length=60, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    angles = 0.1 * torch.arange(60.0)
    stream.query.zero_()
    stream.query[..., 0], stream.query[..., 1] = angles.cos(), angles.sin()
    replay = Replay(make_selector("tokenselect", topk=12, sink_size=2, local_size=2), stream).prefill(40)
    misses = []
    for at in range(20):
        assert int(replay.step().mask.sum()) == 2 * 12
        if float(replay.state.counters.read()["miss"][0]) > len(misses):
            misses.append(at)
    assert misses == [0, 5, 10, 15]  # cos 0.4 = 0.92, cos 0.5 = 0.88


def test_drafts_that_are_taken_back_leave_the_selection_before_them():
    """As many as the ring holds steps, but one."""
    stream = random_stream(4, length=120, jump=0.5)
    replay = Replay(make_selector("tokenselect", topk=12, sink_size=2, local_size=2), stream).prefill(40)
    replay.steps(10)
    expected = [step.mask for step in replay.fork().steps(10)]
    replay.stream = stream.diverging(50, seed=5)
    replay.steps(STEPS - 1)
    replay.crop(STEPS - 1)
    replay.stream = stream
    for step, mask in zip(replay.steps(10), expected, strict=True):
        assert torch.equal(step.mask, mask)


def test_every_head_has_one_vote():
    """A head with scores far larger than the others' does not outvote them."""
    stream = random_stream(6, length=40, num_attention_heads=3, num_key_value_heads=3, head_dim=4)
    stream.query.fill_(1.0)
    stream.key.fill_(0.0)
    stream.key[:, 0, 10] = 1000.0  # one vote
    stream.key[:, 1:, 20] = 20.0  # two votes
    selector = make_selector("tokenselect", topk=3, sink_size=1, local_size=1)
    step = Replay(selector, stream).prefill(39).step()
    assert step.mask[0, 0].nonzero().flatten().tolist() == [0, 20, 39]


def test_presets():
    assert set(registry().presets("tokenselect")) == {"paper", "strict"}
    assert make_config("tokenselect:paper") == TokenSelectConfig(topk=2688, sink_size=128, local_size=512)
    assert make_config("tokenselect:strict") == make_config("tokenselect")
    assert make_config("tokenselect") == TokenSelectConfig(
        topk=512, sink_size=64, local_size=32, similarity_threshold=0.9
    )
    fixed = make_config("tokenselect", topk=96)
    assert fixed.sink_size + fixed.local_size == 96  # nothing left to select, which is legal


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"topk": 95}, "local_size"),
        ({"topk": 0}, "topk"),
        ({"sink_size": -1}, "sink_size"),
        ({"sink_size": 500}, "local_size"),
        ({"local_size": 0}, "local_size"),
        ({"local_size": 449}, "local_size"),
        ({"similarity_threshold": math.nan}, "similarity_threshold"),
        ({"similarity_threshold": "high"}, "similarity_threshold"),
        ({"window_size": 3}, "window_size"),
    ],
)
def test_refused(values, field):
    with pytest.raises(InputError) as caught:
        make_config("tokenselect", **values)
    assert field in caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize("threshold", [-1.0, 2.0])
def test_cost_is_what_a_step_gathers(gathered, threshold):
    """A hit reads its set, once for a group; a miss all keys besides."""
    stream = random_stream(0, batch=2, length=200, num_attention_heads=6, num_key_value_heads=2)
    selector = make_selector("tokenselect", topk=80, sink_size=8, local_size=8, similarity_threshold=threshold)
    replay = Replay(selector, stream).prefill(150)
    replay.steps(3)
    gathered.clear()
    replay.attend()
    cost = selector.cost(stream.layer_spec(), replay.length)
    scanned = 2 * 2 * replay.length * 64 * 4 if threshold > 1 else 0
    assert gathered == {"keys": cost.key_bytes + scanned, "values": cost.value_bytes}
    state = replay.state
    one_step = sum(part[:, 0].nbytes for part in (state.queries, state.selected, state.stamps))
    assert cost.metadata_bytes == one_step  # 64 selected fill their slots
    assert cost.state_bytes == state.nbytes() == STEPS * one_step


def test_cost_is_the_stated_fraction_of_dense_attention():
    length = 128 * 1024
    full = make_selector("full").cost(LAYER, length)
    cost = make_selector("tokenselect").cost(LAYER, length)
    assert (cost.key_bytes + cost.value_bytes) / full.bytes_read == pytest.approx(0.004, abs=1e-4)
    assert cost.metadata_bytes < 0.02 * cost.bytes_read
    assert cost.attended == 512
    assert make_selector("tokenselect").cost(LAYER, 100).attended == 100
