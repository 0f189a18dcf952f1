"""Exact Top-K: score every key, attend to the K best."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import (
    backend,
    dense_attention,
    qk_scores,
    row_topk,
    scores_at,
    softmax_values,
    sparse_attention,
    topk_indices,
)
from sparsesel.selector import LayerSpec, SelectorState, StepCost, Support
from sparsesel_exact_topk.config import ExactTopKConfig


@dataclass(frozen=True)
class ExactTopKSelector:
    """S = TopK_i(e_i, K) per query head, `e_i = q · k_i * scale` over all L visible keys; softmax over S alone.

    What choosing K keys by their scores can reach at best, and the baseline "Exact Top-K" of ReTopK
    (arXiv 2607.27692); `topk` is the paper's K. It remembers nothing.
    """

    config: ExactTopKConfig

    def init_state(self, layer: LayerSpec) -> SelectorState:
        """Empty state."""
        return SelectorState(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> None:
        """Nothing to remember."""

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float) -> Support:
        """The K best keys of each query head; ties go to the lower index."""
        if backend.current(query.device) == "eager":
            return self._discover(query, kv, state, scale=scale)[0]
        from sparsesel_exact_topk import kernels

        indices, _ = kernels.best_keys(query, kv, self.config.topk, state.counters, scale=scale)
        return Support.of(indices[:, :, None])

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step; the scores that chose the support also weigh it."""
        if backend.current(query.device) == "triton":
            from sparsesel_exact_topk import kernels

            return kernels.attend(query, kv, self.config.topk, state.counters, scale=scale)
        _, indices, scores = self._discover(query, kv, state, scale=scale)
        return softmax_values(scores, kv, indices).to(query.dtype)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Every key once per key-value head, K values of each, and a score per key and query head.

        The heads of a group share values where their supports overlap; they are counted as if they always did.
        """
        topk = min(resolve_topk(self.config.topk, length), length)
        row = layer.head_dim * layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        heads = layer.batch_size * layer.num_attention_heads
        return StepCost(
            key_bytes=kv_heads * length * row,
            value_bytes=kv_heads * topk * row,
            metadata_bytes=0,
            score_bytes=2 * 4 * heads * length,  # float32, written and read back
            flops=2 * heads * (length + topk) * layer.head_dim,
            state_bytes=0,
            attended=topk,
        )

    def _discover(
        self, query: Tensor, kv: KVView, state: SelectorState, *, scale: float
    ) -> tuple[Support, Tensor, Tensor]:
        """The support, its indices `[B, Hq, K]` and the scores at them."""
        scores = qk_scores(query, kv, scale=scale)
        lengths = kv.lengths[:, None].expand(scores.shape[:2])
        topk = row_topk(self.config.topk, lengths)
        indices = topk_indices(scores, topk, lengths, widest=resolve_topk(self.config.topk, kv.max_length))
        support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        state.counters.add("exact", torch.ones_like(lengths))
        return support, indices, scores_at(scores, indices)
