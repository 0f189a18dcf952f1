"""Support, counters, state and the records that selectors exchange with the framework."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from sparsesel.kv import KVView
from sparsesel.selector import Counters, LayerSpec, Selector, SelectorState, StepCost, Support, discover_and_aggregate
from sparsesel.testing import DenseLayout, check_support, random_stream

LAYER = LayerSpec(0, 4, 2, 8, torch.float32, torch.device("cpu"))


def view(*lengths):
    stream = random_stream(0, lengths=list(lengths), head_dim=8)
    return DenseLayout()(stream.key, stream.value, stream.starts)


# Support


def test_support_counts_what_is_not_padding():
    support = Support.of(torch.tensor([[[[0, 2, 5]], [[3, -1, -1]]]], dtype=torch.int32))
    assert support.counts.tolist() == [[[3], [1]]]
    assert support.counts.dtype == torch.int32


def test_support_as_mask_marks_its_positions():
    support = Support.of(torch.tensor([[[[0, 2, 5]], [[3, -1, -1]]]], dtype=torch.int32))
    mask = support.as_mask(view(6))
    assert mask.shape == (1, 2, 1, 6)
    assert [row.nonzero().flatten().tolist() for row in mask[0, :, 0]] == [[0, 2, 5], [3]]


def test_support_of_everything_is_every_visible_key():
    support = Support.everything(view(6, 2))
    assert support.indices is None
    assert support.counts.tolist() == [[[6]], [[2]]]
    assert support.as_mask(view(6, 2))[:, 0, 0].tolist() == [[True] * 6, [True] * 2 + [False] * 4]


def test_group_size_is_query_heads_per_key_value_head():
    assert LAYER.group_size == 2


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [
        ([[0, 2, 2]], "not unique and ascending"),
        ([[2, 1, -1]], "not unique and ascending"),
        ([[0, 6, -1]], "not visible"),
        ([[0, -1, 3]], "-1 lies before"),
        ([[0, -2, -1]], "below -1"),
        ([[-1, -1, -1]], "attends to nothing"),
        ([[0, 1, 2]] * 3, "shape"),
    ],
)
def test_check_support_says_what_is_wrong(indices, complaint):
    support = Support.of(torch.tensor([[[row] for row in indices]], dtype=torch.int32))
    with pytest.raises(AssertionError, match=complaint):
        check_support(support, torch.tensor([6]), num_attention_heads=4, num_key_value_heads=2)


def test_check_support_wants_int32_and_right_counts():
    indices = torch.tensor([[[[0, 1]]]])
    lengths = torch.tensor([6])
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    check_support(Support.of(indices.int()), lengths, **heads)
    with pytest.raises(AssertionError, match="int32"):
        check_support(Support.of(indices), lengths, **heads)
    with pytest.raises(AssertionError, match="int32"):
        check_support(Support(indices.int(), torch.tensor([[[2]]])), lengths, **heads)
    with pytest.raises(AssertionError, match="do not count"):
        check_support(Support(indices.int(), torch.tensor([[[1]]], dtype=torch.int32)), lengths, **heads)
    with pytest.raises(AssertionError, match="full support"):
        check_support(Support.everything(view(5)), lengths, **heads)


# Counters


def test_counters_sum_over_steps_and_sequences():
    counters = Counters()
    kv = view(6, 2)
    support = Support.of(torch.tensor([[[[0, 2, 5]], [[3, -1, -1]]], [[[0, 1, -1]], [[1, -1, -1]]]], dtype=torch.int32))
    counters.add_step(support, kv, 4)
    counters.add_step(Support.everything(kv), kv, 4)
    counters.add("exact", torch.tensor([[True, False, True, False], [True, False, False, False]]))
    read = {name: values.tolist() for name, values in counters.read().items()}
    assert read == {
        "steps": [4, 4, 4, 4],
        "selected": [5 + 8, 5 + 8, 2 + 8, 2 + 8],
        "visible": [16, 16, 16, 16],
        "exact": [2, 0, 1, 0],
    }


def test_reading_counters_gives_copies_of_the_moment():
    counters = Counters()
    counters.add("steps", torch.ones(1, 4))
    before = counters.read()["steps"]
    counters.add("steps", torch.ones(1, 4))
    assert before.tolist() == [1] * 4
    assert counters.read()["steps"].tolist() == [2] * 4


def test_sums_stay_where_they_are_and_in_what_a_kernel_adds_to():
    counters = Counters()
    with torch.inference_mode():
        counters.add("steps", torch.ones(1, 4))
    rows = counters.table(("exact", "steps"), 4, torch.device("cpu"))
    assert rows.tolist() == [[0] * 4, [1] * 4]
    rows += 1
    counters.add("steps", torch.ones(1, 4))
    assert counters.table(("exact", "steps"), 4, torch.device("cpu")) is rows
    assert {name: values.tolist() for name, values in counters.read().items()} == {"steps": [3] * 4, "exact": [1] * 4}
    assert counters.table(("exact", "other"), 4, torch.device("cpu")).tolist() == [[1] * 4, [0] * 4]
    assert counters.read()["steps"].tolist() == [3] * 4


# SelectorState


@dataclass
class Memory(SelectorState):
    queries: torch.Tensor = dataclasses.field(kw_only=True)  # [B, 2]
    stamps: torch.Tensor = dataclasses.field(kw_only=True)  # [B]
    pending: bool = dataclasses.field(kw_only=True, default=False)

    def reset(self):
        self.stamps = torch.full_like(self.stamps, -1)

    def crop(self, lengths):
        self.stamps = torch.where(self.stamps < lengths, self.stamps, -1)


@pytest.fixture
def memory():
    return Memory(LAYER, queries=torch.arange(6.0).view(3, 2), stamps=torch.tensor([10, 11, 12]), pending=True)


def test_reorder_moves_all_tensors(memory):
    memory.reorder(torch.tensor([2, 0, 0]))
    assert memory.stamps.tolist() == [12, 10, 10]
    assert memory.queries.tolist() == [[4, 5], [0, 1], [0, 1]]


def test_reordered_rows_do_not_share_memory(memory):
    memory.reorder(torch.tensor([2, 0, 0]))
    memory.queries[1] = -1
    assert memory.queries[2].tolist() == [0, 1]


def test_repeat_keeps_neighbours_together(memory):
    memory.repeat(2)
    assert memory.stamps.tolist() == [10, 10, 11, 11, 12, 12]


@pytest.mark.parametrize("index", [torch.tensor([2, 1]), torch.tensor([False, True, True])])
def test_select_keeps_rows(memory, index):
    memory.select(index)
    assert memory.stamps.tolist() == sorted([11, 12], reverse=index.dtype != torch.bool)
    assert memory.queries.shape == (2, 2)


def test_to_moves_all_tensors_and_only_tensors(memory):
    memory.to("meta")
    assert {tensor.device.type for tensor in memory.tensors().values()} == {"meta"}
    assert memory.pending is True
    assert memory.layer is LAYER


def test_clone_is_independent_and_counts_for_itself(memory):
    memory.counters.add("steps", torch.ones(1, 4))
    copy = memory.clone()
    assert type(copy) is Memory
    assert copy.pending is True
    copy.queries.zero_()
    copy.reset()
    copy.counters.add("steps", torch.ones(1, 4))
    assert memory.queries.sum() == 15
    assert memory.stamps.tolist() == [10, 11, 12]
    assert memory.counters.read()["steps"].tolist() == [1] * 4
    assert copy.counters.read()["steps"].tolist() == [1] * 4


def test_nbytes_and_tensors_cover_tensor_fields_alone(memory):
    assert set(memory.tensors()) == {"queries", "stamps"}
    assert memory.nbytes() == 6 * 4 + 3 * 8


def test_state_without_memory_needs_nothing_overridden():
    state = SelectorState(LAYER)
    state.reset()
    state.crop(torch.tensor([3]))
    state.reorder(torch.tensor([0]))
    assert state.nbytes() == 0


def test_state_with_memory_must_say_how_to_forget():
    @dataclass
    class Forgetful(SelectorState):
        stamps: torch.Tensor = dataclasses.field(kw_only=True)

    state = Forgetful(LAYER, stamps=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="Forgetful must override reset"):
        state.reset()
    with pytest.raises(NotImplementedError, match="Forgetful must override crop"):
        state.crop(torch.tensor([3]))


# Protocol


def test_bytes_read_leave_the_state_kept_out():
    cost = StepCost(1, 2, 3, 4, flops=100, state_bytes=1000, attended=5)
    assert cost.bytes_read == 10


class Newest:
    """Attends to the newest key."""

    config = None

    def init_state(self, layer):
        return SelectorState(layer)

    def observe_prefill(self, query, kv, state, *, scale):
        pass

    def discover(self, query, kv, state, *, scale):
        return Support.of((kv.lengths - 1).int()[:, None, None, None])

    def aggregate(self, query, kv, support, state, *, scale):
        return kv.gather_values(support.indices[:, 0].expand(-1, kv.num_heads, -1)).repeat_interleave(2, dim=1)

    def attend(self, query, kv, state, *, scale):
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer, length):
        return StepCost(0, 0, 0, 0, 0, 0, 1)


def test_any_class_with_the_methods_is_a_selector():
    assert isinstance(Newest(), Selector)
    assert not isinstance(object(), Selector)


def test_discover_and_aggregate_is_the_one_after_the_other():
    values = torch.arange(6.0).view(1, 2, 3, 1)
    kv = KVView.dense(values, values)
    selector = Newest()
    output = selector.attend(torch.zeros(1, 4, 1, 1), kv, selector.init_state(LAYER), scale=1.0)
    assert output.flatten().tolist() == [2, 2, 5, 5]
