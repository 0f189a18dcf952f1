"""Quest of one head in plain loops and float64: what `selector.py` is tested against."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def page_bounds(keys: Sequence[Vector], *, largest: float) -> tuple[list[float], list[float]]:
    """Least and greatest number of each channel among the keys of one page.

    NaN makes both of its channel NaN; an infinity counts as the largest finite number.
    """
    least: list[float] = []
    greatest: list[float] = []
    for channel in range(len(keys[0])):
        numbers = [max(-largest, min(largest, key[channel])) for key in keys if not math.isnan(key[channel])]
        whole = len(numbers) == len(keys)
        least.append(min(numbers) if whole else math.nan)
        greatest.append(max(numbers) if whole else math.nan)
    return least, greatest


def page_score(query: Vector, least: Vector, greatest: Vector) -> float:
    """The most that `query · key` can be for a key within the bounds."""
    score = 0.0
    for q, low, high in zip(query, least, greatest, strict=True):
        if math.isnan(q * low) or math.isnan(q * high):
            return math.nan
        score += max(q * low, q * high)
    return score


def support(query: Vector, keys: Sequence[Vector], topk: int, page_size: int, *, largest: float) -> list[int]:
    """Positions attended, ascending.

    Args:
        query: D numbers of one query head.
        keys: The L visible keys of its key-value head.
        topk: K.
        page_size: P.
        largest: Largest finite number of the keys' type.
    """
    length = len(keys)
    pages = [list(range(start, min(start + page_size, length))) for start in range(0, length, page_size)]
    *earlier, last = pages
    chosen = last[-topk:]
    left = topk - len(chosen)
    ranked: list[tuple[float, int]] = []
    for number, page in enumerate(earlier):
        score = page_score(query, *page_bounds([keys[position] for position in page], largest=largest))
        ranked.append((math.inf if math.isnan(score) else -score, number))
    for _, number in sorted(ranked):
        if left >= page_size:
            chosen = chosen + earlier[number]
            left -= page_size
    return sorted(chosen)


def attend(
    query: Vector, keys: Sequence[Vector], values: Sequence[Vector], positions: Sequence[int], *, scale: float
) -> list[float]:
    """Softmax attention of one query head over `positions`."""
    scores = [scale * sum(q * k for q, k in zip(query, keys[position], strict=True)) for position in positions]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [
        sum(weight * values[position][channel] for weight, position in zip(weights, positions, strict=True))
        / sum(weights)
        for channel in range(len(values[0]))
    ]
