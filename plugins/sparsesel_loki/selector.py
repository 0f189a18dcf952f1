"""Loki: rank all keys by their first principal components, attend exactly to the best.

"Loki: Low-rank Keys for Efficient Sparse Attention" (arXiv 2406.02542). `rank` is the paper's d, `topk` its k. With P
the first r principal components of a key-value head's keys, as columns: the support of a query head are the K
positions i with the largest (q P) · (k_i P); scores, softmax and values over it are exact, in all D components.

The components are a centred fit, but the mean is not subtracted from keys when they are ranked: it would shift all
scores of a query alike. They are those of post-rotary keys.

Components that come from the prompt are fitted by PyTorch on whatever backend, once per sequence, in the first step
that has to choose among its keys. That step waits for its device; no later one does.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention, row_topk, sparse_attention, topk_indices
from sparsesel.selector import LayerSpec, StepCost, Support, discover_and_aggregate
from sparsesel_loki.calibration import load
from sparsesel_loki.config import PROMPT, LokiConfig
from sparsesel_loki.state import LokiState


@dataclass(frozen=True)
class LokiSelector:
    """The selector; everything that changes is in `LokiState`. The module's text says how it works."""

    config: LokiConfig

    def init_state(self, layer: LayerSpec) -> LokiState:
        """State that has seen nothing, with the layer's components if a file gives them.

        Raises:
            InputError: `rank` is more than head_dim; the calibration is of another model, of other shapes or damaged.
        """
        self._check_rank(layer)
        rank = self.config.rank
        if self.config.calibration == PROMPT:
            return LokiState.empty(layer, rank, None)
        return LokiState.empty(layer, rank, load(Path(self.config.calibration)).basis(layer)[..., :rank])

    def observe_prefill(self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: LokiState, *, scale: float) -> None:
        """Take in the keys where the components are known; otherwise the first step that needs them does."""
        if state.is_fitted:
            state.record(kv)

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: LokiState, *, scale: float) -> Support:
        """The K best keys of each query head along the components; ties go to the lower index."""
        batch, num_heads, _, dim = query.shape
        topk = self.config.topk
        state.fit(kv, topk)
        if backend.current(query.device) == "triton":
            from sparsesel_loki import kernels

            state.make_room(kv)
            support = Support(*kernels.discover(topk, query, kv, state, scale=scale))
            state.recorded(kv)
            return support
        state.record(kv)
        reduced = query.float().view(batch, kv.num_heads, -1, dim) @ state.basis  # [B, Hkv, G, r]
        scores = torch.matmul(reduced, state.seen(kv.max_length).float().transpose(2, 3)).mul_(scale)
        scores = scores.view(batch, num_heads, -1)
        lengths = kv.lengths[:, None].expand(batch, num_heads)
        widest = resolve_topk(topk, kv.max_length)
        indices = topk_indices(scores, row_topk(topk, lengths), lengths, widest=widest)
        support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, num_heads)
        if state.from_prompt:
            state.counters.add("prompt_calibrated", (state.fitted > 0)[:, None].expand(batch, num_heads))
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: LokiState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support, in all D components."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: LokiState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step."""
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Of every key r numbers, K keys and values, and the components, once per key-value head.

        The heads of a group share keys and values where their supports overlap; they are counted as if they always
        did.

        Raises:
            InputError: `rank` is more than head_dim.
        """
        self._check_rank(layer)
        topk = min(resolve_topk(self.config.topk, length), length)
        rank, dim, size = self.config.rank, layer.head_dim, layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        heads = layer.batch_size * layer.num_attention_heads
        components = 4 * dim * rank  # float32
        return StepCost(
            key_bytes=kv_heads * topk * dim * size,
            value_bytes=kv_heads * topk * dim * size,
            metadata_bytes=kv_heads * (length * rank * size + components),
            score_bytes=2 * 4 * heads * length,  # float32, written and read back
            flops=2 * heads * (dim * rank + rank * length + 2 * topk * dim) + 2 * kv_heads * dim * rank,
            state_bytes=kv_heads * (length * rank * size + components) + 2 * 8 * layer.batch_size,
            attended=topk,
        )

    def _check_rank(self, layer: LayerSpec) -> None:
        if self.config.rank > layer.head_dim:
            raise InputError(
                "loki.rank",
                expected=f"at most {layer.head_dim}, the head_dim of layer {layer.layer_idx}",
                got=self.config.rank,
                remedy=f"Set for example rank={max(1, layer.head_dim // 4)}.",
            )
