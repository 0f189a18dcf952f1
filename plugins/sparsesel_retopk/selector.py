"""ReTopK: recall the supports of similar past queries, rank only what they hold.

"Recall Before You Rank" (arXiv 2607.27692). `topk` is the paper's K, `cache_size` C, `window_size` W, `recall_size`
R, `similarity_threshold` tau, `refresh_interval` Tr; in the paper W equals C.

A query head is exact in a step for one of four reasons, the first that applies:

- *refresh*: t_dec, the steps since the last prefill (0 for the first), is a positive multiple of Tr;
- *cold*: its cache holds no entry;
- *fallback*: the best cosine similarity of a recalled query to the current one is not at least tau;
- *underfull*: the recalled supports and the last W positions together hold fewer than min(K, L) keys.

Otherwise it reuses: A, the union of the recalled supports and the last W positions, is scored exactly, and its K
best keys are the support. Positions are recalled, never scores, weights or outputs. Whichever path it took, the
query and its support then enter the cache.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import dense_attention, softmax_values, sparse_attention
from sparsesel.selector import LayerSpec, StepCost, Support
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.stages import (
    Budget,
    Ranked,
    build_supports,
    falls_back,
    gather_candidates,
    is_refresh,
    rank_on_device,
    rank_on_host,
    recall,
)
from sparsesel_retopk.state import SPARE, ReTopKState, inverse_norm, support_width


@dataclass(frozen=True)
class ReTopKSelector:
    """The selector; everything that changes is in `ReTopKState`. The module's text says how it works."""

    config: ReTopKConfig

    def init_state(self, layer: LayerSpec) -> ReTopKState:
        """An empty cache: the first step is exact."""
        return ReTopKState.empty(layer, self.config.cache_size)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: ReTopKState, *, scale: float
    ) -> None:
        """Keep the last queries. Their supports are built at the first decode step, once for all chunks."""
        state.insert_prefill(query, kv.lengths)

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: ReTopKState, *, scale: float) -> Support:
        """The support of every query head, by whichever path it takes; enters it into the cache."""
        return self._step(query, kv, state, scale=scale)[0]

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: ReTopKState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support with the current query's scores."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: ReTopKState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step; the scores that ranked the support also weigh it."""
        _, ranked = self._step(query, kv, state, scale=scale)
        return softmax_values(ranked.scores, kv, ranked.indices).to(query.dtype)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """A reuse step with as many candidates as there can be, M = min(R·K + W, L).

        Per query head it reads C queries, R supports, M keys and K values; heads of a group are counted apart.
        """
        config = self.config
        topk = min(resolve_topk(config.topk, length), length)
        candidates = min(config.recall_size * topk + config.window_size, length)
        heads = layer.batch_size * layer.num_attention_heads
        row = layer.head_dim * layer.dtype.itemsize
        entry = row + 4 + 4 * support_width(topk)  # query, norm and support, per head
        stamp = 8 + 1  # position and flag, per sequence
        slots = config.cache_size + SPARE
        return StepCost(
            key_bytes=heads * candidates * row,
            value_bytes=heads * topk * row,
            metadata_bytes=heads * (config.cache_size * (row + 4) + config.recall_size * 4 * topk)
            + layer.batch_size * config.cache_size * stamp,
            score_bytes=2 * 4 * heads * candidates,  # float32, written and read back
            flops=2 * heads * (config.cache_size + candidates + topk) * layer.head_dim,
            state_bytes=heads * slots * entry + layer.batch_size * (slots * stamp + 8),
            attended=topk,
        )

    def _step(self, query: Tensor, kv: KVView, state: ReTopKState, *, scale: float) -> tuple[Support, Ranked]:
        config = self.config
        budget = Budget.of(config.topk, kv, query.shape[1])
        state.widen(budget.widest)
        if state.has_unbuilt:
            build_supports(state, kv, config, budget.widest, scale=scale)

        positions = kv.lengths - 1
        current = query.detach()[:, :, 0]
        norms = inverse_norm(current)
        slots, found = state.recent(positions, config.cache_size)
        recalled = recall(current, norms, state, slots, found, config)

        paths = {
            "refresh": is_refresh(positions - state.prefill_end, config)[:, None],
            "cold": ~found.any(1)[:, None],
            "fallback": falls_back(recalled.similarity, kv.num_heads, config),
        }
        exact = torch.zeros_like(recalled.similarity, dtype=torch.bool)
        for reason, applies in paths.items():
            paths[reason] = applies & ~exact
            exact = exact | applies
        candidates = gather_candidates(state, recalled, kv, ~exact, budget.widest, config.window_size)
        paths["underfull"] = ~exact & (candidates.counts < budget.allowed)
        exact = exact | paths["underfull"]
        reuse = ~exact

        rank = rank_on_host if kv.device.type == "cpu" else rank_on_device
        ranked = rank(query, kv, exact, candidates, budget, scale=scale)
        state.insert_step(positions, current, norms, ranked.indices)

        support = Support.of(ranked.indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        for name, happened in (paths | {"exact": exact, "reuse": reuse}).items():
            state.counters.add(name, happened)
        state.counters.add("candidates", candidates.counts * reuse)
        return support, ranked
