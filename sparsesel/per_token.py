"""State with a record for every token of the cache, which a scan cheaper than the keys themselves is made of.

Records are functions of keys and values alone, so a state that has missed tokens (a prompt prefilled elsewhere, a
crop, a row moved here) makes them good from the cache at its next step; in steady decoding that is one token.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.selector import SelectorState

_ROUND = 64  # tokens; capacities are multiples of it


@dataclass(kw_only=True)
class PerTokenState(SelectorState):
    """Base of such a state. At each step: `pending`, record those positions, `recorded`.

    Kernels need no `pending`: they read `indexed` and the lengths themselves. Tensors are changed in place wherever
    their shape stays the same, so that a step captured in a CUDA graph finds them where they were.

    Attributes:
        indexed: `[B]` int64, positions below it are recorded.
        reached: `max_length` of the view last recorded; None where it says nothing, since rows have moved or do not
            end there.
    """

    indexed: Int[Tensor, " B"]
    reached: int | None = field(default=0)

    def pending(self, kv: KVView) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
        """Positions from `indexed` on, as many as some sequence lacks, and which of them its own sequence lacks."""
        if kv.device.type == "cpu" or self.reached is None or not kv.aligned:
            count = max(0, int((kv.lengths - self.indexed).max()))
        else:  # every sequence grows by the columns that are new, so the device need not be asked
            count = max(0, kv.max_length - self.reached)
        positions = self.indexed[:, None] + torch.arange(count, device=self.indexed.device)
        return positions, positions < kv.lengths[:, None]

    def lacking(self, kv: KVView) -> int:
        """About how many tokens a sequence lacks: for the size of a launch that copes with any number. Never waits."""
        known = self.reached if kv.aligned else None
        return max(1, kv.max_length - (known or 0))

    def recorded(self, kv: KVView) -> None:
        """Note that everything in `kv` is recorded now."""
        torch.maximum(self.indexed, kv.lengths, out=self.indexed)
        self.reached = kv.max_length if kv.aligned else None

    def reset(self) -> None:
        """Forget every sequence."""
        self.indexed.zero_()
        self.reached = 0

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Forget the records at positions ≥ `lengths`."""
        torch.minimum(self.indexed, lengths.to(self.indexed.device), out=self.indexed)
        self.reached = None

    def reorder(self, index: Int[Tensor, " B"]) -> None:
        """Row i becomes what row `index[i]` was."""
        super().reorder(index)
        self.reached = None

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` (integers or a mask), in that order."""
        super().select(index)
        self.reached = None


def with_room(buffer: Tensor, tokens: int, *, dim: int) -> Tensor:
    """`buffer`, grown along `dim` where it cannot hold `tokens` and one spare column behind them.

    It grows by half at least, so that appending costs O(1) per token. What is new is not initialised.
    """
    held = buffer.shape[dim]
    if held > tokens:
        return buffer
    capacity = max(tokens, held + held // 2)
    shape = list(buffer.shape)
    shape[dim] = -(-(capacity + 1) // _ROUND) * _ROUND
    # Not an inference tensor even under inference_mode, so that later steps may append outside of it.
    with torch.inference_mode(mode=False):
        grown = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
        grown.narrow(dim, 0, held).copy_(buffer)
    return grown


def write_tokens(
    buffer: Float[Tensor, "B H C X"],
    positions: Int[Tensor, "B N"],
    real: Bool[Tensor, "B N"],
    records: Float[Tensor, "B H N X"],
) -> None:
    """Write `records` at their positions, those that are not `real` to the spare column at the end.

    Args:
        buffer: From `with_room`, as (row, head, token, channel); any strides.
        positions: Logical positions.
        real: Which of them count.
        records: One per position.
    """
    columns = torch.where(real, positions, buffer.shape[2] - 1)
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer.transpose(1, 2)[rows, columns] = records.detach().transpose(1, 2).to(buffer.dtype)
