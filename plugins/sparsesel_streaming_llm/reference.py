"""StreamingLLM of one head in plain loops and float64: what `selector.py` is tested against."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def support(length: int, topk: int, sink_size: int) -> list[int]:
    """Positions attended of `length` visible ones, ascending."""
    kept: list[int] = []
    for position in range(length):
        budget = min(topk, length)
        sinks = min(sink_size, budget - 1)
        if position < sinks or position >= length - (budget - sinks):
            kept.append(position)
    return kept


def rotated(vector: Vector, position: int, inv_freq: Sequence[float]) -> list[float]:
    """A vector as a rotary embedding leaves it at `position`; channel i is paired with i + D/2."""
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for i in range(half):
        cos, sin = math.cos(position * inv_freq[i]), math.sin(position * inv_freq[i])
        turned[i] = vector[i] * cos - vector[half + i] * sin
        turned[half + i] = vector[half + i] * cos + vector[i] * sin
    return turned


def attend(
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    positions: Sequence[int],
    *,
    scale: float,
    inv_freq: Sequence[float] = (),
    renumber: bool = False,
) -> list[float]:
    """Softmax attention of one query head over `positions`.

    Args:
        query: D numbers, before rotation.
        keys: The L visible keys of its key-value head, before rotation.
        values: Their values.
        positions: Which of them are attended.
        scale: Factor of the scores.
        inv_freq: Radians per position of each pair of channels; empty leaves vectors as they are.
        renumber: Whether the attended tokens are rotated to 0, 1, … rather than to their positions in the text.
    """
    scores: list[float] = []
    for slot, position in enumerate(positions):
        own, last = (slot, len(positions) - 1) if renumber else (position, positions[-1])
        key, now = keys[position], query
        if inv_freq:
            key, now = rotated(key, own, inv_freq), rotated(query, last, inv_freq)
        scores.append(scale * sum(q * k for q, k in zip(now, key, strict=True)))
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [
        sum(weight * values[position][channel] for weight, position in zip(weights, positions, strict=True))
        / sum(weights)
        for channel in range(len(values[0]))
    ]
