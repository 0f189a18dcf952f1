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
from typing import get_args

from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention, softmax_values, sparse_attention
from sparsesel.selector import LayerSpec, StepCost, Support
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.stages import (
    Budget,
    Level,
    Ranked,
    build_supports,
    choose_paths,
    count_step,
    rank_on_device,
    rank_on_host,
    recall,
)
from sparsesel_retopk.state import SPARE, ReTopKState, inverse_norm, support_width


@dataclass(frozen=True)
class ReTopKSelector:
    """The selector; everything that changes is in `ReTopKState`. The module's text says how it works.

    Attributes:
        config: Its configuration.
        level: How much of a step is fused on the Triton backend, see `stages.Level`; the results are the same. For
            benchmarks that build the fused path up.
    """

    config: ReTopKConfig
    level: Level = 4

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise InputError("level", expected="1 to 5", got=repr(self.level), remedy="Leave it out for the usual one.")

    def init_state(self, layer: LayerSpec) -> ReTopKState:
        """An empty cache: the first step is exact."""
        return ReTopKState.empty(layer, self.config.cache_size)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: ReTopKState, *, scale: float
    ) -> None:
        """Keep the last queries. Their supports are built at the first decode step, once for all chunks."""
        state.insert_prefill(query, kv.lengths)

    def best_similarity(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: ReTopKState
    ) -> Float[Tensor, "B Hq"]:
        """ρmax that the coming step will find, -inf without an entry; for studies, no step asks for it."""
        current = query.detach()[:, :, 0]
        slots, found = state.recent(kv.lengths - 1, self.config.cache_size)
        return recall(current, inverse_norm(current), state, slots, found, self.config).similarity

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: ReTopKState, *, scale: float) -> Support:
        """The support of every query head, by whichever path it takes; enters it into the cache."""
        if backend.current(query.device) == "triton":
            from sparsesel_retopk import step

            return step.discover(query, kv, state, self.config, self.level, scale=scale)
        return self._step(query, kv, state, scale=scale)[0]

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: ReTopKState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 Dv"]:
        """Softmax attention over the support with the current query's scores."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: ReTopKState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 Dv"]:
        """One decode step; the scores that ranked the support also weigh it."""
        if backend.current(query.device) == "triton":
            from sparsesel_retopk import step

            return step.attend(query, kv, state, self.config, self.level, scale=scale)
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
            assumes="every head reuses, with as many candidates as there can be; an exact head scores every key",
        )

    def _step(self, query: Tensor, kv: KVView, state: ReTopKState, *, scale: float) -> tuple[Support, Ranked]:
        config = self.config
        budget = Budget.of(config.topk, kv, query.shape[1])
        state.widen(budget.widest)
        if state.has_unbuilt:
            build_supports(state, kv, config, budget.widest, scale=scale)

        current = query.detach()[:, :, 0]
        norms = inverse_norm(current)
        paths, candidates = choose_paths(current, norms, kv, state, config, budget)
        rank = rank_on_host if kv.device.type == "cpu" else rank_on_device
        ranked = rank(query, kv, ~paths["reuse"], candidates, budget, scale=scale)
        state.insert_step(kv.lengths - 1, current, norms, ranked.indices)
        count_step(state, budget, paths, candidates)
        return Support.of(ranked.indices[:, :, None]), ranked
