"""What TokenSelect remembers: per layer, the selection in force after each of the latest decode steps."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.selector import LayerSpec, SelectorState

# Steps remembered. The paper keeps the last selection alone; with those before it, drafts of fewer tokens than this
# can be taken back and leave no trace.
STEPS = 32
# Selections grow by this many slots at a time, so that a short context does not reallocate every step.
_GROWTH = 64
# A stamp that no position can equal.
_EMPTY = -(1 << 62)


def selection_width(count: int) -> int:
    """Slots kept per selection where at most `count` tokens are selected."""
    return -(-count // _GROWTH) * _GROWTH


@dataclass(kw_only=True)
class TokenSelectState(SelectorState):
    """A ring over decode steps, slot = position mod `STEPS`, each slot stamped with its position.

    A step at position t goes on from the slot stamped t - 1, if there is one: a prefill leaves none. A crop voids the
    stamps beyond it, and what was in force before is there again.

    Attributes:
        queries: `[B, S, Hq, D]` the query of the last miss as of that step.
        selected: `[B, S, W]` int32 what that miss selected: logical positions, ascending, padded with -1; W grows.
        stamps: `[B, S]` int64 position of each step.
    """

    queries: Float[Tensor, "B S Hq D"]
    selected: Int[Tensor, "B S W"]
    stamps: Int[Tensor, "B S"]

    @classmethod
    def empty(cls, layer: LayerSpec) -> "TokenSelectState":
        """State that has seen nothing."""
        rows, heads, device = layer.batch_size, layer.num_attention_heads, layer.device
        # Not inference tensors even under inference_mode, so that later steps may write outside of it.
        with torch.inference_mode(mode=False):
            return cls(
                layer=layer,
                queries=torch.zeros(rows, STEPS, heads, layer.head_dim, dtype=layer.dtype, device=device),
                selected=torch.full((rows, STEPS, 0), -1, dtype=torch.int32, device=device),
                stamps=torch.full((rows, STEPS), _EMPTY, dtype=torch.int64, device=device),
            )

    def reset(self) -> None:
        """Forget every sequence."""
        self.stamps.fill_(_EMPTY)

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Void the steps at positions ≥ `lengths`."""
        self.stamps.masked_fill_(self.stamps >= lengths.to(self.stamps.device)[:, None], _EMPTY)

    def before(
        self, positions: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B Hq D"], Int[Tensor, "B W"], Bool[Tensor, " B"]]:
        """Query and selection in force before `positions`, and whether there are any."""
        rows = torch.arange(positions.shape[0], device=positions.device)
        slots = (positions - 1) % STEPS
        return self.queries[rows, slots], self.selected[rows, slots], self.stamps[rows, slots] == positions - 1

    def insert(
        self, positions: Int[Tensor, " B"], query: Float[Tensor, "B Hq D"], selected: Int[Tensor, "B K"]
    ) -> None:
        """Note what is in force after the step at `positions`."""
        rows = torch.arange(positions.shape[0], device=positions.device)
        slots = positions % STEPS
        self.queries[rows, slots] = query.to(self.queries.dtype)
        self.selected[rows, slots] = F.pad(selected, (0, self.selected.shape[2] - selected.shape[1]), value=-1)
        # A sequence that has not begun has no position.
        self.stamps[rows, slots] = torch.where(positions < 0, _EMPTY, positions)

    def widen(self, count: int) -> None:
        """Make room for selections of `count` tokens."""
        missing = selection_width(count) - self.selected.shape[2]
        if missing > 0:
            with torch.inference_mode(mode=False):
                self.selected = F.pad(self.selected, (0, missing), value=-1)
