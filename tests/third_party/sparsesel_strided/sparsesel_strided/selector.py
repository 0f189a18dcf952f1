"""The selector: a fixed pattern, the same for every head, that needs no scores and no state."""

from typing import Any

import torch

from sparsesel import KVView, LayerSpec, SelectorState, StepCost, Support
from sparsesel.ops import sparse_attention, topk_indices
from sparsesel.selector import discover_and_aggregate
from sparsesel_strided.config import StridedConfig


class StridedSelector:
    """The newest K/2 positions, then the newest multiples of s before them, then the newest of the rest, K in all.

    The last rule matters only while multiples of s are fewer than K/2: a budget that covers the sequence then covers
    it entirely.
    """

    def __init__(self, config: StridedConfig) -> None:
        self.config = config

    def init_state(self, layer: LayerSpec) -> SelectorState:
        """Nothing to remember."""
        return SelectorState(layer)

    def observe_prefill(self, query: torch.Tensor, kv: KVView, state: SelectorState, *, scale: float) -> None:
        """Nothing to learn from the prompt."""

    def discover(self, query: torch.Tensor, kv: KVView, state: SelectorState, *, scale: float) -> Support:
        """One support for all heads, `[B, 1, 1, K]`."""
        positions = torch.arange(kv.max_length, device=kv.device)
        newest = positions >= kv.lengths[:, None] - (self.config.topk + 1) // 2  # [B, L]
        strided = positions % self.config.stride == 0
        # One rank per position: newest first, then strided, later before earlier within each. Ranks are below 3 · L,
        # which float32 holds exactly for five million keys.
        rank = torch.where(newest, 2, strided.long()) * kv.max_length + positions
        indices = topk_indices(rank.float(), self.config.topk, kv.lengths)
        support = Support.of(indices[:, None, None, :])
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(
        self, query: torch.Tensor, kv: KVView, support: Support, state: SelectorState, *, scale: float
    ) -> torch.Tensor:
        """Softmax attention over the support."""
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(self, query: torch.Tensor, kv: KVView, state: Any, *, scale: float) -> torch.Tensor:
        """One decode step."""
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Reads the chosen keys and values once per key-value head, and nothing else."""
        attended = min(self.config.topk, length)
        row = layer.head_dim * layer.dtype.itemsize * layer.batch_size
        return StepCost(
            key_bytes=layer.num_key_value_heads * attended * row,
            value_bytes=layer.num_key_value_heads * attended * row,
            metadata_bytes=0,
            score_bytes=0,
            flops=4 * layer.batch_size * layer.num_attention_heads * attended * layer.head_dim,
            state_bytes=0,
            attended=attended,
        )
