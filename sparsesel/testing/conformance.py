"""What every selector must do, as a test class to inherit from.

```python
from sparsesel.testing.conformance import SelectorConformance


class TestMine(SelectorConformance):
    selector = "mine"
```

It knows nothing of how a selector selects: it compares one way of running it with another, and outputs with
float64 attention over the selector's own support. Everything in it is deterministic.

What runs the operations, and where, is a matter of class attributes. A selector made of `sparsesel.ops`, or with
kernels of its own, is tested on Triton without a GPU in Triton's interpreter. That is slow, hence `quick`, and needs
`TRITON_INTERPRET=1` in the environment before triton is imported, for example at the top of `conftest.py`:

```python
class TestMineOnTriton(SelectorConformance):
    selector = "mine"
    backend = "triton"
    quick = True
```
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from sparsesel.config import BackendName, SelectorConfig, resolve_topk
from sparsesel.errors import InputError
from sparsesel.ops.backend import using
from sparsesel.registry import registry
from sparsesel.selector import Selector, SelectorState
from sparsesel.testing.inputs import HOSTILE, DenseLayout, Layout, PagedLayout, Stream, hostile_stream, random_stream
from sparsesel.testing.replay import Replay, Step
from sparsesel.testing.tolerances import Expected, assert_close_to_float64, assert_same_output

try:
    import pytest
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "sparsesel.testing.conformance needs pytest and hypothesis: pip install 'sparsesel[test]'"
    ) from error

T = TypeVar("T")

BUDGETS = (8, 16, 32, 64, 128, 256, 512)

LAYOUTS: dict[str, Layout] = {
    "contiguous": DenseLayout(spare=0),
    "dense channel-major": DenseLayout(channel_major=True),
    "static": DenseLayout(static=True),
    "blocks of 1": PagedLayout(block_size=1),
    "blocks of 4": PagedLayout(block_size=4, seed=1),
    "blocks of 16, token-major": PagedLayout(block_size=16, order="token", seed=2),
    "blocks of 8, channel-major": PagedLayout(block_size=8, order="channel", seed=3),
    "one block": PagedLayout(block_size=1024, seed=4),
}


class Subject:
    """The selector under test at a size that suits it.

    Attributes:
        topk: Smallest budget of `BUDGETS` that its configuration accepts, or None if it has no `topk`.
        prompt: Tokens of a prompt long enough that not everything is selected.
    """

    def __init__(
        self, make: Callable[[Mapping[str, Any]], Selector], overrides: Mapping[str, Any], *, quick: bool = False
    ) -> None:
        self._make = make
        self._overrides = overrides
        self.has_topk = "topk" in type(make(overrides).config).model_fields
        self.topk = self._smallest_budget() if self.has_topk else None
        self.prompt = (2 if quick else 4) * (self.topk or 8) + 9

    def make(self, **changes: Any) -> Selector:
        """The selector at the small budget, `changes` applied; without a budget, `topk` is ignored."""
        values = {"topk": self.topk, **self._overrides, **changes}
        if not self.has_topk:
            del values["topk"]
        return self._make(values)

    def replay(self, stream: Stream, *, layout: Layout | None = None, **changes: Any) -> Replay:
        """A new replay of a new selector."""
        return Replay(self.make(**changes), stream, layout=layout)

    def budget(self, length: int, topk: int | str | None = None) -> int:
        """Keys that a head may attend to at `length` visible ones."""
        topk = self.topk if topk is None else topk
        return length if topk is None or not self.has_topk else min(length, resolve_topk(topk, length))

    def enough(self, length: int) -> int:
        """Smallest budget for `length` keys that the configuration accepts: some take whole pages alone."""
        for topk in range(length, 2 * length + 1024) if self.has_topk else ():
            try:
                self.make(topk=topk)
            except (InputError, ValueError):
                continue
            return topk
        return length

    def _smallest_budget(self) -> int:
        if "topk" in self._overrides:
            return self._overrides["topk"]
        refusals = []
        for topk in BUDGETS:
            try:
                self._make({**self._overrides, "topk": topk})
            except (InputError, ValueError) as error:
                refusals.append(str(error))
            else:
                return topk
        raise AssertionError(f"no topk among {BUDGETS} is accepted; set `overrides`. The last refusal: {refusals[-1]}")


class SelectorConformance:
    """Inherit from it in a test module and set `selector`; pytest collects the tests.

    Attributes:
        selector: A spec as users write it: `mine`, `mine:preset`, `mine,field=value`.
        overrides: Fields to set, for example a larger `topk` where the default small one makes no sense.
        decides_per: Whose queries decide a head's support, if not those that share an entry of the support's head
            axis: "group" for a selector that returns supports per query head and yet lets the query heads of one
            key-value head influence each other. Such a selector cannot give under grouped queries what it gives under
            repeated keys, and is asked for that only where the heads of a group agree.
        backend: What runs the operations in every test: "triton", "eager", or "auto", the best one for `device`.
        device: Where queries, keys and values lie.
        quick: The same tests on shorter prompts with fewer heads, steps and examples, a tenth of the work or less: for
            a backend as slow as Triton's interpreter.
    """

    selector: ClassVar[str] = ""
    overrides: ClassVar[Mapping[str, Any]] = {}
    decides_per: ClassVar[Literal["head", "group"]] = "head"
    backend: ClassVar[BackendName] = "auto"
    device: ClassVar[str] = "cpu"
    quick: ClassVar[bool] = False

    def make_selector(self, spec: str, values: Mapping[str, Any]) -> Selector:
        """Make the selector under test. Override it for one that is not installed as a plugin."""
        return registry().make_selector(spec, values)

    def expected(self, step: Step) -> Expected:
        """The output in float64. Override it where `aggregate` is more than attention over the support."""
        return step.expected()

    @pytest.fixture(autouse=True)
    def backend_in_force(self) -> Iterator[None]:
        """Has `backend` run whatever the test does."""
        with using(self.backend):
            yield

    @pytest.fixture
    def selector_spec(self) -> str:
        """The spec under test; parametrise it to test several."""
        return self.selector

    @pytest.fixture
    def subject(self, selector_spec: str) -> Subject:
        """The selector under test."""
        return self.make_subject(selector_spec)

    def make_subject(self, selector_spec: str) -> Subject:
        """The selector under test, outside pytest's fixtures."""
        return Subject(lambda values: self.make_selector(selector_spec, values), self.overrides, quick=self.quick)

    def pick(self, complete: T, quick: T) -> T:
        """The size of something in a test: `quick` where that is asked for."""
        return quick if self.quick else complete

    def stream(self, seed: int, **sizes: Any) -> Stream:
        """A `random_stream` on the device under test, of two query heads that share keys if quick, else four."""
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if self.quick else {}
        return random_stream(seed, **{**heads, **sizes}).to(self.device)

    # The contract

    def test_follows_the_protocol(self, subject: Subject) -> None:
        """It has every method, a configuration that round-trips through JSON, and a state that follows rows."""
        selector = subject.make()
        require(isinstance(selector, Selector), f"{type(selector).__name__} does not implement Selector")
        config = selector.config
        require(isinstance(config, SelectorConfig), f"config is {type(config).__name__}, expected a SelectorConfig")
        again = type(config).model_validate_json(config.model_dump_json())
        require(again == config and hash(again) == hash(config), f"{config!r} comes back from JSON as {again!r}")
        undescribed = [n for n, f in type(config).model_fields.items() if n != "name" and not f.description]
        require(not undescribed, f"fields without a description: {undescribed}")
        replay = Replay(selector, self.stream(0, batch=3, length=subject.prompt + 2)).prefill(subject.prompt)
        replay.step()
        require(isinstance(replay.state, SelectorState), f"state is {type(replay.state).__name__}")
        for name, tensor in replay.state.tensors().items():
            require(tensor.shape[:1] == (3,), f"state.{name} has shape {tuple(tensor.shape)}, expected the batch first")
        require(selector.config == config, "the selector's configuration changed")

    def test_leaves_its_inputs_alone(self, subject: Subject) -> None:
        """Queries, keys and values are read, never written."""
        replay = subject.replay(self.stream(1, batch=2, lengths=[subject.prompt + 2, 30]), layout=DenseLayout())
        selector, state, scale = replay.selector, replay.state, replay.scale
        replay.skip(subject.prompt)
        for phase in ("observe_prefill", "discover and aggregate", "attend"):
            if phase != "observe_prefill":
                replay.skip(1)
            kv = replay.kv()
            query = (
                replay.stream.query[:, :, : replay.length]
                if phase == "observe_prefill"
                else replay.stream.query[:, :, replay.length - 1 : replay.length]
            )
            before = [part.clone() for part in (query, kv.keys, kv.values)]
            match phase:
                case "observe_prefill":
                    selector.observe_prefill(query, kv, state, scale=scale)
                case "attend":
                    selector.attend(query, kv, state, scale=scale)
                case _:
                    support = selector.discover(query, kv, state, scale=scale)
                    selector.aggregate(query, kv, support, state, scale=scale)
            for name, old, new in zip(("query", "keys", "values"), before, (query, kv.keys, kv.values), strict=True):
                require(_identical(old, new), f"{phase} changed the {name}")

    def test_counts_its_steps(self, subject: Subject) -> None:
        """Counters `steps`, `selected` and `visible` say what happened, on either way through a step."""
        count = self.pick(5, 2)
        stream = self.stream(2, lengths=[subject.prompt + count, subject.prompt])
        replay = subject.replay(stream).prefill(subject.prompt)
        fused = replay.fork()
        heads = stream.query.shape[1]
        selected, visible = torch.zeros(heads), 0
        for step in replay.steps(count):
            selected += step.mask.sum((0, 2))
            visible += int(step.lengths.sum())
            fused.attend()
        steps = torch.full((heads,), 2 * count)
        expected = {"steps": steps, "selected": selected, "visible": torch.full((heads,), visible)}
        for way, run in (("discover", replay), ("attend", fused)):
            counters = run.state.counters.read()
            for name, values in expected.items():
                got = counters[name].tolist() if name in counters else "nothing"
                require(got == values.tolist(), f"{way} counts {name} as {got}, expected {values.tolist()}")

    @pytest.mark.parametrize("length", [1, 111, 4096, 1 << 20])
    def test_cost_makes_sense(self, subject: Subject, length: int) -> None:
        """A step's cost is finite, not negative, and attends to no more than there is and the budget allows."""
        cost = subject.make().cost(self.stream(0, length=1).layer_spec(), length)
        numbers = {field: value for field, value in dataclasses.asdict(cost).items() if field != "assumes"}
        for field, value in numbers.items():
            require(math.isfinite(value) and value >= 0, f"{field} is {value}")
        require(cost.bytes_read > 0, "a step that reads nothing")
        budget = subject.budget(length)
        require(0 < cost.attended <= budget, f"attends to {cost.attended} keys, {budget} allowed")

    def test_state_stays_bounded(self, subject: Subject) -> None:
        """The state grows no faster than the sequence, capacity doubled at most."""
        more = 2 * subject.prompt
        replay = subject.replay(self.stream(3, length=subject.prompt + more)).prefill(subject.prompt)
        replay.step()
        first, at_first = replay.state.nbytes(), replay.length
        steps = self.pick(more - 1, 3)
        (replay.prefill(more - 1 - steps) if steps < more - 1 else replay).steps(steps)
        require(first >= 0, f"state of {first} bytes")
        limit = 2 * first * replay.length / at_first
        require(
            replay.state.nbytes() <= limit,
            f"{first} bytes at {at_first} tokens, {replay.state.nbytes()} at {replay.length}",
        )

    # 1. With a budget for everything it is dense attention

    @pytest.mark.parametrize("padded", [False, True])
    def test_large_budget_equals_dense_attention(self, subject: Subject, padded: bool) -> None:
        """K ≥ L selects everything, in every step."""
        count = self.pick(6, 1)
        total = subject.prompt + count
        lengths = [total, total - 20, count + 1] if padded else None
        stream = self.stream(10, batch=self.pick(3, 1), length=total, lengths=lengths)
        for topk in (subject.enough(total), subject.enough(2 * total)):
            replay = subject.replay(stream, topk=topk).prefill(subject.prompt)
            fused = replay.fork()
            for at, step in enumerate(replay.steps(count)):
                visible = torch.arange(step.mask.shape[2]) < step.lengths[:, None, None]
                require(torch.equal(step.mask, visible.expand_as(step.mask)), f"step {at}: not everything is selected")
                assert_close_to_float64(step.output, step.expected_dense(), f"step {at}")
                assert_close_to_float64(fused.attend(), step.expected_dense(), f"step {at}, attend")

    # 2. Supports are well formed, whatever happened before

    def test_supports_are_well_formed(self, subject: Subject) -> None:
        """Indices are int32, unique, ascending, visible, never padding, counted; no head passes its budget."""
        count = self.pick(24, 4)
        total = subject.prompt + count
        stream = self.stream(20, lengths=[total, total - 11, 30])
        for step in subject.replay(stream).prefill(subject.prompt).steps(count):  # the replay checks each
            _require_budget(subject, step)

    def test_relative_budget_is_held(self, subject: Subject) -> None:
        """A budget in percent means that share of each sequence's own length, rounded up."""
        try:
            subject.make(topk="25%")
        except (InputError, ValueError):
            pytest.skip("its topk takes no percentage")
        count = self.pick(8, 2)
        total = subject.prompt + count
        replay = subject.replay(self.stream(21, lengths=[total, total - 11, 30]), topk="25%").prefill(subject.prompt)
        for step in replay.steps(count):
            _require_budget(subject, step, "25%")

    def test_any_history_gives_sound_steps(self, subject: Subject) -> None:
        """After any mix of chunks, steps, rejected drafts and row operations: supports sound, outputs right."""
        actions = st.one_of(
            st.tuples(st.just("prefill"), st.integers(1, 12)),
            st.tuples(st.just("step"), st.integers(1, self.pick(8, 2))),
            st.tuples(st.just("attend"), st.integers(1, self.pick(3, 2))),
            st.tuples(st.just("skip"), st.integers(1, 5)),
            st.tuples(st.just("crop"), st.integers(1, 40)),
            st.tuples(st.just("reorder"), st.integers(0, 5)),
            st.tuples(st.just("repeat"), st.integers(2, 2)),
            st.tuples(st.just("fork"), st.just(0)),
        )

        examples = self.pick(12, 3)

        @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
        @given(st.booleans(), st.lists(actions, min_size=1, max_size=self.pick(8, 5)))
        def run(padded: bool, history: list[tuple[str, int]]) -> None:
            total = subject.prompt + 100
            lengths = [total, total - 9] if padded else None
            replay = subject.replay(self.stream(22, batch=2, length=total, lengths=lengths))
            replay.prefill(subject.prompt)
            for at, (action, amount) in enumerate(history):
                self._act(subject, replay, action, amount, seed=100 + at)
            self._require_sound(subject, replay.step())

        run()

    def _act(self, subject: Subject, replay: Replay, action: str, amount: int, seed: int) -> None:
        match action:
            case "prefill" | "skip":
                getattr(replay, action)(amount)
            case "step":
                for step in replay.steps(amount):
                    self._require_sound(subject, step)
            case "attend":
                for _ in range(amount):
                    replay.attend()
            case "crop":
                replay.crop(min(amount, replay.length - 11))  # a sequence keeps one token, 9 are padding at most
                replay.stream = replay.stream.diverging(replay.length, seed)
            case "reorder":
                rows = replay.stream.batch_size
                replay.reorder(torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(amount)))
            case "repeat":
                if replay.stream.batch_size < self.pick(8, 4):
                    replay.repeat(amount)
            case "fork":
                replay.fork().steps(self.pick(2, 1))

    def _require_sound(self, subject: Subject, step: Step) -> None:
        _require_budget(subject, step)
        assert_close_to_float64(step.output, self.expected(step))

    # 3. Batches

    def test_left_padded_batch_equals_its_sequences_alone(self, subject: Subject) -> None:
        """A sequence neither sees its padding nor its neighbours."""
        prompt, count = subject.prompt, self.pick(12, 2)
        lengths = [prompt + count, prompt + count - 17, 20 + count, count + 1]
        lengths = self.pick(lengths, [lengths[0], lengths[2]])
        stream = self.stream(30, lengths=lengths)
        for chunks in ([prompt], [9, prompt - 9]):  # after the first of two, some sequences have not begun
            steps = subject.replay(stream).prefill(*chunks).steps(count)
            for row, length in enumerate(lengths):
                alone = subject.replay(stream.alone(row)).prefill(length - count).steps(count)
                for at, (together, single) in enumerate(zip(steps, alone, strict=True)):
                    _require_equal(_only(together, row), single, f"row {row} of chunks {chunks}, step {at}")

    # 4. Grouped queries

    @pytest.mark.parametrize("group", [2, 4])
    def test_grouped_queries_equal_repeated_keys(self, subject: Subject, group: int) -> None:
        """Query head h reads key-value head h // G, as it would read a copy of its own.

        Where a whole group decides together, only if its heads agree can they decide as they would alone.
        """
        count = self.pick(12, 2)
        kv_heads = self.pick(2, 4 // group)
        heads = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
        stream = self.stream(40, length=subject.prompt + count, **heads)
        first = subject.replay(stream).prefill(subject.prompt)
        indices = first.fork().step().support.indices
        by_group = indices is not None and indices.shape[1] == kv_heads
        streams = {"agreeing heads": dataclasses.replace(stream, query=_agreeing(stream.query, group))}
        if not by_group and self.decides_per == "head":
            streams["any heads"] = stream
        for heads, grouped in streams.items():
            repeated = dataclasses.replace(
                grouped,
                key=grouped.key.repeat_interleave(group, dim=1),
                value=grouped.value.repeat_interleave(group, dim=1),
            )
            runs = [subject.replay(s).prefill(subject.prompt).steps(count) for s in (grouped, repeated)]
            for at, (one, other) in enumerate(zip(*runs, strict=True)):
                _require_equal(one, other, f"{heads}, step {at}")

    # 5. Chunked prefill

    @pytest.mark.parametrize("padded", [False, True])
    def test_chunked_prefill_equals_one_shot(self, subject: Subject, padded: bool) -> None:
        """How a prompt came in makes no difference."""
        prompt, count = subject.prompt, self.pick(12, 1)
        total = prompt + count
        lengths = [total, 13 + count] if padded else None
        stream = self.stream(53, batch=self.pick(2, 1), length=total, lengths=lengths)
        whole = subject.replay(stream).prefill(prompt).steps(count)
        for chunks in ([prompt - 2, 2], [3, prompt - 3], [1, 16, 1, prompt - 23, 5]):
            steps = subject.replay(stream).prefill(*chunks).steps(count)
            for at, (one, other) in enumerate(zip(steps, whole, strict=True)):
                _require_equal(one, other, f"chunks {chunks}, step {at}")

    def test_sequences_may_begin_late(self, subject: Subject) -> None:
        """A batch that comes in token by token equals its sequences alone, also those that begin after others."""
        lengths, shown, count = self.pick(([24, 21, 9], 0, 8), ([14, 11, 3], 10, 2))

        def run(stream: Stream, shown: int) -> list[Step]:
            replay = subject.replay(stream)
            if shown > 0:
                replay.prefill(shown)
            while replay.length < stream.length - count:
                replay.attend()
            return replay.steps(count)

        stream = self.stream(51, lengths=lengths)
        together = run(stream, shown)  # of the last sequence, all but one of the fused steps have no token yet
        for row, length in enumerate(lengths):
            alone = run(stream.alone(row), shown - (stream.length - length))
            for at, (one, other) in enumerate(zip(together, alone, strict=True)):
                _require_equal(_only(one, row), other, f"row {row}, step {at}")

    # 6. Rows move

    def test_reorder_moves_rows(self, subject: Subject) -> None:
        """A permutation permutes the outputs, also one that drops rows; the identity changes nothing."""
        replay, stayed = self._three_rows(subject, 60)
        for index in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
            moved = replay.fork().reorder(torch.tensor(index))
            _require_rows(moved, stayed, index, f"reorder {index}")

    def test_repeat_select_and_move_rows(self, subject: Subject) -> None:
        """`repeat` copies rows, `select` keeps some, by index or mask; `to` changes nothing else."""
        replay, stayed = self._three_rows(subject, 61)
        _require_rows(replay.fork().repeat(2), stayed, [0, 0, 1, 1, 2, 2], "repeat 2")
        _require_rows(replay.fork().select(torch.tensor([2, 0])), stayed, [2, 0], "select [2, 0]")
        _require_rows(replay.fork().select(torch.tensor([True, False, True])), stayed, [0, 2], "select mask")
        travelled = replay.fork()
        travelled.state.to("cpu")
        travelled.state.to(self.device)
        _require_rows(travelled, stayed, [0, 1, 2], "to the CPU and back")

    def _three_rows(self, subject: Subject, seed: int) -> tuple[Replay, list[Step]]:
        """Three sequences that have decoded some tokens, and what comes next if nothing moves."""
        count = self.pick(4, 1)
        stream = self.stream(seed, lengths=[subject.prompt + 12, subject.prompt + 1, 30])
        replay = subject.replay(stream).prefill(subject.prompt)
        replay.steps(count)
        return replay, replay.fork().steps(count)

    # 7. Tokens taken back

    @pytest.mark.parametrize("padded", [False, True])
    def test_crop_then_replay_equals_never_having_generated(self, subject: Subject, padded: bool) -> None:
        """Rejected drafts leave no trace, whether the same tokens follow or others."""
        prompt = subject.prompt
        lengths = [prompt + 16, 28] if padded else None
        stream = self.stream(70, batch=self.pick(2, 1), length=prompt + 16, lengths=lengths)
        for accepted, rejected in self.pick(((0, 1), (0, 6), (3, 2), (8, 5)), ((1, 2),)):
            fresh = subject.replay(stream).prefill(prompt)
            fresh.steps(accepted)
            expected = fresh.fork().steps(self.pick(6, 1))
            for draft in (stream, stream.diverging(prompt + accepted, seed=700 + rejected)):
                replay = fresh.fork()
                replay.stream = draft
                for _ in range(self.pick(2, 1)):  # again, so that nothing piles up
                    replay.steps(rejected)
                    replay.crop(rejected)
                replay.stream = stream
                what = f"{accepted} accepted, {rejected} rejected, {'same' if draft is stream else 'other'} tokens"
                for at, (one, other) in enumerate(zip(replay.steps(len(expected)), expected, strict=True)):
                    _require_equal(one, other, f"{what}, step {at}")

    def test_crop_into_the_prompt_is_sound(self, subject: Subject) -> None:
        """Taking back more than was generated, down to one token, leaves a state that goes on."""
        prompt = subject.prompt
        stream = self.stream(71, batch=self.pick(2, 1), length=prompt + 16)
        for left in (1, 5, prompt // 2, prompt - 3):
            replay = subject.replay(stream).prefill(prompt)
            replay.steps(self.pick(4, 1))
            replay.crop(replay.length - left)
            replay.stream = stream.diverging(left, seed=72)
            for step in replay.steps(self.pick(10, 2)):
                self._require_sound(subject, step)

    def test_reset_forgets_everything(self, subject: Subject) -> None:
        """A state that was reset is as new, whether a long prompt follows, a short one or none."""
        prompt, count = subject.prompt, self.pick(8, 2)
        stream, other = self.stream(73, length=prompt + 8), self.stream(74, length=prompt + 8)
        used = subject.replay(other).prefill(prompt)
        used.steps(count)
        for shown in (prompt, self.pick(5, (subject.topk or 8) + 2), 0):
            replay, fresh = used.fork(), subject.replay(stream)
            replay.state.reset()
            replay.stream, replay.length = stream, 0
            after = self.pick(8, 1)
            steps, expected = ((r.prefill(shown) if shown else r).steps(after) for r in (replay, fresh))
            for at, (one, new) in enumerate(zip(steps, expected, strict=True)):
                _require_equal(one, new, f"prompt of {shown} after reset, step {at}")

    # 8. Fused attend

    @pytest.mark.parametrize("padded", [False, True])
    def test_attend_equals_discover_and_aggregate(self, subject: Subject, padded: bool) -> None:
        """The fused step gives the two steps' output, and leaves the state they leave."""
        prompt, count = subject.prompt, self.pick(16, 2)
        total = prompt + count
        lengths = [total, 12 + count] if padded else None
        stream = self.stream(80, batch=self.pick(2, 1), length=total, lengths=lengths)
        two_steps = subject.replay(stream).prefill(prompt)
        fused = two_steps.fork()
        for at in range(count):
            probe = fused.fork().step()
            step, output = two_steps.step(), fused.attend()
            _require_equal(probe, step, f"step {at} after {at} fused ones")
            assert_same_output(output, step.output, step.tolerance(), f"attend in step {at}")

    def test_aggregate_leaves_the_state_alone(self, subject: Subject) -> None:
        """Only `discover` changes the state."""
        replay = subject.replay(self.stream(81, batch=2, length=subject.prompt + 4)).prefill(subject.prompt)
        step = replay.step()
        before = {name: tensor.clone() for name, tensor in replay.state.tensors().items()}
        query, kv = replay.stream.query[:, :, replay.length - 1 : replay.length], replay.kv()
        outputs = [
            replay.selector.aggregate(query, kv, step.support, replay.state, scale=replay.scale).cpu() for _ in range(2)
        ]
        for name, tensor in replay.state.tensors().items():
            require(_identical(before[name], tensor), f"aggregate changed state.{name}")
        require(
            torch.equal(outputs[0], step.output) and torch.equal(outputs[1], step.output), "aggregate twice differs"
        )

    # 9. Deterministic

    def test_same_input_same_support(self, subject: Subject) -> None:
        """Two runs agree bit for bit, ties included."""
        count = self.pick(12, 2)
        stream = self.stream(90, lengths=self.pick([subject.prompt + count, 30], [subject.prompt + count]))
        for kind in ("as it is", "equal keys", "clustered keys"):
            tied = stream if kind == "as it is" else hostile_stream(stream, kind)
            runs = []
            for seed in range(self.pick(3, 2)):
                torch.manual_seed(seed)  # chance from outside must make no difference
                runs.append(subject.replay(tied).prefill(subject.prompt).steps(count))
            for other in runs[1:]:
                for at, (one, two) in enumerate(zip(runs[0], other, strict=True)):
                    require(torch.equal(one.mask, two.mask), f"{kind}: supports of step {at} differ between runs")
                    require(_identical(one.output, two.output), f"{kind}: outputs of step {at} differ between runs")

    def test_states_are_independent(self, subject: Subject) -> None:
        """Two caches served by one selector, in turns, do not see each other; nor do a state and its clone."""
        prompt, count = subject.prompt, self.pick(8, 2)
        selector = subject.make()
        streams = [self.stream(91, length=prompt + 12), self.stream(92, batch=2, lengths=[prompt + 12, 30])]
        alone = [subject.replay(stream).prefill(prompt).steps(count) for stream in streams]
        turns = [Replay(selector, streams[0]), Replay(selector, streams[1], layer_idx=17)]
        for replay in turns:
            replay.prefill(prompt)
        for at in range(count):
            for number, replay in enumerate(turns):
                _require_equal(replay.step(), alone[number][at], f"cache {number} of two, step {at}")
        replay = subject.replay(streams[0]).prefill(prompt)
        replay.fork().steps(count)
        astray = replay.fork()
        astray.stream = streams[0].diverging(prompt, seed=93)
        for at in range(count):
            astray.step()
            _require_equal(replay.step(), alone[0][at], f"beside its clone, step {at}")

    # 10. Layouts

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_makes_no_difference(self, subject: Subject, layout: str, padded: bool) -> None:
        """Dense or paged, whatever the strides, the same positions and outputs; memory of nobody's is not read."""
        prompt, count = subject.prompt, self.pick(8, 1)
        total = prompt + count
        lengths = [total, 17 + count] if padded else None
        heads = {} if padded else {"num_attention_heads": self.pick(4, 2), "num_key_value_heads": 2}
        stream = self.stream(100, batch=self.pick(2, 1), length=total, lengths=lengths, **heads)
        dense = subject.replay(stream).prefill(prompt)
        other = subject.replay(stream, layout=LAYOUTS[layout]).prefill(prompt - 5, 5)
        fused = other.fork()
        for at in range(count):
            one, two = dense.step(), other.step()
            _require_equal(two, one, f"{layout}, step {at}")
            assert_same_output(fused.attend(), one.output, one.tolerance(), f"{layout}, attend in step {at}")

    # 11. Precision

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_output_is_within_its_bound_of_float64(self, subject: Subject, dtype: torch.dtype) -> None:
        """Attention over the support, to what rounding allows; bfloat16 inputs are taken as they are."""
        count = self.pick(12, 2)
        stream = self.stream(110, batch=2, length=subject.prompt + count).to(dtype)
        replay = subject.replay(stream).prefill(subject.prompt)
        fused = replay.fork()
        for at, step in enumerate(replay.steps(count)):
            require(step.output.dtype == dtype, f"output is {step.output.dtype}, queries {dtype}")
            assert_close_to_float64(step.output, self.expected(step), f"step {at}")
            output = fused.attend()
            require(output.dtype == dtype, f"attend gives {output.dtype}, queries {dtype}")
            assert_close_to_float64(output, self.expected(step), f"attend in step {at}")

    # 12. Hostile input

    @pytest.mark.parametrize("kind", HOSTILE)
    def test_survives_hostile_input(self, subject: Subject, kind: str) -> None:
        """NaN, infinities, ties and zeros: no crash, no stray index, and right outputs wherever float64 has any."""
        count = self.pick(16, 2)
        prompt = subject.prompt + self.pick(0, (3 - subject.prompt) % 7)  # the first of few is a bad one
        lengths = self.pick([prompt + count, 24 + count], [prompt + count])
        stream = hostile_stream(self.stream(120, lengths=lengths), kind)
        replay = subject.replay(stream).prefill(prompt)
        fused = replay.fork()
        for at, step in enumerate(replay.steps(count)):
            _require_budget(subject, step)
            assert_close_to_float64(step.output, self.expected(step), f"{kind}, step {at}")
            assert_close_to_float64(fused.attend(), self.expected(step), f"{kind}, attend in step {at}")

    def test_every_length_is_served(self, subject: Subject) -> None:
        """Lengths 1, 63, 111 and around K; with L ≤ K every key is attended to."""
        around = () if subject.topk is None else (subject.topk - 1, subject.topk, subject.topk + 1)
        runs = [(self.pick(111, 5), 0)]  # from nothing, token by token
        runs += [(length, length - 1) for length in sorted({2, 63, 111, *around}) if length > 1]
        for length, prefill in runs:
            replay = subject.replay(self.stream(121, length=length))
            for step in (replay.prefill(prefill) if prefill else replay).steps(length - prefill):
                self._require_sound(subject, step)
                visible = step.mask.shape[2]
                if subject.topk is None or visible <= subject.topk:
                    require(
                        bool(step.mask.all()), f"{prefill} of {length} prefilled: of {visible} keys not all selected"
                    )

    def test_cold_state_is_legal(self, subject: Subject) -> None:
        """A selector that was never shown the prompt still serves it."""
        count = self.pick(8, 2)
        replay = subject.replay(self.stream(122, lengths=[subject.prompt + count, 22 + count])).skip(subject.prompt)
        for step in replay.steps(count):
            self._require_sound(subject, step)


def require(condition: bool, message: str) -> None:
    """Fail with `message` unless `condition` (an `assert` would vanish under `python -O`).

    Raises:
        AssertionError: The condition does not hold.
    """
    if not condition:
        raise AssertionError(message)


def _require_budget(subject: Subject, step: Step, topk: int | str | None = None) -> None:
    for row, length in enumerate(step.lengths.tolist()):
        most, allowed = int(step.mask[row].sum(-1).max()), subject.budget(length, topk)
        require(most <= allowed, f"a head of row {row} attends to {most} of {length} keys, {allowed} allowed")


def _require_equal(one: Step, other: Step, what: str) -> None:
    """The same support exactly (scores of these inputs are exact) and the same output up to rounding."""
    length = max(one.mask.shape[2], other.mask.shape[2])
    first, second = (torch.nn.functional.pad(s.mask, (0, length - s.mask.shape[2])) for s in (one, other))
    if not torch.equal(first, second):
        row, head = (first ^ second).any(-1).nonzero()[0].tolist()
        mine, theirs = (mask[row, head].nonzero().flatten().tolist() for mask in (first, second))
        raise AssertionError(f"{what}: row {row}, head {head} attends to {mine}, expected {theirs}")
    assert_same_output(one.output, other.output, max(one.tolerance(), other.tolerance()), what)


def _require_rows(moved: Replay, stayed: list[Step], sources: list[int], what: str) -> None:
    """Row i of `moved` goes on as row `sources[i]` of what stayed did."""
    for at, (one, other) in enumerate(zip(moved.steps(len(stayed)), stayed, strict=True)):
        for row, source in enumerate(sources):
            _require_equal(_only(one, row), _only(other, source), f"{what}, row {row}, step {at}")


def _only(step: Step, row: int) -> Step:
    """One row of a step."""
    rows = slice(row, row + 1)
    names = ("query", "keys", "values", "lengths", "mask", "output")
    return dataclasses.replace(step, **{name: getattr(step, name)[rows] for name in names})


def _agreeing(query: Tensor, group: int) -> Tensor:
    """Every query head replaced by the first of its group."""
    return query[:, ::group].repeat_interleave(group, dim=1)


def _identical(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, NaN to NaN."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )
