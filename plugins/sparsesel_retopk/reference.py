"""ReTopK for one sequence in plain loops and float64, with a literal FIFO: what `selector.py` is tested against.

Nothing is shared with the vectorised selector. Queries, keys and values are nested lists of numbers: queries
`[Hq][D]` per position, keys and values `[Hkv][L][D]`.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sparsesel_retopk.config import ReTopKConfig

Vector = Sequence[float]


@dataclass(frozen=True)
class Entry:
    """One pair of the FIFO: a past query with its position and its support."""

    position: int
    query: Vector
    support: list[int]


@dataclass(frozen=True)
class Outcome:
    """What one query head did in one step.

    Attributes:
        path: `refresh`, `cold`, `fallback`, `underfull` (all exact) or `reuse`.
        support: Positions attended, ascending.
        candidates: |A| on the reuse path, else 0.
        output: D numbers.
    """

    path: str
    support: list[int]
    candidates: int
    output: list[float]


class LoopReTopK:
    """One sequence's cache and its steps.

    Args:
        config: As the selector's.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv.
        scale: Factor of the scores.
        spare: Pairs kept beyond the C that can be recalled, in case the latest are cropped away.
    """

    def __init__(
        self, config: ReTopKConfig, num_attention_heads: int, num_key_value_heads: int, *, scale: float, spare: int = 0
    ) -> None:
        self.config = config
        self.scale = scale
        self.group = num_attention_heads // num_key_value_heads
        self.fifos: list[deque[Entry]] = [deque(maxlen=config.cache_size + spare) for _ in range(num_attention_heads)]
        self.prefill_end = 0

    def prefill(self, queries: Sequence[Sequence[Vector]], keys: Sequence[Sequence[Vector]]) -> None:
        """Insert the last `len(queries)` of the positions that `keys` has, each with its own causal exact support."""
        length = len(keys[0])
        for offset, query in enumerate(queries):
            position = length - len(queries) + offset
            for head, fifo in enumerate(self.fifos):
                if length - position <= (fifo.maxlen or 0):  # others would be pushed out again
                    exact = self._exact(query[head], keys[head // self.group][: position + 1])
                    fifo.append(Entry(position, query[head], exact))
        self.prefill_end = length

    def step(
        self, query: Sequence[Vector], keys: Sequence[Sequence[Vector]], values: Sequence[Sequence[Vector]]
    ) -> list[Outcome]:
        """One decode step at the last position of `keys`, one outcome per query head."""
        config = self.config
        position = len(keys[0]) - 1
        reachable = [[e for e in fifo if e.position >= position - config.cache_size] for fifo in self.fifos]
        recalled = [self._recall(query[head], entries) for head, entries in enumerate(reachable)]
        best = [max((similarity for similarity, _ in chosen), default=-math.inf) for chosen in recalled]
        steps = position - self.prefill_end
        refresh = config.refresh_interval > 0 and steps > 0 and steps % config.refresh_interval == 0
        outcomes = []
        for head in range(len(self.fifos)):
            own_keys, own_values = keys[head // self.group], values[head // self.group]
            budget = min(self._topk(position + 1), position + 1)
            union = {at for _, entry in recalled[head] for at in entry.support}
            union |= {position - back for back in range(config.window_size) if back <= position}
            if refresh:
                path = "refresh"
            elif not reachable[head]:
                path = "cold"
            elif config.fallback and not self._is_near(best, head):
                path = "fallback"
            elif len(union) < budget:
                path = "underfull"
            else:
                path = "reuse"
            if path == "reuse":
                support = self._best(query[head], own_keys, sorted(union), budget)
            else:
                support = self._exact(query[head], own_keys)
            output = self._attend(query[head], own_keys, own_values, support)
            outcomes.append(Outcome(path, support, len(union) if path == "reuse" else 0, output))
        for head, outcome in enumerate(outcomes):
            self.fifos[head].append(Entry(position, query[head], outcome.support))
        return outcomes

    def crop(self, length: int) -> None:
        """Forget positions ≥ `length`."""
        for fifo in self.fifos:
            while fifo and fifo[-1].position >= length:
                fifo.pop()
        self.prefill_end = min(self.prefill_end, length)

    def _topk(self, length: int) -> int:
        topk = self.config.topk
        return topk if isinstance(topk, int) else max(1, math.ceil(float(topk.rstrip("%")) * length / 100 - 1e-9))

    def _recall(self, query: Vector, entries: list[Entry]) -> list[tuple[float, Entry]]:
        ranked = [(_cosine(query, entry.query), entry) for entry in reversed(entries)]  # newest first
        if self.config.retrieval == "similarity":
            ranked.sort(key=lambda pair: -pair[0])  # a stable sort: ties stay newest first
        return ranked[: self.config.recall_size]

    def _is_near(self, best: list[float], head: int) -> bool:
        first = head - head % self.group
        group = best[first : first + self.group]
        match self.config.fallback_scope:
            case "head":
                decisive = best[head]
            case "group-any":
                decisive = min(group)
            case "group-mean":
                decisive = sum(group) / len(group)
        return decisive >= self.config.similarity_threshold

    def _score(self, query: Vector, key: Vector) -> float:
        return self.scale * sum(q * k for q, k in zip(query, key, strict=True))

    def _best(self, query: Vector, keys: Sequence[Vector], positions: Sequence[int], budget: int) -> list[int]:
        def badness(position: int) -> float:
            score = self._score(query, keys[position])
            return math.inf if math.isnan(score) else -score

        return sorted(sorted(positions, key=badness)[:budget])

    def _exact(self, query: Vector, keys: Sequence[Vector]) -> list[int]:
        return self._best(query, keys, range(len(keys)), self._topk(len(keys)))

    def _attend(
        self, query: Vector, keys: Sequence[Vector], values: Sequence[Vector], support: Sequence[int]
    ) -> list[float]:
        scores = [self._score(query, keys[position]) for position in support]
        top = max(scores)
        if any(math.isnan(score) for score in scores) or math.isinf(top):
            return [math.nan] * len(values[0])  # as a softmax has it
        weights = [math.exp(score - top) for score in scores]
        return [
            sum(weight * values[position][channel] for weight, position in zip(weights, support, strict=True))
            / sum(weights)
            for channel in range(len(values[0]))
        ]


def _cosine(one: Vector, other: Vector) -> float:
    """Cosine similarity, 0 where a norm is zero or not finite."""
    norms = [math.sqrt(sum(x * x for x in vector)) for vector in (one, other)]
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        return 0.0
    return sum(a * b for a, b in zip(one, other, strict=True)) / (norms[0] * norms[1])
