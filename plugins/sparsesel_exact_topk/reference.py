"""Exact Top-K of one head in plain loops and float64: what `selector.py` is tested against."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def support(query: Vector, keys: Sequence[Vector], topk: int, *, scale: float) -> list[int]:
    """The min(topk, L) best positions, ascending: score descending with NaN as -inf, then index ascending.

    Args:
        query: D numbers of one query head.
        keys: The L visible keys of its key-value head.
        topk: K.
        scale: Factor of the scores.
    """
    ranked = []
    for position, key in enumerate(keys):
        score = scale * sum(q * k for q, k in zip(query, key, strict=True))
        ranked.append((math.inf if math.isnan(score) else -score, position))
    return sorted(position for _, position in sorted(ranked)[:topk])


def attend(
    query: Vector, keys: Sequence[Vector], values: Sequence[Vector], positions: Sequence[int], *, scale: float
) -> list[float]:
    """Softmax attention of one query head over `positions`."""
    scores = [scale * sum(q * k for q, k in zip(query, keys[position], strict=True)) for position in positions]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [
        sum(weight * values[position][channel] for weight, position in zip(weights, positions, strict=True)) / total
        for channel in range(len(values[0]))
    ]
