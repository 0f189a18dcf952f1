"""The conformance suite passes a sound selector with memory, and catches each fault by the test meant for it."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from pydantic import Field

from sparsesel.config import SelectorConfig
from sparsesel.ops import indexed_qk, sparse_attention, topk_indices
from sparsesel.selector import SelectorState, StepCost, Support, discover_and_aggregate
from sparsesel.testing.conformance import SelectorConformance

SLOTS = 24


class SmoothedConfig(SelectorConfig):
    name: Literal["smoothed"] = "smoothed"
    topk: int = Field(512, ge=1, description="K: keys attended.")


@dataclass
class SmoothedState(SelectorState):
    queries: torch.Tensor = dataclasses.field(kw_only=True)  # [B, Hq, SLOTS, D]
    stamps: torch.Tensor = dataclasses.field(kw_only=True)  # [B, SLOTS], position held by each slot, -1 for none

    def reset(self):
        self.stamps = torch.full_like(self.stamps, -1)

    def crop(self, lengths):
        self.stamps = torch.where(self.stamps < lengths[:, None], self.stamps, -1)


class Smoothed:
    """Ranks keys by the current query plus the one before: the simplest selector with a memory."""

    def __init__(self, config):
        self.config = config

    def init_state(self, layer):
        shape = (layer.batch_size, layer.num_attention_heads, SLOTS, layer.head_dim)
        stamps = torch.full((layer.batch_size, SLOTS), -1)
        return SmoothedState(layer, queries=torch.zeros(shape), stamps=stamps)

    def remember(self, query, kv, state):
        count = min(query.shape[2], SLOTS)
        positions = kv.lengths[:, None] + torch.arange(-count, 0)
        slots = positions % SLOTS
        stamped = torch.where(positions >= 0, positions, state.stamps.gather(1, slots))
        kept = (positions >= 0)[:, None, :, None]
        index = slots[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        new = torch.where(kept, query[:, :, -count:].float(), state.queries.gather(2, index))
        state.queries = state.queries.scatter(2, index, new)
        state.stamps = state.stamps.scatter(1, slots, stamped)

    def observe_prefill(self, query, kv, state, *, scale):
        self.remember(query, kv, state)

    def smoothed(self, query, kv, state):
        before = kv.lengths - 2
        slot = (before % SLOTS)[:, None]
        known = ((state.stamps.gather(1, slot) == before[:, None]) & (before >= 0)[:, None])[..., None, None]
        index = slot[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        earlier = state.queries.gather(2, index)
        return query.float() + torch.where(known, earlier, 0.0)

    def indices(self, query, kv, state, *, scale):
        everything = torch.arange(kv.max_length).expand(*query.shape[:2], -1)
        everything = torch.where(everything < kv.lengths[:, None, None], everything, -1)
        scores = indexed_qk(self.smoothed(query, kv, state), kv, everything, scale=scale)
        return topk_indices(scores, self.config.topk, kv.lengths[:, None].expand(*query.shape[:2]))

    def discover(self, query, kv, state, *, scale):
        indices = self.indices(query, kv, state, scale=scale)
        self.remember(query, kv, state)
        support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(self, query, kv, support, state, *, scale):
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(self, query, kv, state, *, scale):
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer, length):
        return StepCost(length, length, 0, 0, length, 0, attended=min(length, self.config.topk))


def suite(broken: type, **attributes) -> SelectorConformance:
    def make_selector(self, spec, values):
        return broken(SmoothedConfig(**values))

    return type("Suite", (SelectorConformance,), {"make_selector": make_selector, **attributes})()


class TestSoundSelectorPasses(SelectorConformance):
    def make_selector(self, spec, values):
        return Smoothed(SmoothedConfig(**values))


class TestSoundSelectorPassesQuickly(TestSoundSelectorPasses):
    quick = True


# Faults of `discover`'s support


class DuplicateIndex(Smoothed):
    def indices(self, *args, **kwargs):
        indices = super().indices(*args, **kwargs)
        if indices.shape[-1] > 1:
            indices[..., 1] = indices[..., 0]
        return indices


class InvisibleIndex(Smoothed):
    def indices(self, query, kv, state, *, scale):
        indices = super().indices(query, kv, state, scale=scale)
        indices[..., -1] = kv.max_length - 1  # of a shorter sequence in the batch, past its end
        return indices


class Descending(Smoothed):
    def indices(self, *args, **kwargs):
        return super().indices(*args, **kwargs).flip(-1)


class Int64(Smoothed):
    def indices(self, *args, **kwargs):
        return super().indices(*args, **kwargs).long()


class MissesTheFirst(Smoothed):
    def indices(self, query, kv, state, *, scale):
        indices = super().indices(query, kv, state, scale=scale)
        return indices[..., 1:] if kv.max_length > 1 else indices


class OverBudget(Smoothed):
    def __init__(self, config):
        super().__init__(config.model_copy(update={"topk": config.topk + 1}))


class WrongCounts(Smoothed):
    def discover(self, *args, **kwargs):
        support = super().discover(*args, **kwargs)
        return Support(support.indices, support.counts + 1)


class SelectsByChance(Smoothed):
    def indices(self, query, kv, state, *, scale):
        scores = torch.rand(*query.shape[:2], kv.max_length)
        return topk_indices(scores, self.config.topk, kv.lengths[:, None].expand(*query.shape[:2]))


class ReadsPadding(Smoothed):
    """Takes columns for positions."""

    def indices(self, query, kv, state, *, scale):
        columns = kv.keys.float() if kv.block_table is None else kv.logical_keys().float()
        group = query.shape[1] // kv.num_heads
        scores = (query.float() @ columns.repeat_interleave(group, 1).transpose(2, 3))[:, :, 0]
        return topk_indices(scores, self.config.topk, kv.lengths[:, None].expand(*query.shape[:2]))


class FirstHeadForTheGroup(Smoothed):
    def indices(self, *args, **kwargs):
        indices = super().indices(*args, **kwargs)
        group = indices.shape[1] // args[1].num_heads
        return indices[:, torch.arange(indices.shape[1]) // group * group]


class WrongKeyValueHead(Smoothed):
    """Maps query head h to h % Hkv."""

    def aggregate(self, query, kv, support, state, *, scale):
        group = query.shape[1] // kv.num_heads
        keys, values = (base.repeat(1, group, 1, 1) for base in (kv.keys, kv.values))
        return super().aggregate(query, dataclasses.replace(kv, keys=keys, values=values), support, state, scale=scale)


# Faults of the state


class ForgetsPrefill(Smoothed):
    """Keeps only what the last chunk brought."""

    def observe_prefill(self, query, kv, state, *, scale):
        state.reset()
        if query.shape[2] > 8:
            self.remember(query, kv, state)


class SharedMemory(Smoothed):
    """Keeps the last query on the selector."""

    last = None

    def smoothed(self, query, kv, state):
        earlier = self.last
        self.last = query.float()
        return self.last if earlier is None or earlier.shape != query.shape else self.last + earlier


class StuckRows(Smoothed):
    def init_state(self, layer):
        state = super().init_state(layer)

        class Stuck(SmoothedState):
            def reorder(self, index):
                pass

        return Stuck(layer, queries=state.queries, stamps=state.stamps)


class RepeatsWholeBatch(Smoothed):
    def init_state(self, layer):
        state = super().init_state(layer)

        class Tiled(SmoothedState):
            def repeat(self, repeats):
                self._map(lambda tensor: tensor.repeat(repeats, *[1] * (tensor.ndim - 1)))

        return Tiled(layer, queries=state.queries, stamps=state.stamps)


class CropForgetsNothing(Smoothed):
    """Reads the newest entry, whatever its position, and keeps rejected ones."""

    def init_state(self, layer):
        state = super().init_state(layer)

        class Kept(SmoothedState):
            def crop(self, lengths):
                pass

        return Kept(layer, queries=state.queries, stamps=state.stamps)

    def smoothed(self, query, kv, state):
        newest = state.stamps.argmax(1)[:, None, None, None].expand(-1, query.shape[1], 1, query.shape[3])
        known = (state.stamps >= 0).any(1)[:, None, None, None]
        return query.float() + torch.where(known, state.queries.gather(2, newest), 0.0)


class ResetKeepsMemory(CropForgetsNothing):
    def init_state(self, layer):
        state = super().init_state(layer)
        type(state).reset = lambda self: None
        return state


class GrowingState(Smoothed):
    def discover(self, query, kv, state, *, scale):
        state.queries = torch.cat([state.queries] * 2, dim=2) if state.queries.shape[2] < 5000 else state.queries
        return super().discover(query, kv, state, scale=scale)

    def smoothed(self, query, kv, state):
        return query.float()

    def remember(self, query, kv, state):
        pass


class AggregateRemembers(Smoothed):
    def aggregate(self, query, kv, support, state, *, scale):
        state.stamps = state.stamps - 1
        return super().aggregate(query, kv, support, state, scale=scale)


# Faults of the output


class FusedForgets(Smoothed):
    """Its fused step leaves the query out of the memory."""

    def attend(self, query, kv, state, *, scale):
        support = Support.of(self.indices(query, kv, state, scale=scale)[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        return self.aggregate(query, kv, support, state, scale=scale)


class FusedOutput(Smoothed):
    def attend(self, query, kv, state, *, scale):
        return super().attend(query, kv, state, scale=scale) * (1 + 1e-3)


class FusedDoesNotCount(Smoothed):
    def attend(self, query, kv, state, *, scale):
        support = Support.of(self.indices(query, kv, state, scale=scale)[:, :, None])
        self.remember(query, kv, state)
        return self.aggregate(query, kv, support, state, scale=scale)


class IgnoresScale(Smoothed):
    def aggregate(self, query, kv, support, state, *, scale):
        return super().aggregate(query, kv, support, state, scale=1.0)


class RoundsToBFloat16(Smoothed):
    def aggregate(self, query, kv, support, state, *, scale):
        return super().aggregate(query, kv, support, state, scale=scale).bfloat16().to(query.dtype)


class OffByFourRoundings(Smoothed):
    def aggregate(self, query, kv, support, state, *, scale):
        output = super().aggregate(query, kv, support, state, scale=scale)
        return output if query.dtype == torch.float32 else output * (1 + 4 * torch.finfo(query.dtype).eps)


class OneBlockForAll(Smoothed):
    def aggregate(self, query, kv, support, state, *, scale):
        if kv.block_table is not None:
            kv = dataclasses.replace(kv, block_table=kv.block_table.clamp_max(0))
        return super().aggregate(query, kv, support, state, scale=scale)


class ScalesInPlace(Smoothed):
    def smoothed(self, query, kv, state):
        return super().smoothed(query.mul_(0.5), kv, state)


class NanQueryStays(Smoothed):
    """Adds what it remembers to its output, NaN included."""

    def aggregate(self, query, kv, support, state, *, scale):
        return super().aggregate(query, kv, support, state, scale=scale) + 0 * state.queries.sum()


class CrashesOnOne(Smoothed):
    def observe_prefill(self, query, kv, state, *, scale):
        self.seen = True
        super().observe_prefill(query, kv, state, scale=scale)

    def discover(self, query, kv, state, *, scale):
        if not hasattr(self, "seen"):
            raise AssertionError("nothing observed")
        return super().discover(query, kv, state, scale=scale)


class EndlessCost(Smoothed):
    def cost(self, layer, length):
        return dataclasses.replace(super().cost(layer, length), attended=float(length))


class OneClockForAll(Smoothed):
    """Remembers every sequence's query at the position of the longest one."""

    def remember(self, query, kv, state):
        super().remember(query, dataclasses.replace(kv, lengths=kv.lengths.max().expand_as(kv.lengths)), state)


class NoAttend(Smoothed):
    attend = property()


S = SelectorConformance
FAULTS = [
    (NoAttend, S.test_follows_the_protocol, {}),
    (ScalesInPlace, S.test_leaves_its_inputs_alone, {}),
    (FusedDoesNotCount, S.test_counts_its_steps, {}),
    (EndlessCost, S.test_cost_makes_sense, {"length": 4096}),
    (GrowingState, S.test_state_stays_bounded, {}),
    (MissesTheFirst, S.test_large_budget_equals_dense_attention, {"padded": False}),
    (DuplicateIndex, S.test_supports_are_well_formed, {}),
    (InvisibleIndex, S.test_supports_are_well_formed, {}),
    (Descending, S.test_supports_are_well_formed, {}),
    (Int64, S.test_supports_are_well_formed, {}),
    (OverBudget, S.test_supports_are_well_formed, {}),
    (WrongCounts, S.test_supports_are_well_formed, {}),
    (IgnoresScale, S.test_any_history_gives_sound_steps, {}),
    (ReadsPadding, S.test_left_padded_batch_equals_its_sequences_alone, {}),
    (ForgetsPrefill, S.test_chunked_prefill_equals_one_shot, {"padded": False}),
    (OneClockForAll, S.test_sequences_may_begin_late, {}),
    (FirstHeadForTheGroup, S.test_grouped_queries_equal_repeated_keys, {"group": 2}),
    (WrongKeyValueHead, S.test_grouped_queries_equal_repeated_keys, {"group": 2}),
    (StuckRows, S.test_reorder_moves_rows, {}),
    (RepeatsWholeBatch, S.test_repeat_select_and_move_rows, {}),
    (CropForgetsNothing, S.test_crop_then_replay_equals_never_having_generated, {"padded": False}),
    (ResetKeepsMemory, S.test_reset_forgets_everything, {}),
    (FusedForgets, S.test_attend_equals_discover_and_aggregate, {"padded": False}),
    (FusedOutput, S.test_attend_equals_discover_and_aggregate, {"padded": False}),
    (AggregateRemembers, S.test_aggregate_leaves_the_state_alone, {}),
    (SelectsByChance, S.test_same_input_same_support, {}),
    (SharedMemory, S.test_states_are_independent, {}),
    (OneBlockForAll, S.test_layout_makes_no_difference, {"layout": "blocks of 4", "padded": False}),
    (RoundsToBFloat16, S.test_output_is_within_its_bound_of_float64, {"dtype": torch.float32}),
    (OffByFourRoundings, S.test_output_is_within_its_bound_of_float64, {"dtype": torch.bfloat16}),
    (NanQueryStays, S.test_survives_hostile_input, {"kind": "nan query"}),
    (MissesTheFirst, S.test_every_length_is_served, {}),
    (CrashesOnOne, S.test_cold_state_is_legal, {}),
]


@pytest.mark.parametrize("quick", [False, True], ids=["complete", "quick"])
@pytest.mark.parametrize(("broken", "test", "arguments"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_fault_is_caught_by_the_test_meant_for_it(broken, test, arguments, quick):
    tests = suite(broken, quick=quick)
    with pytest.raises(AssertionError):
        test(tests, tests.make_subject(""), **arguments)


def test_every_test_of_the_suite_has_a_fault_it_catches():
    tests = {name for name in dir(S) if name.startswith("test_")}
    caught = {test.__name__ for _, test, _ in FAULTS}
    # Shown to matter below, where a sound selector gets a crop that loses track, and by a budget in percent.
    assert tests - caught == {"test_crop_into_the_prompt_is_sound", "test_relative_budget_is_held"}


class CropCountsWrong(Smoothed):
    """After a crop it looks for keys that are gone."""

    def init_state(self, layer):
        state = super().init_state(layer)

        class Longest(SmoothedState):
            def crop(self, lengths):
                self.layer = dataclasses.replace(self.layer, max_length=int(self.stamps.max()))

        return Longest(layer, queries=state.queries, stamps=state.stamps)

    def indices(self, query, kv, state, *, scale):
        indices = super().indices(query, kv, state, scale=scale)
        if state.layer.max_length:
            indices[..., -1] = state.layer.max_length
        return indices


@pytest.mark.parametrize("quick", [False, True], ids=["complete", "quick"])
def test_crop_into_the_prompt_is_caught(quick):
    tests = suite(CropCountsWrong, quick=quick)
    with pytest.raises(AssertionError, match="not visible"):
        tests.test_crop_into_the_prompt_is_sound(tests.make_subject(""))


def test_group_decisions_are_asked_only_where_heads_agree():
    tests = suite(FirstHeadForTheGroup, decides_per="group")
    tests.test_grouped_queries_equal_repeated_keys(tests.make_subject(""), group=2)


def test_smallest_accepted_budget_is_found():
    class Large(Smoothed):
        def __init__(self, config):
            if config.topk < 20:
                raise ValueError("at least 20")
            super().__init__(config)

    subject = suite(Large).make_subject("")
    assert subject.topk == 32
    assert subject.prompt == 4 * 32 + 9
