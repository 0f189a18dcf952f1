"""StreamingLLM: attend to the first tokens and the most recent ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention, indexed_qk, row_topk, softmax_values, sparse_attention
from sparsesel.rotary import Rotary
from sparsesel.selector import LayerSpec, SelectorState, StepCost, Support, discover_and_aggregate
from sparsesel_streaming_llm.config import StreamingLLMConfig


@dataclass(frozen=True)
class StreamingLLMSelector:
    """The first S positions and the last K - S, the current one included; one set for all heads of a layer.

    "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). `sink_size` is S, `topk` the whole
    cache of the paper. It remembers nothing.

    With `positions="cache"` the kept tokens count as positions 0 … K - 1. Distances within the window stay what they
    are, so it is scored as it is; the sinks are scored by the query rotated back from position L - 1 to K - 1.
    """

    config: StreamingLLMConfig

    def init_state(self, layer: LayerSpec) -> SelectorState:
        """Empty state.

        Raises:
            InputError: Positions within the cache are asked for, and the layer's rotary embedding is not known.
        """
        if self.config.positions == "cache" and layer.rotary is None:
            raise InputError(
                "streaming_llm.positions",
                expected=f'"original", as the rotary embedding of layer {layer.layer_idx} is not known',
                got=repr(self.config.positions),
                remedy="Set positions=original, or use a model of a family whose rotary embedding is known.",
            )
        return SelectorState(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> None:
        """Nothing to remember."""

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float) -> Support:
        """The first positions and the last, by length alone."""
        budget, sinks = self._budget(kv)
        slots = torch.arange(min(resolve_topk(self.config.topk, kv.max_length), kv.max_length), device=kv.device)
        recent = kv.lengths[:, None] - budget + slots  # slot S holds position L - (K - S)
        indices = torch.where(slots < sinks, slots, recent).masked_fill_(slots >= budget, -1)
        support = Support.of(indices.to(torch.int32)[:, None, None])
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support, the sinks at the distance that `positions` says."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        rotary = self._rotary(state)
        if rotary is None:
            return sparse_attention(query, kv, support.indices, scale=scale)
        budget, sinks = self._budget(kv)
        indices = support.indices[:, :, 0]  # [B, H, K]
        scores = indexed_qk(query, kv, indices, scale=scale)
        # Sinks come first in an ascending support.
        back = rotary.rotate(query, budget[:, 0] - kv.lengths)
        near = indexed_qk(back, kv, indices[..., : self.config.sink_size], scale=scale)
        first = scores[..., : near.shape[2]]
        is_sink = torch.arange(near.shape[2], device=kv.device) < sinks[:, None]
        scores = torch.cat([torch.where(is_sink, near, first), scores[..., near.shape[2] :]], dim=-1)
        return softmax_values(scores, kv, indices).to(query.dtype)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SelectorState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step."""
        if backend.current(query.device) == "eager":
            return discover_and_aggregate(self, query, kv, state, scale=scale)
        from sparsesel_streaming_llm import kernels

        return kernels.sink_window_attention(
            query,
            kv,
            topk=self.config.topk,
            sink_size=self.config.sink_size,
            scale=scale,
            rotary=self._rotary(state),
            counters=state.counters.table(("steps", "selected", "visible"), query.shape[1], query.device),
        )

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """K keys and K values per key-value head, whatever the query that scores them."""
        topk = min(resolve_topk(self.config.topk, length), length)
        row = layer.head_dim * layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        return StepCost(
            key_bytes=kv_heads * topk * row,
            value_bytes=kv_heads * topk * row,
            metadata_bytes=0,
            score_bytes=0,
            flops=2 * layer.batch_size * layer.num_attention_heads * 2 * topk * layer.head_dim,
            state_bytes=0,
            attended=topk,
        )

    def _rotary(self, state: SelectorState) -> Rotary | None:
        """What turns the query that sinks are scored by, where it is another one."""
        return state.layer.rotary if self.config.positions == "cache" and self.config.sink_size else None

    def _budget(self, kv: KVView) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B 1"]]:
        """Keys attended by each sequence, min(K, L), and how many of them are sinks."""
        lengths = kv.lengths[:, None]
        topk = row_topk(self.config.topk, lengths)
        budget = lengths.clamp(max=topk) if isinstance(topk, int) else torch.minimum(lengths, topk)
        return budget, (budget - 1).clamp(0, self.config.sink_size)
