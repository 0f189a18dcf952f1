"""Quest against its plain-loop reference over random lives of a cache, its bounds, its budget and its cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.registry import make_config, make_selector, registry
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_quest import reference
from sparsesel_quest.config import QuestConfig

LAYER = LayerSpec(16, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
LARGEST = torch.finfo(torch.float32).max


def check_step(step, config, scale):
    """Supports and outputs of a step against the loops, row by row and head by head."""
    group = step.query.shape[1] // step.keys.shape[1]
    for row, length in enumerate(step.lengths.tolist()):
        topk = resolve_topk(config.topk, length)
        for head in range(step.query.shape[1]):
            query = step.query[row, head, 0].tolist()
            keys, values = (part[row, head // group, :length].tolist() for part in (step.keys, step.values))
            support = reference.support(query, keys, topk, config.page_size, largest=LARGEST)
            assert step.mask[row, head].nonzero().flatten().tolist() == support
            assert len(support) <= topk
            assert length - 1 in support
            if step.query.isfinite().all() and step.keys.isfinite().all():
                output = reference.attend(query, keys, values, support, scale=scale)
                torch.testing.assert_close(
                    step.output[row, head, 0].double(), torch.tensor(output).double(), rtol=1e-4, atol=1e-5
                )


def check_bounds(replay):
    """Every page's bounds from nothing but the keys."""
    keys, _ = replay.stream.logical(replay.length)
    for row, length in enumerate(replay.stream.lengths(replay.length).tolist()):
        page_size = replay.state.page_size
        for page, start in enumerate(range(0, length, page_size)):
            held = keys[row, :, start : min(start + page_size, length)]
            assert torch.equal(replay.state.minima[row, :, page], held.amin(1))
            assert torch.equal(replay.state.maxima[row, :, page], held.amax(1))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "step", "step", "attend", "skip", "crop", "reorder", "repeat", "select", "fork"]),
        st.integers(1, 9),
    ),
    max_size=8,
)


@given(
    topk=st.sampled_from([4, 8, 20, "20%", "5%", "60%"]),
    page_size=st.sampled_from([1, 2, 4]),
    lengths=st.sampled_from([[110], [110, 110], [110, 107, 99]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
    prompt=st.integers(12, 40),
    operations=OPERATIONS,
)
def test_any_life_matches_the_loops(topk, page_size, lengths, heads, seed, paged, prompt, operations):
    config = QuestConfig(topk=topk, page_size=page_size)
    stream = random_stream(
        seed, lengths=lengths, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8
    )
    replay = Replay(make_selector(config), stream, layout=PagedLayout(block_size=3) if paged else None)
    replay.prefill(prompt)
    for at, (operation, amount) in enumerate([*operations, ("step", 3)]):
        rows = replay.stream.batch_size
        match operation:
            case "step":
                for step in replay.steps(amount):
                    check_step(step, config, replay.scale)
                check_bounds(replay)
            case "attend":
                replay.attend()
            case "crop":
                replay.crop(min(amount, replay.length - 12))
                replay.stream = replay.stream.diverging(replay.length, seed + at)
            case "reorder":
                replay.reorder((torch.arange(rows) + amount) % rows)
            case "repeat" if rows < 4:
                replay.repeat(2)
            case "select":
                replay.select(torch.arange(rows - 1, -1, -2))
            case "fork":
                replay.fork().steps(2)
            case "prefill" | "skip":
                getattr(replay, operation)(amount)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input_matches_the_loops(kind):
    stream = hostile_stream(random_stream(7, lengths=[60, 41], head_dim=8), kind)
    config = QuestConfig(topk=16, page_size=4)
    replay = Replay(make_selector(config), stream).prefill(40)
    for step in replay.steps(20):
        check_step(step, config, replay.scale)


def test_an_append_reads_one_key(gathered):
    """Whatever the length; a crop costs at most a page more."""
    replay = Replay(make_selector("quest", topk=16), random_stream(0, length=100)).prefill(60)
    row = 2 * 64 * 4
    gathered.clear()
    replay.skip(1).state.take_in(replay.kv())
    assert gathered["keys"] == row
    replay.crop(3)
    gathered.clear()
    replay.skip(1).state.take_in(replay.kv())
    assert gathered["keys"] == (59 - 48) * row


def test_a_page_score_bounds_every_score_within():
    stream = random_stream(3, length=64)
    replay = Replay(make_selector("quest", topk=16), stream).prefill(64)
    for page in range(4):
        keys = stream.key[0, 0, 16 * page : 16 * page + 16]
        query = stream.query[0, 0, 63]
        low, high = (bounds[0, 0, page].tolist() for bounds in (replay.state.minima, replay.state.maxima))
        assert reference.page_score(query.tolist(), low, high) >= float((keys @ query).max())


def test_first_layers_are_dense():
    stream = random_stream(4, length=70)
    for layer_idx, dense_layers in ((0, 2), (1, 2), (2, 2), (0, 0)):
        selector = make_selector("quest", topk=16, dense_layers=dense_layers)
        replay = Replay(selector, stream, layer_idx=layer_idx).prefill(60)
        step = replay.step()
        dense = layer_idx < dense_layers
        assert (step.support.indices is None) == dense
        assert (replay.state.nbytes() == 8) == dense
        cost = selector.cost(stream.layer_spec(layer_idx), 61)
        assert cost.attended == (61 if dense else 13)
        assert cost.key_bytes > 0


def test_a_page_larger_than_the_context_takes_no_more_room_than_that():
    selector = make_selector("quest", topk=2**30, page_size=2**30, dense_layers=0)
    step = Replay(selector, random_stream(5, length=34)).prefill(30).step()
    assert step.support.indices.shape[3] == 31
    assert bool(step.mask.all())


def test_bounds_keep_no_graph():
    stream = random_stream(6, length=40)
    stream.key.requires_grad_()
    replay = Replay(make_selector("quest", topk=16, dense_layers=0), stream).prefill(30)
    replay.step().output.sum().backward()
    assert stream.key.grad is not None
    assert not replay.state.minima.requires_grad
    assert not replay.state.maxima.requires_grad


def test_presets():
    assert set(registry().presets("quest")) == {"paper", "strict"}
    assert make_config("quest:paper") == QuestConfig(topk=1024, page_size=16, dense_layers=2)
    assert make_config("quest:strict") == QuestConfig(topk=512, page_size=16, dense_layers=0)
    assert make_config("quest") == QuestConfig(topk=512, page_size=16, dense_layers=2)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"topk": 8}, "page_size"),
        ({"topk": 100}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 100}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"dense_layers": -1}, "dense_layers"),
        ({"topk": "0%"}, "topk"),
        ({"pages": 4}, "pages"),
    ],
)
def test_refused(values, field):
    with pytest.raises(InputError) as caught:
        make_config("quest", **values)
    assert field in caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize("length", [64, 61])
def test_cost_is_what_a_step_gathers(gathered, length):
    """Keys, values and bounds. A partial last page leaves slots unused, which eager code gathers and masks."""
    stream = random_stream(0, batch=2, length=length, num_attention_heads=6, num_key_value_heads=2)
    selector = make_selector("quest", topk=32)
    replay = Replay(selector, stream).prefill(length - 1)
    gathered.clear()
    replay.attend()
    cost = selector.cost(stream.layer_spec(), length)
    unused = 2 * 6 * (-length % 16) * 64 * 4
    assert gathered == {"keys": cost.key_bytes + unused, "values": cost.value_bytes + unused}
    pages = replay.state.pages(length)
    bounds = sum(part[:, :, :pages].nbytes for part in (replay.state.minima, replay.state.maxima))
    assert cost.metadata_bytes == bounds
    assert cost.state_bytes == bounds + replay.state.indexed.nbytes
    assert cost.state_bytes <= replay.state.nbytes() <= 1.5 * cost.state_bytes


def test_cost_is_the_stated_fraction_of_dense_attention():
    """1/P + u·K/L with u = G = 7 at most: 0.090 at 128K and K = 512, and 0.066 where a group shares its pages."""
    length = 128 * 1024
    full = make_selector("full").cost(LAYER, length)
    cost = make_selector("quest:strict").cost(LAYER, length)
    assert cost.metadata_bytes / full.bytes_read == pytest.approx(1 / 16)
    read = cost.key_bytes + cost.value_bytes
    assert (cost.metadata_bytes + read) / full.bytes_read == pytest.approx(0.090, abs=5e-4)
    assert (cost.metadata_bytes + read / 7) / full.bytes_read == pytest.approx(0.066, abs=5e-4)
    assert cost.attended == 512
    assert make_selector("quest").cost(LAYER, 100).attended == 100
    dense = make_selector("quest,dense_layers=17").cost(LAYER, length)
    assert (dense.bytes_read, dense.flops, dense.attended) == (full.bytes_read, full.flops, full.attended)
