"""StreamingLLM against its plain-loop reference, both position rules, its budget and its cost."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.registry import make_config, make_selector, registry
from sparsesel.rotary import Rotary
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import PagedLayout, Stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_streaming_llm import reference
from sparsesel_streaming_llm.config import StreamingLLMConfig

LAYER = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
INV_FREQ = (1.0, 0.3, 0.05)


def rotated_stream(stream: Stream) -> Stream:
    """The stream with queries and keys turned by their logical positions, as a model hands them on."""
    positions = torch.arange(stream.length) - (0 if stream.starts is None else stream.starts[:, None])
    positions = positions.expand(stream.batch_size, -1)
    rotary = Rotary(torch.tensor(INV_FREQ))

    def turned(part):
        columns = [rotary.rotate(part[:, :, t : t + 1], positions[:, t]) for t in range(stream.length)]
        return torch.cat(columns, dim=2)

    return dataclasses.replace(stream, query=turned(stream.query), key=turned(stream.key))


class RotaryReplay(Replay):
    """A replay of a layer that rotates by `INV_FREQ`."""

    def __init__(self, selector, stream, **kwargs):
        super().__init__(selector, stream, **kwargs)
        layer = dataclasses.replace(stream.layer_spec(), rotary=Rotary(torch.tensor(INV_FREQ)))
        self.state = selector.init_state(layer)


@given(
    seed=st.integers(0, 1000),
    lengths=st.sampled_from([[24], [24, 24], [24, 9, 17]]),
    topk=st.sampled_from([5, 12, 23, 24, 40, "6.25%", "25%", "50%", "100%"]),
    sink_size=st.integers(0, 4),
    positions=st.sampled_from(["original", "cache"]),
    paged=st.booleans(),
    cropped=st.integers(0, 3),
)
def test_matches_the_loops(seed, lengths, topk, sink_size, positions, paged, cropped):
    plain = random_stream(seed, lengths=lengths, head_dim=2 * len(INV_FREQ))
    config = StreamingLLMConfig(topk=topk, sink_size=sink_size, positions=positions)
    layout = PagedLayout() if paged else None
    replay = RotaryReplay(make_selector(config), rotated_stream(plain), layout=layout)
    replay.prefill(17)
    replay.steps(3)
    replay.crop(cropped)
    for step in replay.steps(3):
        assert step.support.indices.shape[1] == 1
        for row, length in enumerate(step.lengths.tolist()):
            budget = resolve_topk(topk, length)
            expected = reference.support(length, budget, sink_size)
            assert len(expected) == min(budget, length)
            alone = plain.alone(row)
            for head in range(4):
                assert step.mask[row, head].nonzero().flatten().tolist() == expected
                keys, values = (part[0, head // 2, :length].tolist() for part in (alone.key, alone.value))
                query = alone.query[0, head, length - 1].tolist()
                output = reference.attend(
                    query,
                    keys,
                    values,
                    expected,
                    scale=replay.scale,
                    inv_freq=INV_FREQ,
                    renumber=positions == "cache",
                )
                torch.testing.assert_close(
                    step.output[row, head, 0].double(), torch.tensor(output).double(), rtol=1e-4, atol=1e-5
                )


def test_positions_within_the_cache_bring_the_sinks_nearer_and_nothing_else():
    """Without sinks both rules agree; with sinks they differ once something has been left out, and not before."""
    stream = rotated_stream(random_stream(5, length=40, head_dim=6))

    def outputs(**values):
        replay = RotaryReplay(make_selector("streaming_llm", topk=16, **values), stream).prefill(10)
        return torch.cat([step.output for step in replay.steps(30)], dim=2)

    assert torch.equal(outputs(sink_size=0), outputs(sink_size=0, positions="cache"))
    original, cache = outputs(sink_size=4), outputs(sink_size=4, positions="cache")
    differs = (original - cache).abs().amax((0, 1, 3)) > 1e-4
    assert differs.tolist() == [False] * 6 + [True] * 24


def test_cache_positions_are_refused_where_the_rotation_is_not_known():
    selector = make_selector("streaming_llm:paper")
    with pytest.raises(InputError, match=r"positions.*layer 0 is not known.*positions=original"):
        selector.init_state(LAYER)
    make_selector("streaming_llm").init_state(LAYER)


def test_presets():
    assert set(registry().presets("streaming_llm")) == {"paper", "strict"}
    paper, strict = make_config("streaming_llm:paper"), make_config("streaming_llm:strict")
    assert paper == StreamingLLMConfig(topk=2048, sink_size=4, positions="cache")
    assert strict == StreamingLLMConfig(topk=512, sink_size=64, positions="original")
    assert make_config("streaming_llm") == StreamingLLMConfig(topk=512, sink_size=4)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"topk": 0}, "topk"),
        ({"topk": 4}, "sink_size"),
        ({"topk": 64, "sink_size": 64}, "sink_size"),
        ({"sink_size": -1}, "sink_size"),
        ({"sink_size": True}, "sink_size"),
        ({"positions": "relative"}, "positions"),
        ({"window_size": 4}, "window_size"),
    ],
)
def test_refused(values, field):
    with pytest.raises(InputError) as caught:
        make_config("streaming_llm", **values)
    assert field in caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_cost_is_what_a_step_gathers(gathered, positions):
    """Each key-value head's K keys and values, once for its query heads; in eager the sinks' keys again."""
    stream = random_stream(0, batch=2, length=60, head_dim=8)
    selector = make_selector("streaming_llm", topk=20, sink_size=4, positions=positions)
    replay = Replay(selector, stream).prefill(50)
    replay.step()
    gathered.clear()
    replay.attend()
    cost = selector.cost(stream.layer_spec(), replay.length)
    again = 4 / 20 if positions == "cache" else 0
    assert gathered == {"keys": cost.key_bytes * (1 + again), "values": cost.value_bytes}
    assert cost.key_bytes == cost.value_bytes
    assert cost.metadata_bytes == cost.score_bytes == cost.state_bytes == replay.state.nbytes() == 0


def test_cost_is_the_stated_fraction_of_dense_attention():
    full = make_selector("full").cost(LAYER, 128 * 1024)
    cost = make_selector("streaming_llm:strict").cost(LAYER, 128 * 1024)
    assert cost.bytes_read / full.bytes_read == pytest.approx(0.004, abs=1e-4)
    assert cost.attended == 512
    assert make_selector("streaming_llm").cost(LAYER, 100).attended == 100
