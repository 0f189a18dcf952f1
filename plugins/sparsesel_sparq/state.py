"""What SparQ remembers: the keys once more, a component's numbers side by side, and the sum of the values."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.per_token import PerTokenState, with_room, write_tokens
from sparsesel.selector import LayerSpec

# Tokens whose values are summed apart. A crop falls back to such a boundary: a sum is never made right by
# subtraction, which would leave rounding behind, and NaN for good.
BLOCK = 64


@dataclass(kw_only=True)
class SparQState(PerTokenState):
    """State of one layer.

    Attributes:
        components: `[B, Hkv, D, C]` keys, component-major, so that r of D components are read contiguously.
        value_sum: `[B, Hkv, Dv]` float32 sum of the values at recorded positions; Dv is 0 until there are any.
        block_sums: `[B, Hkv, N, Dv]` float32, the same by blocks of `BLOCK` positions.
    """

    components: Float[Tensor, "B Hkv D C"]
    value_sum: Float[Tensor, "B Hkv Dv"]
    block_sums: Float[Tensor, "B Hkv N Dv"]

    @classmethod
    def empty(cls, layer: LayerSpec) -> "SparQState":
        """State that has seen nothing."""
        rows, heads, device = layer.batch_size, layer.num_key_value_heads, layer.device
        with torch.inference_mode(mode=False):
            return cls(
                layer=layer,
                indexed=torch.zeros(rows, dtype=torch.int64, device=device),
                components=torch.empty(rows, heads, layer.head_dim, 0, dtype=layer.dtype, device=device),
                value_sum=torch.zeros(rows, heads, 0, device=device),
                block_sums=torch.zeros(rows, heads, 0, 0, device=device),
            )

    def reset(self) -> None:
        """Forget every sequence."""
        super().reset()
        self.value_sum.zero_()
        self.block_sums.zero_()

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Fall back to the block boundary before `lengths`; what lies between is recorded again at the next step."""
        lengths = lengths.to(self.indexed.device)
        left = torch.where(lengths < self.indexed, lengths // BLOCK, self.indexed // BLOCK + 1)  # [B] whole blocks
        gone = torch.arange(self.block_sums.shape[2], device=left.device) >= left[:, None]
        self.block_sums.masked_fill_(gone[:, None, :, None], 0.0)
        kept = (lengths >= self.indexed)[:, None, None]
        self.value_sum.copy_(torch.where(kept, self.value_sum, self.block_sums.sum(2)))
        super().crop(left * BLOCK)

    def record(self, kv: KVView, *, with_values: bool) -> None:
        """Take in every token of `kv` that is not recorded yet."""
        if backend.current(kv.device) == "triton":
            from sparsesel_sparq import kernels

            self.components = with_room(self.components, kv.max_length, dim=3)
            sums = None
            if with_values:
                self._make_room(kv.max_length, kv.values.shape[3])
                sums = (self.value_sum, self.block_sums)
            kernels.append(kv, self.indexed, self.components, sums, span=BLOCK, lacking=self.lacking(kv))
        else:
            self._gather(kv, with_values=with_values)
        self.recorded(kv)

    def _gather(self, kv: KVView, *, with_values: bool) -> None:
        positions, real = self.pending(kv)
        if positions.shape[1]:
            heads = (positions.shape[0], kv.num_heads, -1)
            self.components = with_room(self.components, kv.max_length, dim=3)
            keys = kv.gather_keys(positions[:, None].expand(*heads))
            write_tokens(self.components.transpose(2, 3), positions, real, keys)
            if with_values:
                self._add_values(kv, positions.shape[1])

    def rows(self, dims: Int[Tensor, "B Hkv R"], length: int) -> Float[Tensor, "B Hkv R L"]:
        """The components `dims` of the first `length` keys: what is read to score approximately."""
        batch, heads, _ = dims.shape
        row = torch.arange(batch, device=dims.device)[:, None, None]
        head = torch.arange(heads, device=dims.device)[None, :, None]
        return self.components[..., :length][row, head, dims.long()]

    def mean_value(self, kv: KVView) -> Float[Tensor, "B Hkv Dv"]:
        """v̄, the mean of all visible values."""
        return self.value_sum / kv.lengths.clamp_min(1)[:, None, None]

    def _add_values(self, kv: KVView, count: int) -> None:
        """Add the values of up to `count` tokens from `indexed` on to the sums."""
        # One token at a time as it is, more in whole blocks: so a block is added to at most once, and the order of
        # summation is the same everywhere.
        span = 1 if count == 1 else BLOCK
        blocks = -(-(count + span - 1) // span)
        self._make_room(kv.max_length + BLOCK, kv.values.shape[3])
        first = self.indexed // span * span
        positions = first[:, None] + torch.arange(blocks * span, device=first.device)
        real = (positions >= self.indexed[:, None]) & (positions < kv.lengths[:, None])
        values = kv.gather_values(positions[:, None].expand(-1, kv.num_heads, -1)).detach().float()
        values = values.masked_fill_(~real[:, None, :, None], 0.0)
        sums = values.unflatten(2, (blocks, span)).sum(3)  # [B, Hkv, blocks, Dv]
        index = (positions[:, ::span] // BLOCK).clamp_max(self.block_sums.shape[2] - 1)
        self.block_sums.scatter_add_(2, index[:, None, :, None].expand_as(sums), sums)
        self.value_sum += sums.sum(2)

    def _make_room(self, tokens: int, channels: int) -> None:
        rows, heads, held, present = self.block_sums.shape
        needed = -(-tokens // BLOCK)
        if held >= needed and present == channels:
            return
        capacity = max(needed, held + held // 2)
        with torch.inference_mode(mode=False):
            grown = torch.zeros(rows, heads, capacity, channels, device=self.block_sums.device)
            grown[:, :, :held, :present] = self.block_sums
            self.block_sums = grown
            if not present:
                self.value_sum = torch.zeros(rows, heads, channels, device=grown.device)
