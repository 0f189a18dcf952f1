"""State with a record per token: what is missing is found and made good, whatever happened to the cache."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.kv import KVView
from sparsesel.per_token import PerTokenState, with_room, write_tokens
from sparsesel.testing.inputs import DenseLayout, PagedLayout, random_stream


@dataclass(kw_only=True)
class Copy(PerTokenState):
    """The keys once more."""

    keys: torch.Tensor

    @classmethod
    def empty(cls, layer):
        rows = layer.batch_size
        keys = torch.empty(rows, layer.num_key_value_heads, 0, layer.head_dim)
        return cls(layer=layer, indexed=torch.zeros(rows, dtype=torch.int64), keys=keys)

    def record(self, kv):
        positions, real = self.pending(kv)
        self.keys = with_room(self.keys, kv.max_length, dim=2)
        write_tokens(self.keys, positions, real, kv.gather_keys(positions[:, None].expand(-1, kv.num_heads, -1)))
        self.recorded(kv)


@pytest.fixture(params=[True, False], ids=["device is asked", "device is not asked"])
def _device_is_asked(request, monkeypatch):
    """Elsewhere than on a CPU the number of new tokens comes from what the host knows, where it can."""
    if request.param:
        return
    pending = PerTokenState.pending

    def pending_elsewhere(state, kv):
        with mock.patch.object(KVView, "device", torch.device("cuda")):
            return pending(state, kv)

    monkeypatch.setattr(PerTokenState, "pending", pending_elsewhere)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "crop", "reorder", "select", "repeat", "reset"]), st.integers(1, 9)),
    max_size=8,
)


@pytest.mark.usefixtures("_device_is_asked")
@pytest.mark.parametrize("layout", [DenseLayout(), PagedLayout(block_size=3)], ids=["dense", "paged"])
def test_any_life_leaves_a_true_copy(layout):
    @given(st.sampled_from([[90], [90, 90, 90], [90, 84, 87]]), OPERATIONS)
    def run(lengths, operations):
        stream, seen = random_stream(0, lengths=lengths, head_dim=8), 8
        state = Copy.empty(stream.layer_spec())
        for operation, amount in [*operations, ("append", 1)]:
            rows = stream.batch_size
            match operation:
                case "append":  # not always shown at once
                    seen += amount
                    state.record(layout(stream.key[:, :, :seen], stream.value[:, :, :seen], stream.starts))
                    expected, _ = stream.logical(seen)
                    for row, length in enumerate(stream.lengths(seen).tolist()):
                        assert torch.equal(state.keys[row, :, :length], expected[row, :, :length])
                    assert state.indexed.tolist() == stream.lengths(seen).tolist()
                case "crop":
                    seen = max(7, seen - amount)
                    state.crop(stream.lengths(seen))
                    stream = stream.diverging(seen, seed=amount)
                case "reorder" | "select":
                    index = (torch.arange(rows) + amount) % rows
                    index = index if operation == "reorder" else index[: 1 + amount % rows]
                    getattr(state, operation)(index)
                    stream = stream.rows(index)
                case "repeat" if rows < 4:
                    state.repeat(2)
                    stream = stream.rows(torch.arange(rows).repeat_interleave(2))
                case "reset":
                    state.reset()

    run()


def test_room_grows_by_half_and_keeps_what_is_there():
    buffer = torch.arange(2 * 64 * 3.0).view(2, 64, 3)
    assert with_room(buffer, 63, dim=1) is buffer
    grown = with_room(buffer, 64, dim=1)  # the last column is spare
    assert grown.shape == (2, 128, 3)
    assert torch.equal(grown[:, :64], buffer)
    assert with_room(torch.empty(1, 1000), 1000, dim=1).shape == (1, 1536)


def test_room_can_be_written_after_inference_mode():
    with torch.inference_mode():
        buffer = with_room(torch.empty(1, 1, 0, 2), 5, dim=2)
    write_tokens(buffer, torch.tensor([[3, 4]]), torch.tensor([[True, False]]), torch.ones(1, 1, 2, 2))
    assert buffer[0, 0, 3].tolist() == [1, 1]
    assert buffer[0, 0, -1].tolist() == [1, 1]  # the spare column takes what does not count
    assert not bool((buffer[0, 0, 4] == 1).any())


def test_records_keep_no_graph():
    buffer = with_room(torch.empty(1, 1, 0, 2), 5, dim=2)
    write_tokens(buffer, torch.tensor([[3]]), torch.tensor([[True]]), torch.ones(1, 1, 1, 2, requires_grad=True))
    assert not buffer.requires_grad
    assert buffer[0, 0, 3].tolist() == [1, 1]
