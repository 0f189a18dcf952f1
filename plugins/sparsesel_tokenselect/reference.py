"""TokenSelect of one sequence in plain loops and float64: what `selector.py` is tested against.

Nothing is shared with the vectorised selector. Queries, keys and values are nested lists of numbers: queries
`[Hq][D]` per position, keys and values `[Hkv][L][D]`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsesel_tokenselect.config import TokenSelectConfig

Vector = Sequence[float]


@dataclass(frozen=True)
class Selection:
    """What is in force after a decode step: the query of the last miss, what it selected, and that step."""

    query: Sequence[Vector]
    selected: list[int]
    position: int


class LoopTokenSelect:
    """One sequence's selection cache and its steps.

    Args:
        config: As the selector's.
        scale: Factor of the scores.
    """

    def __init__(self, config: TokenSelectConfig, *, scale: float) -> None:
        self.config = config
        self.scale = scale
        self.history: list[Selection] = []  # one per decode step

    def step(self, query: Sequence[Vector], keys: Sequence[Sequence[Vector]]) -> tuple[bool, list[int]]:
        """One decode step at the last position of `keys`: whether it was a hit, and the positions attended."""
        length = len(keys[0])
        first, wanted, last = self.parts(length)
        before = self.history[-1] if self.history else None
        is_hit = (
            before is not None
            and before.position == length - 2
            and len(before.selected) == wanted
            and cosine(query, before.query) >= self.config.similarity_threshold
        )
        if is_hit and before is not None:
            now = Selection(before.query, before.selected, length - 1)
        else:
            votes = self.votes(query, keys, first, length - last)
            ranked = sorted(votes, key=lambda position: (-votes[position], position))
            now = Selection(query, sorted(ranked[:wanted]), length - 1)
        self.history.append(now)
        return is_hit, [*range(first), *now.selected, *range(length - last, length)]

    def crop(self, length: int) -> None:
        """Forget positions ≥ `length`."""
        while self.history and self.history[-1].position >= length:
            self.history.pop()

    def parts(self, length: int) -> tuple[int, int, int]:
        """How many of the first, of selected and of the last tokens make up the budget."""
        topk = self.config.topk
        if isinstance(topk, str):
            topk = max(1, math.ceil(float(topk.rstrip("%")) * length / 100 - 1e-9))
        budget = min(topk, length)
        last = min(self.config.local_size, budget)
        first = min(self.config.sink_size, budget - last)
        return first, budget - first - last, last

    def votes(
        self, query: Sequence[Vector], keys: Sequence[Sequence[Vector]], begin: int, end: int
    ) -> dict[int, float]:
        """Sum over heads of each head's softmax over the positions from `begin` to before `end`.

        A score that is NaN counts as -inf; a head whose softmax is not defined casts no vote.
        """
        votes = dict.fromkeys(range(begin, end), 0.0)
        group = len(query) // len(keys)
        for head, vector in enumerate(query):
            scores: dict[int, float] = {}
            for position in votes:
                key = keys[head // group][position]
                score = self.scale * sum(q * k for q, k in zip(vector, key, strict=True))
                scores[position] = -math.inf if math.isnan(score) else score
            top = max(scores.values(), default=-math.inf)
            if math.isinf(top):
                continue
            weights = {position: math.exp(score - top) for position, score in scores.items()}
            total = sum(weights.values())
            for position, weight in weights.items():
                votes[position] += weight / total
        return votes

    def attend(
        self,
        query: Sequence[Vector],
        keys: Sequence[Sequence[Vector]],
        values: Sequence[Sequence[Vector]],
        positions: Sequence[int],
        head: int,
    ) -> list[float]:
        """Softmax attention of one query head over `positions`."""
        kv_head = head * len(keys) // len(query)
        scores = [
            self.scale * sum(q * k for q, k in zip(query[head], keys[kv_head][position], strict=True))
            for position in positions
        ]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        chosen = [values[kv_head][position] for position in positions]
        return [
            sum(weight * value[channel] for weight, value in zip(weights, chosen, strict=True)) / sum(weights)
            for channel in range(len(chosen[0]))
        ]


def cosine(one: Sequence[Vector], other: Sequence[Vector]) -> float:
    """Cosine similarity of all heads' queries put together, 0 where a norm is zero or not finite."""
    first, second = ([number for vector in query for number in vector] for query in (one, other))
    norms = [math.sqrt(sum(number * number for number in numbers)) for numbers in (first, second)]
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        return 0.0
    return sum(a * b for a, b in zip(first, second, strict=True)) / (norms[0] * norms[1])
