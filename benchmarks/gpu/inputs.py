"""Sequences of one layer on the device under test, in whatever way a cache may lay them out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.testing.inputs import GRID, LIMIT, DenseLayout, Layout, PagedLayout, Stream
from sparsesel.testing.tolerances import Expected, expected_attention

LAYOUTS: dict[str, Layout] = {
    "dense": DenseLayout(),
    "left-padded": DenseLayout(),
    "static": DenseLayout(static=True),  # where sequences end is known on the device alone
    "paged": PagedLayout(16, order="token"),
}
PADDED = ("left-padded", "static", "paged")


@dataclass(frozen=True)
class Geometry:
    """What a layer and its cache look like.

    Attributes:
        dtype: Of queries, keys and values.
        head_dim: D.
        group_size: G, query heads of a key-value head.
        layout: A key of `LAYOUTS`.
        length: Tokens of the longest of two sequences.
        kv_heads: Key-value heads.
    """

    dtype: str
    head_dim: int
    group_size: int
    layout: str
    length: int
    kv_heads: int = 2

    def __str__(self) -> str:
        return f"{self.dtype} D={self.head_dim} G={self.group_size} {self.layout} L={self.length}"


@dataclass(frozen=True)
class Case:
    """Two sequences, of which the last tokens have a query.

    Attributes:
        query: `[B, Hq, S, D]`, of the last S columns.
        stream: Keys and values of all columns, and no queries to speak of.
        layout: How its cache lies.
    """

    query: Tensor
    stream: Stream
    layout: Layout

    @property
    def columns(self) -> int:
        """Columns of the batch, padding included."""
        return self.stream.length

    def queries(self, first: int, last: int) -> Tensor:
        """Queries of some columns, `[B, Hq, last - first, D]`."""
        begin = self.columns - self.query.shape[2]
        return self.query[:, :, first - begin : last - begin]

    def view(self, columns: int) -> KVView:
        """The cache when it held so many columns."""
        return self.layout(self.stream.key[:, :, :columns], self.stream.value[:, :, :columns], self.stream.starts)


def keys_alone(query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None = None) -> Stream:
    """A stream of these keys and values, whose queries have the heads of `query` and take no memory."""
    blank = query.new_zeros(()).expand(*query.shape[:2], *key.shape[2:])
    return Stream(blank, key, value, starts)


def make_case(
    geometry: Geometry,
    device: str,
    *,
    seed: int,
    queries: int = 1,
    on_grid: bool = False,
    correlation: float = 0.97,
    jump: float = 0.1,
) -> Case:
    """Random sequences, the second of a padded batch the shorter one; padding holds NaN.

    Args:
        geometry: Their sizes.
        device: Where they lie.
        seed: Same seed, same numbers on the same device.
        queries: S.
        on_grid: Multiples of 1/32, on which scores are exact, so that any two paths select the same.
        correlation: Cosine of a query to the one before it.
        jump: Share of queries that have nothing to do with the one before.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype, length, dim = getattr(torch, geometry.dtype), geometry.length, geometry.head_dim
    heads = geometry.kv_heads * geometry.group_size

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def finished(numbers: Tensor) -> Tensor:
        if on_grid:
            numbers = (numbers * GRID).round_().div_(GRID).clamp_(-LIMIT, LIMIT)
        return numbers.to(dtype)

    key, value = (finished(noise(2, geometry.kv_heads, length, dim)) for _ in range(2))
    query = finished(drifting(noise(2, heads, queries, dim), generator, correlation, jump))
    starts = None
    if geometry.layout in PADDED:
        starts = torch.tensor([0, (length - queries) // 3], device=device)
        for part in (key, value):
            part[1, :, : int(starts[1])] = float("nan")
    return Case(query, keys_alone(query, key, value, starts), LAYOUTS[geometry.layout])


def drifting(noise: Tensor, generator: torch.Generator, correlation: float, jump: float) -> Tensor:
    """Queries `[B, Hq, S, D]` made of as much noise: each is `correlation` of the last, or breaks off."""
    chance = torch.rand(*noise.shape[:3], 1, generator=generator, device=noise.device)
    walk = [noise[:, :, 0]]
    for at in range(1, noise.shape[2]):
        drifted = correlation * walk[-1] + (1 - correlation**2) ** 0.5 * noise[:, :, at]
        walk.append(torch.where(chance[:, :, at] < jump, noise[:, :, at], drifted))
    return torch.stack(walk, dim=2)


def expected_in_parts(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Expected:
    """`expected_attention`, which repeats keys for their query heads, in parts that any device has room for."""
    group = query.shape[1] // keys.shape[1]
    heads = [
        slice(first + at, min(first + at + 4, first + group))
        for first in range(0, query.shape[1], group)
        for at in range(0, group, 4)
    ]
    rows = []
    for row in (slice(one, one + 1) for one in range(query.shape[0])):
        parts = []
        for some in heads:
            own = slice(some.start // group, some.start // group + 1)
            k, v = keys[row, own], values[row, own]
            parts.append(expected_attention(query[row, some], k, v, mask[row, some], scale=scale))
        rows.append(_joined(parts, 1))
    return _joined(rows, 0)


def _joined(parts: list[Expected], axis: int) -> Expected:
    return Expected(*(torch.cat([getattr(part, name) for part in parts], axis) for name in ("output", "bound")))
