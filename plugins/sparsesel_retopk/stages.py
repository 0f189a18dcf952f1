"""The stages of a ReTopK decode step, in the order in which they run. See `selector.py` for the whole.

Everything keeps (batch, query head) as axes. Only where keys and values lie on the CPU, where asking a tensor for
its content costs nothing, does a stage look at which heads take which path and skip the rest; elsewhere both paths
run over all heads and nothing waits for the device.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import indexed_qk, qk_scores, row_topk, scores_at, topk_indices
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.state import ReTopKState

Level = Literal[1, 2, 3, 4, 5]
"""How much of a step in Triton is fused, as the paper builds it up; all levels give the same.

1: Every stage by itself, in PyTorch but for top-K; keys and values of candidates are gathered into tensors.
2: Keys and values are read by index where they lie.
3: Matching, choosing the path and building the candidates are one kernel.
4: So are top-K, softmax, values and the insertion into the cache.
5: These two and the scores between them are one kernel.

Exact heads go through the same kernels at every level.
"""

# Scores held at a time while the supports of a prompt's last queries are built: 64 MiB of float32.
_BUILD_SCORES = 1 << 24


@dataclass(frozen=True)
class Budget:
    """How many keys each head may attend to in this step.

    Attributes:
        topk: K, one for all or `[B, Hq]`.
        lengths: `[B, Hq]` visible keys L.
        allowed: `[B, Hq]` min(K, L).
        widest: Upper bound of `allowed`, known on the host.
    """

    topk: int | Int[Tensor, "B Hq"]
    lengths: Int[Tensor, "B Hq"]
    allowed: Int[Tensor, "B Hq"]
    widest: int

    @classmethod
    def of(cls, topk: int | str, kv: KVView, num_heads: int) -> "Budget":
        """Budget `topk` at the lengths of `kv`."""
        lengths = kv.lengths[:, None].expand(-1, num_heads)
        rows = row_topk(topk, lengths)
        allowed = lengths.clamp(max=rows) if isinstance(rows, int) else torch.minimum(lengths, rows)
        return cls(rows, lengths, allowed, min(resolve_topk(topk, kv.max_length), kv.max_length))


@dataclass(frozen=True)
class Recalled:
    """The R cached queries that are recalled for each head.

    Attributes:
        slots: `[B, Hq, R]` their slots in the ring.
        usable: `[B, Hq, R]` False where fewer than R entries are cached.
        similarity: `[B, Hq]` ρmax, the best of their similarities to the current query; -inf without any.
    """

    slots: Int[Tensor, "B Hq R"]
    usable: Bool[Tensor, "B Hq R"]
    similarity: Float[Tensor, "B Hq"]


@dataclass(frozen=True)
class Candidates:
    """A, the keys that a reusing head ranks.

    Attributes:
        indices: `[B, Hq, M]` int32 logical positions, unique, ascending, padded with -1.
        counts: `[B, Hq]` |A|; 0 for the heads that are exact already.
    """

    indices: Int[Tensor, "B Hq M"]
    counts: Int[Tensor, "B Hq"]


@dataclass(frozen=True)
class Ranked:
    """Supports and the current query's scores of them.

    Attributes:
        indices: `[B, Hq, K]` (or any rows) int32 logical positions, ascending, padded with -1.
        scores: float32, -inf at the padding.
    """

    indices: Int[Tensor, "*rows K"]
    scores: Float[Tensor, "*rows K"]


def build_supports(state: ReTopKState, kv: KVView, config: ReTopKConfig, widest: int, *, scale: float) -> None:
    """Compute the supports of the prompt entries within reach: each query's causal exact top min(K, p + 1).

    Supports of decode steps are left alone. One batched product, in pieces that bound its memory.
    """
    slots, found = state.recent(kv.lengths - 1, config.cache_size)
    wanted = found & state.unbuilt.gather(1, slots)
    state.has_unbuilt = False
    if kv.device.type == "cpu":
        columns = wanted.any(0)
        slots, wanted = slots[:, columns], wanted[:, columns]
    rows, num_heads, _, dim = state.queries.shape
    keys = kv.logical_keys().float()
    piece = max(1, _BUILD_SCORES // (rows * num_heads * kv.max_length))
    for some, due in zip(slots.split(piece, dim=1), wanted.split(piece, dim=1), strict=True):
        index = some[:, None, :, None].expand(-1, num_heads, -1, -1)  # [B, Hq, n, 1]
        queries = state.queries.gather(2, index.expand(-1, -1, -1, dim)).float()
        scores = torch.matmul(queries.view(rows, kv.num_heads, -1, dim), keys.transpose(2, 3)).mul_(scale)
        scores = scores.view(rows, num_heads, -1, kv.max_length)
        lengths = torch.where(due, state.stamps.gather(1, some) + 1, 0)[:, None].expand(scores.shape[:3])
        built = topk_indices(scores, row_topk(config.topk, lengths), lengths, widest=widest)
        built = F.pad(built, (0, state.supports.shape[3] - built.shape[3]), value=-1)
        index = index.expand(-1, -1, -1, state.supports.shape[3])
        built = torch.where(due[:, None, :, None], built, state.supports.gather(2, index))
        state.supports.scatter_(2, index, built)
        state.unbuilt.scatter_(1, some, state.unbuilt.gather(1, some) & ~due)


def recall(
    current: Float[Tensor, "B Hq D"],
    norms: Float[Tensor, "B Hq"],
    state: ReTopKState,
    slots: Int[Tensor, "B C"],
    found: Bool[Tensor, "B C"],
    config: ReTopKConfig,
) -> Recalled:
    """Choose R of the cached queries: the most similar, or the latest; ties go to the newest.

    Args:
        current: Queries, not normalised.
        norms: Their `inverse_norm`.
        state: The ring.
        slots: Its entries, newest first.
        found: Which of them are there.
        config: Says R and what is recalled.
    """
    normalised = current.float() * norms[..., None]
    # ρ_c = q̄ · q̄_c, not as a matrix product: that may round equal entries differently, and they must tie.
    products = (state.queries * normalised[:, :, None]).sum(-1).mul_(state.inverse_norms)  # [B, Hq, S]
    newest_first = slots[:, None].expand(-1, current.shape[1], -1)
    # A query without a finite norm gives NaN here; its similarity to anything is 0.
    similarities = products.gather(2, newest_first).nan_to_num_(nan=0.0)
    similarities = similarities.masked_fill_(~found[:, None], float("-inf"))
    # The latest are recalled by making all alike.
    merit = similarities if config.retrieval == "similarity" else similarities.clamp(max=-2.0)
    chosen = merit.sort(dim=-1, descending=True, stable=True).indices[..., : config.recall_size]
    similarities = similarities.gather(2, chosen)
    return Recalled(newest_first.gather(2, chosen), similarities.isfinite(), similarities.amax(-1))


def is_refresh(steps: Int[Tensor, " B"], config: ReTopKConfig) -> Bool[Tensor, " B"]:
    """Whether t_dec is one of Tr, 2·Tr, …"""
    if config.refresh_interval == 0:
        return torch.zeros_like(steps, dtype=torch.bool)
    return (steps > 0) & (steps % config.refresh_interval == 0)


def falls_back(similarity: Float[Tensor, "B Hq"], num_kv_heads: int, config: ReTopKConfig) -> Bool[Tensor, "B Hq"]:
    """Whether ρmax is not at least tau: per head, or for all heads of a key-value head together."""
    if not config.fallback:
        return torch.zeros_like(similarity, dtype=torch.bool)
    # Rounding may take a cosine past 1, which must not reach a tau above 1.
    similarity = similarity.clamp(max=1.0)
    if config.fallback_scope == "head":
        return ~(similarity >= config.similarity_threshold)
    group = similarity.unflatten(1, (num_kv_heads, -1))
    decisive = group.amin(-1, True) if config.fallback_scope == "group-any" else group.mean(-1, True)
    return (~(decisive >= config.similarity_threshold)).expand_as(group).flatten(1)


def choose_paths(
    current: Float[Tensor, "B Hq D"],
    norms: Float[Tensor, "B Hq"],
    kv: KVView,
    state: ReTopKState,
    config: ReTopKConfig,
    budget: Budget,
    *,
    all_candidates: bool = False,
) -> tuple[dict[str, Bool[Tensor, "B Hq"]], Candidates]:
    """Which way each head goes: exactly one of `refresh`, `cold`, `fallback`, `underfull` (all exact) and `reuse`.

    Args:
        current: Queries, not normalised.
        norms: Their `inverse_norm`.
        kv: Keys and values.
        state: The ring.
        config: Says who is exact.
        budget: Of this step.
        all_candidates: Whether A is wanted of exact heads too.
    """
    positions = kv.lengths - 1
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
    heads = torch.ones_like(exact) if all_candidates else ~exact
    candidates = gather_candidates(state, recalled, kv, heads, budget.widest, config.window_size)
    paths["underfull"] = ~exact & (candidates.counts < budget.allowed)
    paths["reuse"] = ~(exact | paths["underfull"])
    return paths, candidates


def count_step(
    state: ReTopKState, budget: Budget, paths: dict[str, Bool[Tensor, "B Hq"]], candidates: Candidates
) -> None:
    """Count one decode step."""
    reuse = paths["reuse"]
    steps = {"steps": torch.ones_like(reuse), "selected": budget.allowed, "visible": budget.lengths}
    counted = steps | paths | {"exact": ~reuse, "candidates": candidates.counts * reuse}
    for name, values in counted.items():
        state.counters.add(name, values)


def gather_candidates(
    state: ReTopKState,
    recalled: Recalled,
    kv: KVView,
    heads: Bool[Tensor, "B Hq"],
    widest: int,
    window_size: int,
) -> Candidates:
    """A = unique(union of the recalled supports ∪ last W positions) for the given heads; never truncated."""
    rows, num_heads, slots, width = state.supports.shape
    on_host = kv.device.type == "cpu"
    if on_host and not bool(heads.any()):
        return Candidates(
            torch.empty(rows, num_heads, 0, dtype=torch.int32), torch.zeros(rows, num_heads, dtype=torch.int64)
        )
    first_slot = torch.arange(0, rows * num_heads * slots, slots, device=kv.device).view(rows, num_heads, 1)
    supports = state.supports.view(-1, width).index_select(0, (first_slot + recalled.slots).flatten())
    supports = supports.view(rows, num_heads, -1, width)[..., :widest]
    supports = supports.masked_fill(~recalled.usable[..., None], -1).flatten(2)
    window = kv.lengths[:, None, None] - torch.arange(1, window_size + 1, device=kv.device)
    window = window.to(torch.int32).expand(-1, num_heads, -1)  # below 0 in a short sequence, and dropped like -1
    merged = torch.cat([supports, window], dim=-1).sort(dim=-1).values
    first = (merged >= 0) & heads[..., None]
    first[..., 1:] &= merged[..., 1:] != merged[..., :-1]
    counts = first.sum(-1)
    # As many columns as there can be candidates, or on the host as there are.
    most = int(counts.max()) if on_host else min(merged.shape[-1], kv.max_length)
    columns = torch.where(first, first.cumsum(-1) - 1, most)  # the rest goes to a column that is cut off
    packed = torch.full((rows, num_heads, most + 1), -1, dtype=torch.int32, device=kv.device)
    return Candidates(packed.scatter_(-1, columns, merged)[..., :most], counts)


def rank_on_host(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    exact: Bool[Tensor, "B Hq"],
    candidates: Candidates,
    budget: Budget,
    *,
    scale: float,
) -> Ranked:
    """Supports of all heads, each by its own path; only the key-value heads of exact heads are scanned."""
    if not bool(exact.any()):
        return rank_candidates(query, kv, candidates, budget, scale=scale)
    scanned = scan_heads(query, kv, exact, budget, scale=scale)
    if bool(exact.all()):
        shape = (*exact.shape, -1)
        return Ranked(scanned.indices.view(shape), scanned.scores.view(shape))
    ranked = rank_candidates(query, kv, candidates, budget, scale=scale)
    ranked.indices[exact] = scanned.indices
    ranked.scores[exact] = scanned.scores
    return ranked


def rank_on_device(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    exact: Bool[Tensor, "B Hq"],
    candidates: Candidates,
    budget: Budget,
    *,
    scale: float,
) -> Ranked:
    """Supports of all heads by both paths, of which each head keeps its own; nothing waits for the device."""
    recalled = rank_candidates(query, kv, candidates, budget, scale=scale)
    scanned = choose(qk_scores(query, kv, scale=scale), budget.topk, budget.lengths, budget.widest)
    return Ranked(
        torch.where(exact[..., None], scanned.indices, recalled.indices),
        torch.where(exact[..., None], scanned.scores, recalled.scores),
    )


def rank_candidates(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, candidates: Candidates, budget: Budget, *, scale: float
) -> Ranked:
    """TopK(A, K) by the current query's scores."""
    return best_candidates(indexed_qk(query, kv, candidates.indices, scale=scale), candidates, budget)


def best_candidates(scores: Float[Tensor, "B Hq M"], candidates: Candidates, budget: Budget) -> Ranked:
    """TopK(A, K) by these scores."""
    # Candidates ascend, so ties that go to the lower column go to the lower position.
    columns = choose(scores, budget.topk, candidates.counts, budget.widest)
    indices = candidates.indices.gather(-1, columns.indices.clamp_min(0).long())
    indices = indices.masked_fill_(columns.indices < 0, -1)
    missing = (0, budget.widest - indices.shape[-1])
    return Ranked(F.pad(indices, missing, value=-1), F.pad(columns.scores, missing, value=float("-inf")))


def scan_heads(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, heads: Bool[Tensor, "B Hq"], budget: Budget, *, scale: float
) -> Ranked:
    """Exact Top-K of the given heads alone, `[N, K]`; each key-value head concerned is read once."""
    keys = kv.logical_keys()
    group = query.shape[1] // kv.num_heads
    scores = []
    for (row, kv_head), members in groupby(heads.nonzero().tolist(), key=lambda pair: (pair[0], pair[1] // group)):
        queries = query[row, [head for _, head in members], 0].float()  # [g, D]
        scores.append(torch.matmul(keys[row, kv_head].float(), queries.T).T)
    topk = budget.topk if isinstance(budget.topk, int) else budget.topk[heads]
    return choose(torch.cat(scores).mul_(scale), topk, budget.lengths[heads], budget.widest)


def choose(
    scores: Float[Tensor, "*rows L"], topk: int | Int[Tensor, "*rows"], lengths: Int[Tensor, "*rows"], widest: int
) -> Ranked:
    """The K best columns of each row and their scores."""
    indices = topk_indices(scores, topk, lengths, widest=widest)
    return Ranked(indices, scores_at(scores, indices))
