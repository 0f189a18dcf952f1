"""Operations that selectors are built from: one function each, defined by `reference.py`."""

from sparsesel.ops.reference import (
    dense_attention,
    indexed_qk,
    qk_scores,
    row_topk,
    scores_at,
    softmax_values,
    sparse_attention,
    topk_indices,
)

__all__ = [
    "dense_attention",
    "indexed_qk",
    "qk_scores",
    "row_topk",
    "scores_at",
    "softmax_values",
    "sparse_attention",
    "topk_indices",
]
