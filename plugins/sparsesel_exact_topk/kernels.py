"""A decode step of Exact Top-K in Triton: keys are read once, and each row of scores is looked at about once.

The kernel that scores the keys also leaves the largest score of every tile, from which `sparsesel.ops.topk` knows the
few tiles that can hold a support.
"""

from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops.launch import topk_arguments
from sparsesel.ops.qk_scores import scores_and_maxima
from sparsesel.ops.sparse_attention import softmax_values_parts
from sparsesel.ops.split_k import combine
from sparsesel.ops.topk import largest, tile_size
from sparsesel.selector import Counters


def best_keys(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, topk: int | str, counters: Counters, *, scale: float
) -> tuple[Int[Tensor, "B Hq K"], Float[Tensor, "B Hq K"]]:
    """The K best keys of each query head and their scores.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        topk: Budget as configured.
        counters: To which the step is added.
        scale: Factor of the scores.

    Returns:
        int32 indices, ascending, padded with -1, and float32 scores, padded with -inf.
    """
    batch, num_heads = query.shape[:2]
    budget = topk_arguments(topk, kv)
    widest = budget["topk"]
    scores, maxima = scores_and_maxima(query, kv, scale=scale, tile=tile_size(kv.max_length, widest))
    indices, kept = largest(
        scores.flatten(0, 1),
        kv.lengths.contiguous(),
        **budget,
        widest=widest,
        maxima=None if maxima is None else maxima.flatten(0, 1),
        counters=counters.table(("selected", "visible", "steps", "exact"), num_heads, query.device),
    )
    return indices.view(batch, num_heads, -1), kept.view(batch, num_heads, -1)


def attend(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, topk: int | str, counters: Counters, *, scale: float
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention over the best keys; the scores that chose them also weigh them. Arguments as `best_keys`."""
    indices, scores = best_keys(query, kv, topk, counters, scale=scale)
    parts, lse = softmax_values_parts(scores, kv, indices)
    return combine(parts, lse, query.dtype).view(*query.shape[:2], 1, -1)
