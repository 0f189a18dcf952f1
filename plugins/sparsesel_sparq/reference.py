"""One SparQ step of one sequence in plain loops and float64: what `selector.py` is tested against.

Nothing is shared with the vectorised selector. Queries are `[Hq][D]`, keys and values `[Hkv][L][D]`, nested lists of
numbers. There is no state: all that SparQ keeps is a function of keys and values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsesel_sparq.config import SparQConfig

Vector = Sequence[float]
HIGHEST = 3.4028234663852886e38  # of float32; what an infinite score counts as


@dataclass(frozen=True)
class Choice:
    """What the query heads of one key-value head chose.

    Attributes:
        dims: The r components, ascending.
        weights: Of each query head, its approximate weight of every position.
        support: Positions, ascending.
    """

    dims: list[int]
    weights: list[list[float]]
    support: list[int]


def budget(config: SparQConfig, length: int) -> int:
    """K at `length` visible keys."""
    topk = config.topk
    return topk if isinstance(topk, int) else max(1, math.ceil(float(topk.rstrip("%")) * length / 100 - 1e-9))


def choose(config: SparQConfig, queries: Sequence[Vector], keys: Sequence[Vector], *, scale: float) -> Choice:
    """Components, approximate weights and support for the query heads of one key-value head.

    Args:
        config: As the selector's.
        queries: `[G][D]`.
        keys: `[L][D]`.
        scale: Factor of the scores.
    """
    dims = _largest([sum(abs(q[d]) for q in queries) for d in range(len(keys[0]))], config.rank)
    weights = [_softmax(_scores(query, keys, dims, scale)) for query in queries]
    length, topk = len(keys), budget(config, len(keys))
    local = topk // 4 if config.local_size == "topk/4" else min(int(config.local_size), topk)
    merit = [sum(own[i] for own in weights) for i in range(length)]
    newest = list(range(max(0, length - local), length))
    others = _largest(merit[: length - len(newest)], max(0, topk - len(newest)))
    return Choice(dims, weights, sorted(others + newest))


def attend(
    config: SparQConfig,
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    weights: Sequence[float],
    support: Sequence[int],
    *,
    scale: float,
) -> list[float]:
    """Output of one query head.

    Args:
        config: As the selector's.
        query: `[D]`.
        keys: `[L][D]`.
        values: `[L][Dv]`.
        weights: The head's approximate weights.
        support: Positions attended to.
        scale: Factor of the scores.
    """
    scores = [scale * sum(q * k for q, k in zip(query, keys[i], strict=True)) for i in support]
    if any(math.isnan(score) for score in scores) or math.isinf(max(scores)):
        return [math.nan] * len(values[0])  # as a softmax has it
    near_weights = _softmax(scores)
    alpha = 1 - left_out(weights, support) if config.reallocate else 1.0
    output = []
    for channel in range(len(values[0])):
        near = sum(w * values[i][channel] for w, i in zip(near_weights, support, strict=True))
        mean = sum(value[channel] for value in values) / len(values) if config.reallocate else 0.0
        output.append(alpha * near + (1 - alpha) * mean)
    return output


def left_out(weights: Sequence[float], support: Sequence[int]) -> float:
    """1 - α: the approximate weight of everything outside the support."""
    inside = set(support)
    return sum((weight for i, weight in enumerate(weights) if i not in inside), 0.0)


def _scores(query: Vector, keys: Sequence[Vector], dims: Sequence[int], scale: float) -> list[float]:
    size = sum(abs(x) for x in query)
    share = sum(abs(query[d]) for d in dims) / size if size else math.nan
    if not (math.isfinite(share) and share > 0):
        share = 1.0
    scores = []
    for key in keys:
        score = sum(query[d] * key[d] for d in dims) * scale / math.sqrt(share)
        scores.append(-HIGHEST if math.isnan(score) else max(-HIGHEST, min(HIGHEST, score)))
    return scores


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def _largest(merit: Sequence[float], count: int) -> list[int]:
    """Indices of the largest, NaN last, ties to the lower index."""
    ranked = sorted(range(len(merit)), key=lambda i: math.inf if math.isnan(merit[i]) else -merit[i])
    return sorted(ranked[:count])
