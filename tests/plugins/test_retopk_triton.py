"""ReTopK's kernels against its eager path, in Triton's interpreter.

Numbers lie on a grid on which scores are exact, so supports, paths and counters must agree exactly.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel.errors import InputError
from sparsesel.explain import trace
from sparsesel.ops import backend
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, DenseLayout, PagedLayout, Stream, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel.testing.tolerances import assert_close_to_float64, assert_same_output
from sparsesel_retopk import kernels, stages, step
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.selector import ReTopKSelector
from sparsesel_retopk.state import inverse_norm

SMALL = {"topk": 8, "cache_size": 5, "recall_size": 3, "window_size": 3, "refresh_interval": 4}
PATHS = ("refresh", "cold", "fallback", "underfull", "reuse")


def make(**overrides) -> ReTopKConfig:
    return ReTopKConfig(**(SMALL | overrides))


class Twins:
    """The same life on both backends, compared at every step."""

    def __init__(self, config: ReTopKConfig, stream: Stream, *, layout=None, level=4):
        self.eager = Replay(ReTopKSelector(config), stream, layout=layout)
        self.triton = Replay(ReTopKSelector(config, level=level), stream, layout=layout)

    def do(self, action) -> None:
        action(self.eager)
        with backend.using("triton"):
            action(self.triton)

    def prefill(self, *chunks: int) -> "Twins":
        self.do(lambda replay: replay.prefill(*chunks))
        return self

    def steps(self, count: int, *, fused: bool = False) -> None:
        for at in range(count):
            expected = self.eager.step()
            with backend.using("triton"):
                if fused:
                    output = self.triton.attend()
                else:
                    step = self.triton.step()
                    output = step.output
                    assert torch.equal(step.mask, expected.mask), f"support of step {at}"
            assert_same_output(output, expected.output, expected.tolerance(), f"step {at}")
            self.check()

    def check(self) -> None:
        one, other = self.eager.state, self.triton.state
        counted = ({name: sums.tolist() for name, sums in state.counters.read().items()} for state in (one, other))
        assert next(counted) == next(counted)
        assert torch.equal(one.stamps.clamp_min(-1), other.stamps.clamp_min(-1))
        assert torch.equal(one.unbuilt, other.unbuilt)
        assert torch.equal(one.prefill_end, other.prefill_end)
        built = ((one.stamps >= 0) & ~one.unbuilt)[:, None, :, None]
        assert torch.equal(one.supports.where(built, 0), other.supports.where(built, 0))
        assert torch.equal(one.queries.where(built, 0).nan_to_num(), other.queries.where(built, 0).nan_to_num())
        torch.testing.assert_close(one.inverse_norms, other.inverse_norms, rtol=1e-6, atol=0.0)

    def counted(self, name: str) -> float:
        return float(self.triton.state.counters.read()[name].sum())


def stream_of(seed: int, **changes) -> Stream:
    return random_stream(seed, **({"lengths": [60, 41], "head_dim": 16, "jump": 0.2} | changes))


class TestWholeSteps:
    def test_every_path_is_taken_and_is_the_eager_one(self):
        """Dense and padded, through a second prefill, a crop and a replay with other tokens."""
        stream = stream_of(1)
        twins = Twins(make(), stream).prefill(26)
        twins.steps(5)
        assert all(twins.counted(name) > 0 for name in ("refresh", "fallback", "reuse", "exact", "candidates"))
        twins.prefill(3)
        twins.steps(2, fused=True)
        twins.do(lambda replay: replay.crop(4))
        twins.do(lambda replay: setattr(replay, "stream", stream.diverging(32, seed=2)))
        twins.steps(1)
        twins.steps(1, fused=True)

    @pytest.mark.parametrize(
        ("path", "overrides"),
        [
            ("reuse", {"similarity_threshold": -1.0, "refresh_interval": 0}),
            ("fallback", {"similarity_threshold": 2.0}),
            ("underfull", {"similarity_threshold": -1.0, "window_size": 0, "recall_size": 1, "topk": "30%"}),
        ],
    )
    def test_one_path_at_a_time(self, path, overrides):
        twins = Twins(make(**overrides), stream_of(3, lengths=[34])).prefill(29)
        twins.steps(2)
        twins.steps(2, fused=True)
        assert twins.counted(path) > 0
        others = [name for name in PATHS if name not in (path, "refresh", "reuse")]
        assert not any(twins.counted(name) for name in others)

    def test_from_nothing(self):
        """Cold, with sequences that have not begun, and budgets larger than what is visible."""
        twins = Twins(make(topk=4, refresh_interval=0, similarity_threshold=-1.0), stream_of(4, lengths=[12, 8]))
        twins.do(lambda replay: [replay.attend() for _ in range(3)])
        twins.check()
        assert twins.counted("cold") == 4 + 3 * 4
        twins.do(lambda replay: replay.attend())
        twins.steps(4)

    @pytest.mark.parametrize(
        ("overrides", "layout"),
        [
            ({"fallback_scope": "group-any"}, PagedLayout(block_size=4, order="channel")),
            ({"fallback_scope": "group-mean"}, DenseLayout(channel_major=True)),
            ({"retrieval": "recent"}, PagedLayout(block_size=16, order="token")),
            ({"fallback": False, "window_size": 0}, PagedLayout(block_size=1)),
            ({"topk": "25%"}, DenseLayout(spare=0)),
            (
                {"topk": 1, "cache_size": 1, "recall_size": 1, "window_size": 1, "refresh_interval": 1},
                PagedLayout(block_size=64),
            ),
        ],
        ids=str,
    )
    def test_configurations_and_layouts(self, overrides, layout):
        twins = Twins(make(**overrides), stream_of(5, lengths=[36, 23]), layout=layout).prefill(29)
        twins.steps(2)
        twins.steps(1, fused=True)

    @pytest.mark.parametrize("level", [1, 2, 3, 5])
    def test_levels(self, level):
        """However much is fused, the same comes out."""
        config = make(refresh_interval=3)
        twins = Twins(config, stream_of(6, lengths=[40]), level=level, layout=PagedLayout(block_size=8)).prefill(30)
        twins.steps(2)
        twins.steps(2, fused=True)
        assert all(twins.counted(name) > 0 for name in ("refresh", "fallback", "reuse"))

    def test_there_are_five_levels(self):
        selector = ReTopKSelector(make())
        object.__setattr__(selector, "level", 6)  # types are checked in tests, before the selector could
        with pytest.raises(InputError, match="1 to 5"):
            selector.__post_init__()

    @pytest.mark.full
    @pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("scope", ["head", "group-any", "group-mean"])
    @pytest.mark.parametrize("topk", [8, "20%"])
    def test_levels_at_length(self, level, scope, topk):
        config = make(topk=topk, fallback_scope=scope)
        twins = Twins(config, stream_of(7, lengths=[150, 90]), level=level).prefill(100)
        twins.steps(10)
        twins.do(lambda replay: replay.crop(5))
        twins.steps(20, fused=True)

    @pytest.mark.parametrize("kind", ["nan query", "nan key", "-inf key", "clustered keys"])
    def test_hostile_input(self, kind):
        self.check_hostile(kind, level=4, steps=1)

    @pytest.mark.full
    @pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("kind", HOSTILE)
    def test_all_hostile_input(self, kind, level):
        self.check_hostile(kind, level=level, steps=12)

    def check_hostile(self, kind, *, level, steps):
        stream = hostile_stream(stream_of(8, lengths=[60, 37]), kind)
        twins = Twins(make(refresh_interval=2), stream, level=level).prefill(30)
        twins.steps(steps)
        twins.steps(steps, fused=True)

    @pytest.mark.parametrize(
        ("dtype", "dim", "dim_v", "heads", "kv_heads"),
        [
            (torch.bfloat16, 80, 80, 6, 2),
            (torch.float16, 16, 24, 2, 2),
            pytest.param(torch.bfloat16, 128, 128, 7, 1, marks=pytest.mark.full),
            pytest.param(torch.float32, 256, 256, 2, 1, marks=pytest.mark.full),
            pytest.param(torch.float16, 96, 64, 16, 1, marks=pytest.mark.full),
        ],
    )
    def test_types_and_sizes(self, dtype, dim, dim_v, heads, kv_heads):
        stream = stream_of(
            9, lengths=[31], num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, jump=0.5
        )
        value = random_stream(10, length=31, num_key_value_heads=kv_heads, head_dim=dim_v).value
        stream = dataclasses.replace(stream, value=value).to(dtype)
        twins = Twins(make(refresh_interval=0), stream).prefill(27)
        twins.steps(1)
        twins.steps(2, fused=True)
        with backend.using("triton"):
            step = twins.triton.step()
        assert step.output.dtype == dtype
        assert_close_to_float64(step.output, step.expected())

    def test_backends_may_take_turns(self):
        stream = stream_of(11, lengths=[45])
        expected = Replay(ReTopKSelector(make()), stream).prefill(30)
        mixed = expected.fork()
        for at, one in enumerate(expected.steps(4)):
            with backend.using("triton" if at % 2 else "eager"):
                assert torch.equal(mixed.step().mask, one.mask)


class TestCandidates:
    @settings(max_examples=10)
    @given(
        seed=st.integers(0, 10_000),
        topk=st.sampled_from([1, 5, 23]),
        sizes=st.sampled_from([(1, 1), (4, 3), (6, 4), (9, 5)]),
        window_size=st.sampled_from([0, 1, 6]),
        scope=st.sampled_from(["head", "group-any", "group-mean"]),
        retrieval=st.sampled_from(["similarity", "recent"]),
    )
    def test_any_ring_gives_the_eager_candidates_and_paths(self, seed, topk, sizes, window_size, scope, retrieval):
        """Supports of any lengths, alike or apart; queries that tie; entries missing; tiles smaller than the runs."""
        config = ReTopKConfig(
            topk=topk,
            cache_size=sizes[0],
            recall_size=sizes[1],
            window_size=window_size,
            fallback_scope=scope,
            retrieval=retrieval,
            refresh_interval=7,
            similarity_threshold=0.7,
        )
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(2, 90, (), generator=generator))
        stream = random_stream(seed, lengths=[length, 1 + length // 2], num_attention_heads=2, num_key_value_heads=1)
        stream = Stream(stream.query[..., :4], stream.key[..., :4], stream.value[..., :4], stream.starts)
        stream.query[:] = POOL[torch.randint(0, len(POOL), stream.query.shape[:3], generator=generator)]
        replay = Replay(ReTopKSelector(config), stream).prefill(length - 1)
        replay.skip(1)
        query, kv, state = stream.query[:, :, length - 1 : length], replay.kv(), replay.state
        budget = stages.Budget.of(config.topk, kv, 2)
        state.widen(budget.widest)
        self.plant(state, budget.widest, generator)

        current = query[:, :, 0]
        paths, expected = stages.choose_paths(
            current, inverse_norm(current), kv, state, config, budget, all_candidates=True
        )
        arguments = step._prepare(query, kv, state, config, scale=0.5)
        step._run(kernels.recall_kernel, arguments | {"BLOCK": 16, "BLOCK_C": 4})
        assert torch.equal(arguments["p_counts"], expected.counts.int())
        for number, name in enumerate(("reuse", "refresh", "cold", "fallback", "underfull")):
            assert torch.equal(arguments["p_paths"] == number, paths[name].expand(2, 2)), name
        for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
            count = int(expected.counts[row, head])
            assert torch.equal(arguments["p_ids"][row, head, :count], expected.indices[row, head, :count])

    def plant(self, state, widest, generator):
        """Give every entry some support below its position, and take some entries away."""
        state.has_unbuilt = False
        state.unbuilt.zero_()
        state.supports.fill_(-1)
        for row, head, slot in ((r, h, s) for r in (0, 1) for h in (0, 1) for s in range(state.stamps.shape[1])):
            position = int(state.stamps[row, slot])
            if position >= 0:
                count = min(int(torch.randint(0, widest + 1, (), generator=generator)), position + 1)
                near = min(position + 1, count + int(torch.randint(0, 40, (), generator=generator)))
                chosen = torch.randperm(near, generator=generator)[:count].sort().values
                state.supports[row, head, slot, :count] = chosen.int()
        gone = torch.rand(state.stamps.shape, generator=generator) < 0.2
        state.stamps[gone] = -(1 << 62)


# Cosines far apart or equal, and queries without a norm.
POOL = torch.tensor(
    [
        [1.0, 0, 0, 0],
        [2.0, 0, 0, 0],
        [0, 1.0, 0, 0],
        [3.0, 4.0, 0, 0],
        [4.0, 3.0, 0, 0],
        [0, 0, -1.0, 0],
        [0, 0, 0, 0],
        [float("nan"), 1.0, 0, 0],
        [float("inf"), 0, 1.0, 0],
    ]
)


class TestScan:
    def test_bound_keeps_the_support_and_little_more(self, monkeypatch):
        """On numbers whose scores differ by how they are summed: the exact support, from few of the keys."""
        found = {}
        run = step._run

        def remembering(kernel, arguments, **options):
            found.update(arguments)
            run(kernel, arguments, **options)
            if kernel is kernels.scan_kernel:
                exact = arguments["p_paths"] > 0
                found["kept"] = arguments["p_found_counts"].sum(-1)[exact]

        monkeypatch.setattr(step, "_run", remembering)
        generator = torch.Generator().manual_seed(12)
        query = torch.randn(1, 1, 1, 64, generator=generator) + 0.2 * torch.randn(1, 2, 90, 64, generator=generator)
        key, value = (torch.randn(1, 1, 90, 64, generator=generator) for _ in range(2))
        stream = Stream(query, key, value)
        replay = Replay(ReTopKSelector(make(refresh_interval=1, topk=6)), stream).prefill(86)
        with backend.using("triton"):
            replay.step()
            for at in range(87, 90):
                step_ = replay.step()
                scores = (query[0, :, at].double() @ key[0, 0, : at + 1].double().T) / 8
                assert torch.equal(step_.mask[0].sum(-1), torch.tensor([6, 6]))
                kth = scores.topk(6).values[:, -1:]
                assert bool((scores[step_.mask[0]].view(2, 6) >= kth - 1e-5).all())
                assert bool((found["kept"] >= 6).all())
                assert bool((found["kept"] < 40).all())

    def test_tied_scores_fill_no_buffer_over(self):
        """Every key ties with the bound: all are kept, the first are the support."""
        stream = hostile_stream(stream_of(13, lengths=[50], num_attention_heads=2), "equal keys")
        twins = Twins(make(similarity_threshold=2.0), stream).prefill(47)
        twins.steps(2)


class TestLaunches:
    @pytest.mark.parametrize("page_size", [0, 16])
    @pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("overrides", [{}, {"topk": "10%", "fallback_scope": "group-any"}], ids=str)
    def test_nothing_waits_for_the_device(self, overrides, level, page_size):
        """On tensors without content any question about one raises."""
        layer = LayerSpec(0, 4, 2, 64, torch.bfloat16, torch.device("cpu"), batch_size=2)
        found = trace(ReTopKSelector(make(**overrides), level=level), layer, 300, page_size=page_size)
        names = [launch.kernel.split(":")[1] for launch in found.step.launches]
        exact = ["scan_kernel", "finish_exact_kernel"]
        assert names[-2:] == exact or level < 4
        if level >= 4:
            assert names[:-2] == {4: ["recall_kernel", "score_kernel", "finish_kernel"], 5: ["reuse_kernel"]}[level]
        assert set(exact) <= set(names)

    def test_state_stays_where_it_is(self):
        """What a captured graph would go on writing to."""
        twins = Twins(make(), stream_of(14, lengths=[40])).prefill(30)
        twins.steps(1)
        state = twins.triton.state
        tensors = state.tensors() | {"counters": state.counters.table(step.NAMES, 4, torch.device("cpu"))}
        before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        twins.steps(2, fused=True)
        twins.prefill(1)
        twins.do(lambda replay: replay.crop(1))
        after = state.tensors() | {"counters": state.counters.table(step.NAMES, 4, torch.device("cpu"))}
        assert {name: tensor.data_ptr() for name, tensor in after.items()} == before

    def test_too_large_a_group_is_refused_before_anything_happens(self):
        stream = random_stream(15, length=12, num_attention_heads=17, num_key_value_heads=1, head_dim=16)
        replay = Replay(ReTopKSelector(make()), stream).prefill(11)
        before = replay.state.clone()
        with backend.using("triton"), pytest.raises(InputError, match="group size"):
            replay.attend()
        assert all(torch.equal(tensor, before.tensors()[name]) for name, tensor in replay.state.tensors().items())
        assert replay.state.counters.read() == {}
