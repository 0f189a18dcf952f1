"""TokenSelect: the first and the last tokens, and between them those that all heads together give most weight."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention, qk_scores, row_topk, sparse_attention, topk_indices
from sparsesel.selector import LayerSpec, StepCost, Support, discover_and_aggregate
from sparsesel_tokenselect.config import TokenSelectConfig
from sparsesel_tokenselect.state import STEPS, TokenSelectState, selection_width


@dataclass(frozen=True)
class Parts:
    """How many tokens of each kind make up a sequence's budget, min(K, L).

    Attributes:
        first: `[B]` sinks.
        selected: `[B]` tokens between the first and the last.
        last: `[B]` recent tokens, the current one included.
        widest: Upper bound of `selected`, known on the host.
    """

    first: Int[Tensor, " B"]
    selected: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    widest: int

    @classmethod
    def of(cls, config: TokenSelectConfig, kv: KVView) -> "Parts":
        """The parts at the lengths of `kv`; where a budget is too small for all, recent tokens come first."""
        topk = row_topk(config.topk, kv.lengths)
        budget = kv.lengths.clamp(max=topk) if isinstance(topk, int) else torch.minimum(kv.lengths, topk)
        last = budget.clamp(max=config.local_size)
        first = (budget - last).clamp(max=config.sink_size)
        return cls(first, budget - last - first, last, config.selected(kv.max_length))


@dataclass(frozen=True)
class TokenSelectSelector:
    """One set for all heads of a layer: `sink_size` first tokens, `local_size` last ones, and between them a selection.

    "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic Token-Level KV Cache
    Selection" (arXiv 2411.02886). Each head's softmax over the tokens in between is its vote; the tokens with the
    highest sums of votes are selected, ties going to the earlier one. A *hit* uses the last selection again: all heads'
    queries, put together, have cosine similarity of at least `similarity_threshold` to those of the step that made
    it, and it holds as many tokens as the budget asks for. Anything else is a *miss* and selects.
    """

    config: TokenSelectConfig

    def init_state(self, layer: LayerSpec) -> TokenSelectState:
        """State without a selection: the first step is a miss."""
        return TokenSelectState.empty(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: TokenSelectState, *, scale: float
    ) -> None:
        """Nothing to remember: the first step after a prefill is a miss."""

    def discover(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: TokenSelectState, *, scale: float
    ) -> Support:
        """First, selected and last tokens, the same for all heads."""
        state.widen(self.config.selected(kv.max_length))
        if backend.current(query.device) == "triton":
            from sparsesel_tokenselect import kernels

            return Support(*kernels.discover(self.config, query, kv, state, scale=scale))
        parts = Parts.of(self.config, kv)
        positions, current = kv.lengths - 1, query.detach()[:, :, 0]
        chooser, selected, found = state.before(positions)
        is_near = similarity(current, chooser) >= self.config.similarity_threshold
        hit = found & is_near & ((selected >= 0).sum(-1) == parts.selected)
        selected = selected[:, : parts.widest]
        # Only on the CPU does looking whether any sequence has to select cost nothing.
        if kv.device.type != "cpu" or not bool(hit.all()):
            selected = torch.where(hit[:, None], selected, self._select(query, kv, parts, scale=scale))
        state.insert(positions, torch.where(hit[:, None, None], chooser, current), selected)

        support = Support.of(self._merged(selected, parts, kv)[:, None, None])
        state.counters.add_step(support, kv, query.shape[1])
        for name, happened in (("hit", hit), ("miss", ~hit)):
            state.counters.add(name, happened[:, None].expand(-1, query.shape[1]))
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: TokenSelectState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: TokenSelectState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step."""
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """A hit: K keys and values per key-value head, the last selection and the query that made it.

        A miss reads every key besides, and a score per key and query head.
        """
        topk = min(resolve_topk(self.config.topk, length), length)
        selected = self.config.selected(length)
        row = layer.head_dim * layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        heads = layer.batch_size * layer.num_attention_heads
        slot = layer.num_attention_heads * row + 8  # query and stamp
        return StepCost(
            key_bytes=kv_heads * topk * row,
            value_bytes=kv_heads * topk * row,
            metadata_bytes=layer.batch_size * (slot + 4 * selected),
            score_bytes=0,
            flops=2 * heads * (1 + 2 * topk) * layer.head_dim,
            state_bytes=layer.batch_size * STEPS * (slot + 4 * selection_width(selected)),
            attended=topk,
            assumes="a hit: the query is like the one that made the last selection; a miss scores every key",
        )

    def _select(self, query: Tensor, kv: KVView, parts: Parts, *, scale: float) -> Int[Tensor, "B K"]:
        """The tokens between first and last with the highest votes, ascending, padded with -1."""
        # Where a sequence selects anything, its first and last tokens are complete, so what lies between begins here.
        begin, end = self.config.sink_size, kv.max_length - self.config.local_size
        scores = qk_scores(query, kv, scale=scale)[:, :, begin : max(begin, end)]
        lengths = (kv.lengths - begin - self.config.local_size).clamp_min(0)
        votes = soft_vote(scores, torch.arange(scores.shape[2], device=kv.device) < lengths[:, None])
        chosen = topk_indices(votes, parts.selected, lengths, widest=parts.widest)
        return torch.where(chosen < 0, -1, chosen + begin)

    def _merged(self, selected: Int[Tensor, "B K"], parts: Parts, kv: KVView) -> Int[Tensor, "B N"]:
        """First, selected and last tokens in one ascending list, padded with -1."""
        nowhere = kv.max_length  # sorts behind everything
        first = torch.arange(min(self.config.sink_size, kv.max_length), device=kv.device)
        first = torch.where(first < parts.first[:, None], first, nowhere)
        back = torch.arange(min(self.config.local_size, kv.max_length), device=kv.device)
        last = torch.where(back < parts.last[:, None], kv.lengths[:, None] - 1 - back, nowhere)
        merged = torch.cat([first, torch.where(selected < 0, nowhere, selected), last], dim=1).sort(dim=1).values
        merged = merged[:, : min(resolve_topk(self.config.topk, kv.max_length), kv.max_length)]
        return merged.masked_fill_(merged == nowhere, -1).to(torch.int32)


def similarity(one: Float[Tensor, "B Hq D"], other: Float[Tensor, "B Hq D"]) -> Float[Tensor, " B"]:
    """Cosine similarity of the queries of all heads put together, float32; 0 where a norm is zero or not finite."""
    first, second = _shrunk(one), _shrunk(other)
    norms = torch.linalg.vector_norm(first, dim=1) * torch.linalg.vector_norm(second, dim=1)
    cosine = (first * second).sum(1) / norms
    # Rounding may take it past 1, which must not reach a threshold above 1.
    return torch.where(norms.isfinite() & (norms > 0), cosine, 0.0).clamp(max=1.0)


def _shrunk(query: Float[Tensor, "B Hq D"]) -> Float[Tensor, "B N"]:
    """All numbers over the power of two at the largest, which rounds none of them: their squares do not overflow."""
    numbers = query.float().flatten(1)
    exponent = numbers.abs().amax(1, keepdim=True).frexp().exponent
    return numbers.ldexp(-exponent.clamp(-126, 126))


def soft_vote(scores: Float[Tensor, "B Hq N"], counts: Bool[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Sum over heads of each head's softmax over the columns that count.

    A score that is NaN counts as -inf, and a head whose softmax is not defined casts no vote.
    """
    scores = scores.masked_fill(scores.isnan() | ~counts[:, None], float("-inf"))
    return scores.softmax(dim=-1).nan_to_num_(nan=0.0).sum(1)
