"""What ReTopK remembers: per query head, a ring of past queries and the supports they had."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.selector import LayerSpec, SelectorState

# Slots beyond the C entries that can be recalled. Without them a rejected draft would overwrite entries that are
# needed again once it is cropped away; drafts of up to this many tokens lose nothing.
SPARE = 32
# Supports grow by this many slots at a time, so that a context shorter than K does not reallocate every step.
_GROWTH = 64
# A stamp that no position can equal.
_EMPTY = -(1 << 62)


def support_width(topk: int) -> int:
    """Slots kept per support where at most `topk` are used."""
    return -(-topk // _GROWTH) * _GROWTH


@dataclass(kw_only=True)
class ReTopKState(SelectorState):
    """The ring is indexed by logical position (slot = position mod S, S = C + `SPARE`) and stamped with it.

    An entry may be recalled at position t if its stamp lies in [t - C, t - 1], which is the paper's FIFO of C
    pairs (q̄, support) when every position is inserted once. After a crop, stamps beyond it are void, older entries
    are as they were, and replay writes the slots anew. A crop by more than `SPARE` tokens leaves fewer than C
    entries (the FIFO had dropped the others), which is legal and refills by itself.

    Steps change everything in place, so that a captured CUDA graph can go on with it; only supports that grow move.

    Attributes:
        queries: `[B, Hq, S, D]` post-RoPE, not normalised: prompt entries still have to rank keys with them.
        inverse_norms: `[B, Hq, S]` float32, 1/‖q‖, so that q̄ = q · `inverse_norms`; 0 where that is undefined.
        supports: `[B, Hq, S, K']` int32 logical positions, ascending, padded with -1; K' grows as needed.
        stamps: `[B, S]` int64 position of each entry.
        unbuilt: `[B, S]` entries from a prefill whose support has not been computed yet.
        prefill_end: `[B]` int64 position of the first token after the last prefill.
        has_unbuilt: Whether the next step has to look at `unbuilt`; known on the host.
    """

    queries: Float[Tensor, "B Hq S D"]
    inverse_norms: Float[Tensor, "B Hq S"]
    supports: Int[Tensor, "B Hq S K"]
    stamps: Int[Tensor, "B S"]
    unbuilt: Bool[Tensor, "B S"]
    prefill_end: Int[Tensor, " B"]
    has_unbuilt: bool = field(default=False)

    @classmethod
    def empty(cls, layer: LayerSpec, cache_size: int) -> "ReTopKState":
        """State that has seen nothing."""
        rows, heads, slots, device = layer.batch_size, layer.num_attention_heads, cache_size + SPARE, layer.device
        # Not inference tensors even under inference_mode, so that later steps may write outside of it.
        with torch.inference_mode(mode=False):
            return cls(
                layer=layer,
                queries=torch.zeros(rows, heads, slots, layer.head_dim, dtype=layer.dtype, device=device),
                inverse_norms=torch.zeros(rows, heads, slots, device=device),
                supports=torch.full((rows, heads, slots, 0), -1, dtype=torch.int32, device=device),
                stamps=torch.full((rows, slots), _EMPTY, dtype=torch.int64, device=device),
                unbuilt=torch.zeros(rows, slots, dtype=torch.bool, device=device),
                prefill_end=torch.zeros(rows, dtype=torch.int64, device=device),
            )

    def reset(self) -> None:
        """Forget every sequence."""
        self.stamps.fill_(_EMPTY)
        self.unbuilt.zero_()
        self.prefill_end.zero_()
        self.has_unbuilt = False

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Void the entries at positions ≥ `lengths`; supports of older ones hold only keys up to their own position."""
        lengths = lengths.to(self.stamps.device)
        void = self.stamps >= lengths[:, None]
        self.stamps.masked_fill_(void, _EMPTY)
        self.unbuilt.masked_fill_(void, False)
        torch.minimum(self.prefill_end, lengths, out=self.prefill_end)
        # Prompt entries older than the last C may come within reach again. Cropping may wait for the device.
        self.has_unbuilt = bool(self.unbuilt.any())

    def recent(self, positions: Int[Tensor, " B"], count: int) -> tuple[Int[Tensor, "B C"], Bool[Tensor, "B C"]]:
        """Slots of the `count` positions before `positions`, newest first, and which of them hold their entry."""
        wanted = positions[:, None] - torch.arange(1, count + 1, device=positions.device)
        slots = wanted % self.stamps.shape[1]
        return slots, self.stamps.gather(1, slots) == wanted

    def insert_prefill(self, queries: Float[Tensor, "B Hq T D"], lengths: Int[Tensor, " B"]) -> None:
        """Insert the last positions of a prefill that ends at `lengths`; their supports are built later."""
        rows, heads, capacity, dim = self.queries.shape
        queries = queries.detach()[:, :, -capacity:]
        count = queries.shape[2]
        positions = lengths[:, None] - count + torch.arange(count, device=lengths.device)  # [B, T]
        real = positions >= 0  # others are padding
        slots = positions % capacity
        wide = slots[:, None, :].expand(rows, heads, count)
        norms = torch.where(real[:, None], inverse_norm(queries), self.inverse_norms.gather(2, wide))
        self.inverse_norms.scatter_(2, wide, norms)
        deep = wide[..., None].expand(rows, heads, count, dim)
        kept = torch.where(real[:, None, :, None], queries.to(self.queries.dtype), self.queries.gather(2, deep))
        self.queries.scatter_(2, deep, kept)
        self.stamps.scatter_(1, slots, torch.where(real, positions, self.stamps.gather(1, slots)))
        self.unbuilt.scatter_(1, slots, self.unbuilt.gather(1, slots) | real)
        self.prefill_end.copy_(lengths).clamp_min_(0)
        self.has_unbuilt = True

    def insert_step(
        self,
        positions: Int[Tensor, " B"],
        query: Float[Tensor, "B Hq D"],
        inverse_norms: Float[Tensor, "B Hq"],
        support: Int[Tensor, "B Hq K"],
    ) -> None:
        """Insert the entry of one decode step."""
        rows = torch.arange(positions.shape[0], device=positions.device)
        slots = positions % self.stamps.shape[1]
        self.queries[rows, :, slots] = query.to(self.queries.dtype)
        self.inverse_norms[rows, :, slots] = inverse_norms
        self.supports[rows, :, slots] = F.pad(support, (0, self.supports.shape[3] - support.shape[2]), value=-1)
        # A sequence without a token yet is at position -1, which must not be found later.
        self.stamps[rows, slots] = torch.where(positions < 0, _EMPTY, positions)
        self.unbuilt[rows, slots] = False

    def widen(self, topk: int) -> None:
        """Make room for supports of `topk` positions."""
        missing = support_width(topk) - self.supports.shape[3]
        if missing > 0:
            with torch.inference_mode(mode=False):
                self.supports = F.pad(self.supports, (0, missing), value=-1)


def inverse_norm(queries: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape"]:
    """1/‖q‖ in float32; 0 where the norm is zero or not finite, which makes every similarity 0."""
    norms = torch.linalg.vector_norm(queries.float(), dim=-1)
    return torch.where(norms.isfinite() & (norms > 0), norms.reciprocal(), 0.0)
