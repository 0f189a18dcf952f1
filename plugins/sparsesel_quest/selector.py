"""Quest: score pages of keys by what their bounds allow, attend within the best pages."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention, row_topk, sparse_attention, topk_indices
from sparsesel.selector import LayerSpec, StepCost, Support, discover_and_aggregate
from sparsesel_quest.config import QuestConfig
from sparsesel_quest.state import QuestState

if TYPE_CHECKING:
    from sparsesel_quest.kernels import Pages


@dataclass(frozen=True)
class QuestSelector:
    """Page score Σ_d max(q_d·m_d, q_d·M_d) per query head; the K/P best pages, the last one always among them.

    "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774). m and M are the
    channel-wise minimum and maximum of a page's keys, so the score bounds every `q · k` within; `page_size` is P,
    `topk` the paper's token budget K. The first `dense_layers` layers attend to everything.
    """

    config: QuestConfig

    def init_state(self, layer: LayerSpec) -> QuestState:
        """State without a page."""
        return QuestState.empty(layer, self.config.page_size)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: QuestState, *, scale: float
    ) -> None:
        """Take the new keys into the bounds."""
        if not self._is_dense(state.layer):
            state.take_in(kv)

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: QuestState, *, scale: float) -> Support:
        """All keys of the best pages, per query head; ties go to the earlier page."""
        if self._is_dense(state.layer):
            support = Support.everything(kv)
        else:
            state.take_in(kv)
            if backend.current(query.device) == "triton":
                from sparsesel_quest import kernels

                indices = kernels.page_support(self._choose(query, kv, state), kv)
            else:
                indices = self._select(query, kv, state)
            support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: QuestState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: QuestState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step."""
        if backend.current(query.device) == "eager" or self._is_dense(state.layer):
            return discover_and_aggregate(self, query, kv, state, scale=scale)
        from sparsesel_quest import kernels

        state.take_in(kv)
        counters = state.counters.table(("steps", "selected", "visible"), query.shape[1], query.device)
        return kernels.page_attention(query, kv, self._choose(query, kv, state, counters), scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Two bounds per page and key-value head, then K keys and values per query head, and the new key.

        Heads of a group read the pages that they share once each; where a kernel reads a page once for the group,
        keys and values cost as little as 1/G of this.
        """
        row = layer.head_dim * layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        heads = layer.batch_size * layer.num_attention_heads
        if self._is_dense(layer):
            whole = kv_heads * length * row
            return StepCost(whole, whole, 0, 0, 4 * heads * length * layer.head_dim, 8 * layer.batch_size, length)
        page_size, topk = self.config.page_size, resolve_topk(self.config.topk, length)
        earlier, last = (length - 1) // page_size, (length - 1) % page_size + 1
        attended = min(topk, last) + page_size * min(max(0, topk - last) // page_size, earlier)
        bounds = kv_heads * 2 * (earlier + 1) * row
        return StepCost(
            key_bytes=heads * attended * row + kv_heads * row,
            value_bytes=heads * attended * row,
            metadata_bytes=bounds,
            score_bytes=2 * 4 * heads * (earlier + 1),  # float32, written and read back
            flops=4 * heads * (earlier + 1 + attended) * layer.head_dim,
            state_bytes=bounds + 8 * layer.batch_size,
            attended=attended,
        )

    def _is_dense(self, layer: LayerSpec) -> bool:
        return layer.layer_idx < self.config.dense_layers

    def _choose(self, query: Tensor, kv: KVView, state: QuestState, counters: Tensor | None = None) -> "Pages":
        """The pages of each query head, by the kernels; `_select` is the same in eager PyTorch."""
        from sparsesel_quest import kernels

        topk, page_size = self.config.topk, self.config.page_size
        bounds = (state.minima, state.maxima)
        return kernels.choose_pages(query, kv, *bounds, topk=topk, page_size=page_size, counters=counters)

    def _select(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: QuestState) -> Int[Tensor, "B Hq K"]:
        """Positions attended by each query head, ascending, padded with -1."""
        page_size, heads = self.config.page_size, query.shape[1]
        lengths = kv.lengths[:, None]  # [B, 1]
        topk = row_topk(self.config.topk, lengths)
        earlier = ((lengths - 1) // page_size).clamp_min(0)  # pages before the last one
        last = lengths - earlier * page_size  # keys of the last page
        wanted = ((topk - last) // page_size).clamp_min(0)
        widest = resolve_topk(self.config.topk, kv.max_length)
        widest = (min(widest, kv.max_length) - 1) // page_size
        scores = page_scores(query, state, state.pages(kv.max_length))
        chosen = topk_indices(scores, wanted.expand(-1, heads), earlier.expand(-1, heads), widest=widest)

        # The last page follows the chosen ones, or the latest K keys of it where there are more.
        begins = F.pad(torch.where(chosen < 0, -1, chosen * page_size), (0, 1), value=-1)
        last_begin = torch.maximum(earlier * page_size, lengths - topk)
        count = (chosen >= 0).sum(-1, keepdim=True)
        begins.scatter_(-1, count, last_begin.to(begins.dtype)[:, None].expand(-1, heads, 1))
        # A page larger than the context has no more slots than that.
        slots = torch.arange(min(page_size, kv.max_length), dtype=begins.dtype, device=kv.device)
        positions = begins[..., None] + slots
        outside = (begins < 0)[..., None] | (positions >= lengths[:, :, None, None])
        return positions.masked_fill_(outside, -1).flatten(2)


def page_scores(query: Float[Tensor, "B Hq 1 D"], state: QuestState, pages: int) -> Float[Tensor, "B Hq N"]:
    """Σ_d max(q_d·m_d, q_d·M_d) of the first `pages` pages, float32.

    As m ≤ M, the maximum is q_d·M_d where q_d is positive and q_d·m_d elsewhere: two products of matrices.
    """
    batch, kv_heads = state.minima.shape[:2]
    grouped = query.float().view(batch, kv_heads, -1, query.shape[3]).transpose(2, 3)  # [B, Hkv, D, G]
    scores = torch.matmul(state.maxima[:, :, :pages].float(), grouped.clamp_min(0))
    scores += torch.matmul(state.minima[:, :, :pages].float(), grouped.clamp_max(0))
    return scores.transpose(2, 3).reshape(batch, query.shape[1], pages)
