"""What Quest remembers: the bounds of every page of keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.per_token import PerTokenState
from sparsesel.selector import LayerSpec

# Tokens taken into the bounds at a time, which limits the memory that a long prompt needs.
_CHUNK = 8192


@dataclass(kw_only=True)
class QuestState(PerTokenState):
    """Channel-wise minima and maxima of the keys of each page, by logical position: page = position // P.

    A page without keys has minimum +inf and maximum -inf, so that taking keys in, in any order and more than once,
    is all there is to an update.

    Attributes:
        page_size: P.
        minima: `[B, Hkv, N, D]`, in the type of the keys; N pages, with room to grow.
        maxima: Likewise.
    """

    page_size: int
    minima: Float[Tensor, "B Hkv N D"]
    maxima: Float[Tensor, "B Hkv N D"]

    @classmethod
    def empty(cls, layer: LayerSpec, page_size: int) -> "QuestState":
        """State that has seen nothing."""
        shape = (layer.batch_size, layer.num_key_value_heads, 0, layer.head_dim)
        with torch.inference_mode(mode=False):
            return cls(
                layer=layer,
                page_size=page_size,
                indexed=torch.zeros(layer.batch_size, dtype=torch.int64, device=layer.device),
                minima=torch.zeros(shape, dtype=layer.dtype, device=layer.device),
                maxima=torch.zeros(shape, dtype=layer.dtype, device=layer.device),
            )

    def pages(self, length: int) -> int:
        """Pages of `length` tokens, the last perhaps partial."""
        return -(-length // self.page_size)

    def take_in(self, kv: KVView) -> None:
        """Bring the bounds up to `kv`: in steady decoding one key, whatever the length."""
        self.minima, self.maxima = (
            self._with_room(bounds, self.pages(kv.max_length), empty)
            for bounds, empty in ((self.minima, torch.inf), (self.maxima, -torch.inf))
        )
        if backend.current(kv.device) == "triton":
            from sparsesel_quest import kernels

            bounds, lacking = (self.minima, self.maxima), self.lacking(kv)
            kernels.update_bounds(kv, self.indexed, *bounds, page_size=self.page_size, lacking=lacking)
        else:
            self._scatter(kv)
        self.recorded(kv)

    def _scatter(self, kv: KVView) -> None:
        rows, heads, _, dim = self.minima.shape
        for positions, real in zip(*(part.split(_CHUNK, dim=1) for part in self.pending(kv)), strict=True):
            keys = kv.gather_keys(positions[:, None].expand(-1, heads, -1))
            # Infinities would make 0 * inf of a product that has nothing to do with them.
            keys = keys.detach().nan_to_num(nan=torch.nan)
            pages = torch.where(real, positions // self.page_size, 0)  # those that are not real leave it as it is
            index = pages[:, None, :, None].expand(rows, heads, -1, dim)
            absent = ~real[:, None, :, None]
            self.minima.scatter_reduce_(2, index, keys.masked_fill(absent, torch.inf), "amin")
            self.maxima.scatter_reduce_(2, index, keys.masked_fill(absent, -torch.inf), "amax")

    def reset(self) -> None:
        """Forget every sequence."""
        super().reset()
        self.minima.fill_(torch.inf)
        self.maxima.fill_(-torch.inf)

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Forget the bounds of the pages that are touched; what is left of the first is taken in again."""
        whole = lengths.to(self.indexed.device) // self.page_size  # pages that stay as they are
        super().crop(whole * self.page_size)
        gone = torch.arange(self.minima.shape[2], device=whole.device) >= whole[:, None]
        self.minima.masked_fill_(gone[:, None, :, None], torch.inf)
        self.maxima.masked_fill_(gone[:, None, :, None], -torch.inf)

    def _with_room(self, bounds: Tensor, pages: int, empty: float) -> Tensor:
        """`bounds`, grown by half at least where it cannot hold that many pages."""
        held = bounds.shape[2]
        if held >= pages:
            return bounds
        shape = (*bounds.shape[:2], max(pages, held + held // 2), bounds.shape[3])
        # Not an inference tensor even under inference_mode, so that later steps may write outside of it.
        with torch.inference_mode(mode=False):
            grown = torch.full(shape, empty, dtype=bounds.dtype, device=bounds.device)
            grown[:, :, :held] = bounds
        return grown
