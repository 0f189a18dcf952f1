"""Every operation in eager PyTorch: the specification that other backends are tested against.

Scores are float32 whatever the type of queries and keys, so that bfloat16 rounding neither reorders nor ties them.
NaN scores rank as -inf. Ties go to the lower index. On a GPU nothing here waits on the host.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView


def qk_scores(query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float) -> Float[Tensor, "B Hq L"]:
    """Scaled scores of every key: `e_i = q · k_i * scale`, -inf where a sequence has no such position.

    Returns:
        float32, by logical position, L = `kv.max_length`. The keys of a key-value head are read once for its
        G query heads.
    """
    batch, num_heads, _, dim = query.shape
    grouped = query.float().view(batch, kv.num_heads, num_heads // kv.num_heads, dim)
    # Keys on the left: on a CPU two to three times as fast for groups of two or three heads, never slower.
    scores = torch.matmul(kv.logical_keys().float(), grouped.transpose(2, 3))  # [B, Hkv, L, G]
    scores = scores.transpose(2, 3).contiguous().mul_(scale)
    if not kv.uniform:
        scores.masked_fill_(~kv.visible()[:, None, None, :], float("-inf"))
    return scores.view(batch, num_heads, kv.max_length)


def row_topk(topk: int | str, lengths: Int[Tensor, "*rows"]) -> int | Int[Tensor, "*rows"]:
    """Budget of each row: `sparsesel.config.resolve_topk` on a tensor of lengths, an int where it is absolute.

    Args:
        topk: Absolute, or a percentage of the visible keys.
        lengths: Visible positions per row.
    """
    if isinstance(topk, int):
        return topk
    # The same float64 operations in the same order as resolve_topk, so that the two never differ.
    share = float(topk.rstrip("%")) * lengths.double() / 100 - 1e-9
    return share.ceil().clamp_min(1).long()


def topk_indices(
    scores: Float[Tensor, "*rows L"],
    topk: int | Int[Tensor, "*rows"],
    lengths: Int[Tensor, "*rows"],
    *,
    widest: int | None = None,
) -> Int[Tensor, "*rows K"]:
    """Positions of the highest scores of each row.

    Order of preference: score descending (NaN as -inf), then index ascending. Only positions below `lengths` are
    ever taken, so -inf among visible keys is a legal score.

    Args:
        scores: By logical position.
        topk: Budget, one for all or one per row.
        lengths: Visible positions per row.
        widest: Upper bound of `topk` where the host knows one; without it a tensor `topk` is read, which waits
            for its device.

    Returns:
        int32, ascending, `min(topk, length)` of them, padded with -1. K is the largest budget, at most L.
    """
    total = scores.shape[-1]
    if widest is None:
        widest = topk if isinstance(topk, int) else int(topk.max())
    widest = min(widest, total)
    allowed = torch.clamp(lengths, max=topk) if isinstance(topk, int) else torch.minimum(lengths, topk)  # [*rows]
    order = _descending(scores, lengths, allowed, widest)
    # Unseen positions lie behind all visible ones, so the first `allowed` of a row are visible.
    rank = torch.arange(widest, device=scores.device)
    kept = torch.where(rank < allowed[..., None], order, total).to(torch.int32)
    kept = kept.sort(dim=-1).values
    return kept.masked_fill_(kept == total, -1)


def _descending(scores: Tensor, lengths: Tensor, allowed: Tensor, count: int) -> Tensor:
    """`count` indices of each row, the first `allowed` being its best by score, ties going to the lower index."""
    total = scores.shape[-1]
    if scores.device.type == "cpu" and count < total and scores.numel():
        # A partial sort finds the right set unless equal scores lie on both sides of its edge, which is rare.
        everything = int(lengths.min()) >= total
        if everything:
            best = scores.topk(count + 1, dim=-1)  # NaN comes first, so the best of a row tells whether it has one
            if not bool((best.values[..., 0].isnan() | _is_tied(best.values, allowed)).any()):
                return best.indices[..., :count]
        ranked = _rankable(scores, lengths)
        best = ranked.topk(count + 1, dim=-1)
        order = best.indices[..., :count].clone()
        tied = _is_tied(best.values, allowed)
        order[tied] = ranked[tied].sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return order
    return _rankable(scores, lengths).sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _rankable(scores: Tensor, lengths: Tensor) -> Tensor:
    """Scores with -inf for NaN and for unseen positions."""
    unseen = torch.arange(scores.shape[-1], device=scores.device) >= lengths[..., None]
    return scores.masked_fill(scores.isnan() | unseen, float("-inf"))


def _is_tied(descending: Tensor, allowed: Tensor) -> Tensor:
    """Whether the last score taken from each row equals the first one left."""
    first_left = allowed.clamp_min(0)[..., None]
    last_taken = (first_left - 1).clamp_min(0)
    return (descending.gather(-1, last_taken) <= descending.gather(-1, first_left)).squeeze(-1)


def scores_at(scores: Float[Tensor, "*rows L"], indices: Int[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Scores at chosen positions, -inf where the index is -1."""
    return scores.gather(-1, indices.clamp_min(0).long()).masked_fill_(indices < 0, float("-inf"))


def indexed_qk(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, indices: Int[Tensor, "B H M"], *, scale: float
) -> Float[Tensor, "B Hq M"]:
    """Scaled scores of chosen keys only: float32, -inf where the index is -1.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        indices: Logical positions, H in {1, Hkv, Hq}; a key that query heads share is read once for all of them.
        scale: Factor of the scores.
    """
    batch, num_heads, _, dim = query.shape
    indices = _per_key_value_head(indices, kv)
    sets, chosen = indices.shape[1:]
    keys = kv.gather_keys(_of_key_value_heads(indices, kv)).view(batch, sets, chosen, dim).float()
    queries = query.float().view(batch, sets, num_heads // sets, dim)
    scores = torch.matmul(keys, queries.transpose(2, 3))  # [B, H, M, Hq / H]
    scores = scores.transpose(2, 3).mul_(scale).masked_fill_(indices[:, :, None] < 0, float("-inf"))
    return scores.reshape(batch, num_heads, chosen)


def sparse_attention(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, indices: Int[Tensor, "B H 1 K"], *, scale: float
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention over chosen positions: exact scores of the current query, values of those positions.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        indices: Logical positions, H in {1, Hkv, Hq}, -1 where unused. A row without any gives zeros.
        scale: Factor of the scores.
    """
    chosen = indices[:, :, 0]
    scores = indexed_qk(query, kv, chosen, scale=scale)
    return softmax_values(scores, kv, chosen).to(query.dtype)


def softmax_values(
    scores: Float[Tensor, "B Hq K"], kv: KVView, indices: Int[Tensor, "B H K"]
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Values of chosen positions, weighed by the softmax of scores already known.

    Args:
        scores: Scaled scores of those positions, -inf where the index is -1.
        kv: Keys and values.
        indices: Logical positions, H in {1, Hkv, Hq}, -1 where unused. A row without any gives zeros.

    Returns:
        float32.
    """
    indices = _per_key_value_head(indices, kv)
    batch, sets, slots = indices.shape
    unused = indices < 0
    weights = scores.softmax(dim=-1).view(batch, sets, scores.shape[1] // sets, slots)
    weights = weights.masked_fill(unused.all(-1)[:, :, None, None], 0.0)
    values = kv.gather_values(_of_key_value_heads(indices, kv)).view(batch, sets, slots, kv.values.shape[3])
    # A slot without a key has weight 0, yet 0 * inf is NaN: the value it happens to read must not count either.
    values = values.float().masked_fill_(unused[..., None], 0.0)
    return torch.matmul(weights, values).view(batch, scores.shape[1], 1, values.shape[3])


def _per_key_value_head(indices: Tensor, kv: KVView) -> Tensor:
    """Positions `[B, H, K]` with H at least Hkv: a list that all heads share is one for each key-value head."""
    return indices.expand(-1, kv.num_heads, -1) if indices.shape[1] == 1 else indices


def _of_key_value_heads(indices: Tensor, kv: KVView) -> Tensor:
    """Positions `[B, H, K]` of H heads, H a multiple of Hkv, as `[B, Hkv, H / Hkv · K]`."""
    batch, sets, slots = indices.shape
    return indices.reshape(batch, kv.num_heads, sets // kv.num_heads * slots)


def dense_attention(query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention of one query per head over every visible key."""
    batch, num_heads, _, dim = query.shape
    grouped = query.view(batch, kv.num_heads, num_heads // kv.num_heads, dim)
    mask = None if kv.uniform else kv.visible()[:, None, None, :]
    values = kv.logical_values()
    output = F.scaled_dot_product_attention(grouped, kv.logical_keys(), values, attn_mask=mask, scale=scale)
    return output.view(batch, num_heads, 1, values.shape[3])
