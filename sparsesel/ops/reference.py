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
    grouped = query.float().view(batch, kv.num_heads, -1, dim)
    scores = torch.matmul(grouped, kv.logical_keys().float().transpose(2, 3)).mul_(scale)  # [B, Hkv, G, L]
    if not kv.uniform:
        scores.masked_fill_(~kv.visible()[:, None, None, :], float("-inf"))
    return scores.view(batch, num_heads, -1)


def topk_indices(
    scores: Float[Tensor, "*rows L"], topk: int | Int[Tensor, "*rows"], lengths: Int[Tensor, "*rows"]
) -> Int[Tensor, "*rows K"]:
    """Positions of the highest scores of each row.

    Order of preference: score descending (NaN as -inf), then index ascending. Only positions below `lengths` are
    ever taken, so -inf among visible keys is a legal score.

    Args:
        scores: By logical position.
        topk: Budget, one for all or one per row.
        lengths: Visible positions per row.

    Returns:
        int32, ascending, `min(topk, length)` of them, padded with -1. K is the largest budget, at most L.
    """
    total = scores.shape[-1]
    widest = topk if isinstance(topk, int) else int(topk.max())
    widest = min(widest, total)
    positions = torch.arange(total, device=scores.device)
    ranked = torch.where(scores.isnan(), float("-inf"), scores)
    visible = positions < lengths[..., None]
    ranked = torch.where(visible, ranked, float("-inf"))
    allowed = torch.clamp(lengths, max=topk) if isinstance(topk, int) else torch.minimum(lengths, topk)  # [*rows]
    order = _descending(ranked, widest)
    # Unseen positions score -inf and lie behind all visible ones, so the first `allowed` of a row are visible.
    rank = torch.arange(widest, device=scores.device)
    kept = torch.where(rank < allowed[..., None], order, total)
    kept = kept.sort(dim=-1).values
    return torch.where(kept == total, -1, kept).to(torch.int32)


def _descending(scores: Tensor, count: int) -> Tensor:
    """The first `count` indices of each row by score descending, then index ascending."""
    total = scores.shape[-1]
    if scores.device.type == "cpu" and count < total:
        # A partial sort is exact as a set wherever no score ties across its edge, which is nearly always.
        best = scores.topk(count + 1, dim=-1)
        distinct = best.values[..., 1:] < best.values[..., :-1]
        if bool(distinct.all()):
            return best.indices[..., :count]
        order = best.indices[..., :count].clone()
        tied = ~distinct.all(-1)
        order[tied] = scores[tied].sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return order
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def indexed_qk(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, indices: Int[Tensor, "B Hq M"], *, scale: float
) -> Float[Tensor, "B Hq M"]:
    """Scaled scores of chosen keys only: float32, -inf where the index is -1."""
    batch, num_heads, _, dim = query.shape
    grouped = indices.view(batch, kv.num_heads, -1)  # [B, Hkv, G * M]
    keys = kv.gather_keys(grouped).view(batch, num_heads, -1, dim).float()  # [B, Hq, M, D]
    scores = torch.matmul(keys, query.float().transpose(2, 3)).squeeze(3).mul_(scale)
    return scores.masked_fill_(indices < 0, float("-inf"))


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
    batch, num_heads, _, _ = query.shape
    indices = indices[:, :, 0].repeat_interleave(num_heads // indices.shape[1], dim=1)  # [B, Hq, K]
    scores = indexed_qk(query, kv, indices, scale=scale)
    weights = scores.softmax(dim=-1)
    weights = torch.where((indices >= 0).any(-1, keepdim=True), weights, 0.0)
    values = kv.gather_values(indices.view(batch, kv.num_heads, -1)).view(batch, num_heads, -1, kv.values.shape[3])
    # A slot without a key has weight 0, yet 0 * inf is NaN: the value it happens to read must not count either.
    values = values.float().masked_fill((indices < 0)[..., None], 0.0)
    return torch.matmul(weights[:, :, None, :], values).to(query.dtype)


def dense_attention(query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention of one query per head over every visible key."""
    batch, num_heads, _, dim = query.shape
    grouped = query.view(batch, kv.num_heads, num_heads // kv.num_heads, dim)
    mask = None if kv.uniform else kv.visible()[:, None, None, :]
    values = kv.logical_values()
    output = F.scaled_dot_product_attention(grouped, kv.logical_keys(), values, attn_mask=mask, scale=scale)
    return output.view(batch, num_heads, 1, values.shape[3])
