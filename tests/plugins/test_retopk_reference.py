"""ReTopK's vectorised selector against its plain-loop reference over random lives of a cache.

Queries come from a pool whose cosines are far apart or exactly equal, keys are small integers: so every similarity
and score is ranked alike in float32 and float64, ties included, and supports, paths and counters must agree exactly.
"""

import copy
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.registry import make_selector
from sparsesel.testing.inputs import DenseLayout, PagedLayout, Stream
from sparsesel.testing.replay import Replay, Step
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.reference import LoopReTopK
from sparsesel_retopk.state import SPARE

HEAD_DIM = 4
LENGTH = 96
SCALE = 0.5
PATHS = ("refresh", "cold", "fallback", "underfull", "reuse")


def query_pool() -> torch.Tensor:
    """Axes, 3-4-5 vectors in every plane, some doubled: cosines 0, .36, .48, .6, .64, .8, .96 and 1. And bad ones."""
    pool = [[float(a == i) for a in range(HEAD_DIM)] for i in range(HEAD_DIM)]
    planes = itertools.permutations(range(HEAD_DIM), 2)
    pool += [[3.0 * (a == i) + 4.0 * (a == j) for a in range(HEAD_DIM)] for i, j in planes]
    pool += [[2 * x for x in vector] for vector in pool[::3]]
    pool += [[0.0] * HEAD_DIM, [math.nan, 1.0, 0.0, 0.0], [math.inf, 0.0, 1.0, 0.0]]
    return torch.tensor(pool)


POOL = query_pool()


def drawn_stream(seed: int, starts: list[int], heads: int, kv_heads: int, like: Stream | None = None, past: int = 0):
    """Sequences drawn at random; those of `like` up to the column `past`."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(starts)
    # Few of the pool at a time and runs of one query, so that reuse happens.
    favourites = torch.randint(0, len(POOL), (batch, heads, 4), generator=generator)
    picks = torch.randint(0, 4, (batch, heads, LENGTH // 2), generator=generator).repeat_interleave(2, dim=2)
    query = POOL[favourites.gather(2, picks)]
    key = torch.randint(-2, 3, (batch, kv_heads, LENGTH, HEAD_DIM), generator=generator).float()
    bad = torch.rand(batch, kv_heads, LENGTH, generator=generator)
    key[bad < 0.02] = math.nan
    key[(bad > 0.02) & (bad < 0.03)] = math.inf
    value = torch.randn(batch, kv_heads, LENGTH, HEAD_DIM, generator=generator)
    if like is not None:
        pairs = ((like.query, query), (like.key, key), (like.value, value))
        query, key, value = (torch.cat([old[:, :, :past], new[:, :, past:]], dim=2) for old, new in pairs)
    for row, start in enumerate(starts):
        for part in (query, key, value):
            part[row, :, :start] = math.nan
    return Stream(query, key, value, torch.tensor(starts) if any(starts) else None)


class Both:
    """The selector and one reference per sequence, put through the same life."""

    def __init__(self, config: ReTopKConfig, starts: list[int], heads: int, kv_heads: int, seed: int, paged: bool):
        self.config, self.heads, self.kv_heads, self.starts, self.seed = config, heads, kv_heads, starts, seed
        stream = drawn_stream(seed, starts, heads, kv_heads)
        layout = PagedLayout(block_size=3, order="channel") if paged else DenseLayout()
        self.replay = Replay(make_selector(config), stream, layout=layout, scale=SCALE)
        self.loops = [LoopReTopK(config, heads, kv_heads, scale=SCALE, spare=SPARE) for _ in starts]
        self.counted = [Counter() for _ in range(heads)]

    def prefill(self, count: int) -> None:
        before = self.replay.length
        self.replay.prefill(count)
        for row, loop in enumerate(self.loops):
            query, keys, _ = self.seen(row)
            fresh = min(count, before + count - self.starts[row])
            if fresh > 0:
                loop.prefill(query[len(query) - fresh :], keys)

    def decode(self) -> None:
        step = self.replay.step()
        for row, loop in enumerate(self.loops):
            query, keys, values = self.seen(row)
            for head, outcome in enumerate(loop.step(query[-1], keys, values)):
                where = f"row {row}, head {head}, position {len(query) - 1}, path {outcome.path}"
                support = [at for at in step.support.indices[row, head, 0].tolist() if at >= 0]
                assert support == outcome.support, where
                expected = torch.tensor(outcome.output, dtype=torch.float64)
                torch.testing.assert_close(
                    step.output[row, head, 0].double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=where
                )
                self.counted[head] += Counter(
                    {
                        outcome.path: 1,
                        "exact": int(outcome.path != "reuse"),
                        "candidates": outcome.candidates,
                        "steps": 1,
                        "selected": len(support),
                        "visible": len(query),
                    }
                )
        self.check_counters(step)

    def check_counters(self, step: Step) -> None:
        counters = self.replay.state.counters.read()
        for name in (*PATHS, "exact", "candidates", "steps", "selected", "visible"):
            assert counters[name].tolist() == [counted[name] for counted in self.counted], name

    def crop(self, count: int) -> None:
        """Take `count` columns back; other tokens follow."""
        count = min(count, self.replay.length - max(self.starts) - 1)
        if count < 1:
            return
        self.replay.crop(count)
        self.seed += 1
        self.replay.stream = drawn_stream(
            self.seed, self.starts, self.heads, self.kv_heads, like=self.replay.stream, past=self.replay.length
        )
        for row, loop in enumerate(self.loops):
            loop.crop(self.replay.length - self.starts[row])

    def reorder(self, index: list[int]) -> None:
        self.replay.reorder(torch.tensor(index))
        self._take(index)

    def repeat(self) -> None:
        self.replay.repeat(2)
        self._take([row for row in range(len(self.starts)) for _ in range(2)])

    def _take(self, index: list[int]) -> None:
        self.loops = [copy.deepcopy(self.loops[row]) for row in index]
        self.starts = [self.starts[row] for row in index]

    def seen(self, row: int):
        """The row's queries by position, and its keys and values by head, as lists."""
        alone, length = self.replay.stream.alone(row), self.replay.length - self.starts[row]
        query, key, value = (part[0, :, :length] for part in (alone.query, alone.key, alone.value))
        return query.transpose(0, 1).tolist(), key.tolist(), value.tolist()


@st.composite
def configs(draw) -> ReTopKConfig:
    cache_size = draw(st.integers(1, 6))
    return ReTopKConfig(
        topk=draw(st.sampled_from([1, 3, 5, 8, "20%", "45%"])),
        cache_size=cache_size,
        recall_size=draw(st.integers(1, min(3, cache_size))),
        window_size=draw(st.sampled_from([0, 1, 4])),
        # Far from every cosine of the pool and every mean of two of them.
        similarity_threshold=draw(st.sampled_from([0.85, 0.55, 0.93, -1.0, 1.5])),
        refresh_interval=draw(st.sampled_from([0, 1, 3, 5])),
        retrieval=draw(st.sampled_from(["similarity", "similarity", "recent"])),
        fallback=draw(st.sampled_from([True, True, False])),
        fallback_scope=draw(st.sampled_from(["head", "group-any", "group-mean"])),
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 9)),
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.just("crop"), st.integers(1, 8)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.just(0)),
    ),
    max_size=7,
)


@given(
    config=configs(),
    starts=st.sampled_from([[0], [0, 0], [0, 3], [5, 0, 2]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
    prompt=st.integers(1, 20),
    operations=OPERATIONS,
)
def test_any_life_matches_the_loops(config, starts, heads, seed, paged, prompt, operations):
    both = Both(config, starts, *heads, seed=seed * 100, paged=paged)
    both.prefill(prompt)
    shortest = max(starts) + 1
    if both.replay.length < shortest:
        both.prefill(shortest - both.replay.length)
    for operation, argument in [*operations, ("decode", 4)]:
        rows = len(both.starts)
        match operation:
            case "prefill":
                both.prefill(argument)
            case "decode":
                for _ in range(argument):
                    both.decode()
            case "crop":
                both.crop(argument)
            case "reorder":
                both.reorder([(row + argument) % rows for row in range(rows)])
            case "repeat" if rows < 3:
                both.repeat()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"similarity_threshold": 0.93},
        {"retrieval": "recent"},
        {"fallback": False},
        {"window_size": 0},
        {"refresh_interval": 0},
        {"fallback_scope": "group-any"},
        {"fallback_scope": "group-mean"},
        {"topk": "30%"},
    ],
    ids=str,
)
def test_long_decode_matches_the_loops(overrides):
    values = {"topk": 8, "cache_size": 6, "recall_size": 2, "window_size": 3, "refresh_interval": 7} | overrides
    both = Both(ReTopKConfig(**values), [0, 4], 4, 2, seed=11, paged=False)
    both.prefill(30)
    for _ in range(50):
        both.decode()
    paths = {name: sum(counted[name] for counted in both.counted) for name in PATHS}
    assert paths["reuse"] > 0
    assert (paths["refresh"] > 0) == (values["refresh_interval"] > 0)
    assert (paths["fallback"] > 0) == values.get("fallback", True)


def test_random_queries_match_the_loops():
    """Ordinary numbers, of a seed at which nothing comes near enough to a tie for rounding to decide."""
    config = ReTopKConfig(topk=9, cache_size=5, recall_size=2, window_size=4, refresh_interval=10)
    both = Both(config, [0, 7], 4, 2, seed=3, paged=False)
    generator = torch.Generator().manual_seed(5)
    shape = (2, 4, LENGTH, HEAD_DIM)
    query = torch.randn(2, 4, 1, HEAD_DIM, generator=generator) + 0.5 * torch.randn(shape, generator=generator)
    key = torch.randn(2, 2, LENGTH, HEAD_DIM, generator=generator)
    both.replay.stream = Stream(query, key, both.replay.stream.value, torch.tensor([0, 7]))
    both.prefill(40)
    for _ in range(50):
        both.decode()
    paths = sum(both.counted, Counter())
    assert all(paths[name] > 30 for name in ("reuse", "fallback", "refresh"))
