"""Dense attention of one head in plain loops and float64: what `selector.py` is tested against."""

import math
from collections.abc import Sequence


def attend(
    query: Sequence[float], keys: Sequence[Sequence[float]], values: Sequence[Sequence[float]], *, scale: float
) -> list[float]:
    """Output of one query head at one position.

    Args:
        query: D numbers.
        keys: The L visible keys of its key-value head.
        values: Their values.
        scale: Factor of the scores.
    """
    scores = [scale * math.fsum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [
        math.fsum(weight * value[channel] for weight, value in zip(weights, values, strict=True)) / total
        for channel in range(len(values[0]))
    ]
