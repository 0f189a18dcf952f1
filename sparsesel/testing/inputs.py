"""Seeded inputs: whole sequences of one layer, hostile ones among them, and the layouts a cache may have.

Numbers are multiples of 1/32 no larger than 4, so that a product of queries and keys is exact in float32 whatever
the order of summation, and bfloat16 holds them too: two paths over the same data must then give the same support
bit for bit. Memory that no sequence owns holds NaN, so that whoever reads it shows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.rotary import Rotary
from sparsesel.selector import LayerSpec

GRID = 32  # numbers are multiples of 1 / GRID …
LIMIT = 4.0  # … and at most this, so that 8 bits hold them
# Not a first layer: some selectors leave those dense.
LAYER_IDX = 16
# A block number that no cache has: reading it raises.
NO_BLOCK = 1 << 40


@dataclass(frozen=True)
class Stream:
    """Post-RoPE queries, keys and values of one layer over whole sequences, known in advance.

    Attributes:
        query: `[B, Hq, T, D]`.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, Dv]`.
        starts: `[B]` int64 column of each sequence's first token in a left-padded batch, or None. Padding holds NaN.
    """

    query: Float[Tensor, "B Hq T D"]
    key: Float[Tensor, "B Hkv T D"]
    value: Float[Tensor, "B Hkv T Dv"]
    starts: Int[Tensor, " B"] | None = None

    @property
    def batch_size(self) -> int:
        """B, the number of sequences."""
        return self.query.shape[0]

    @property
    def length(self) -> int:
        """T, the columns of the batch, padding included."""
        return self.query.shape[2]

    def lengths(self, columns: int) -> Int[Tensor, " B"]:
        """Tokens of each sequence among the first `columns` columns, `[B]` int64."""
        starts = torch.zeros(self.batch_size, dtype=torch.int64) if self.starts is None else self.starts.cpu()
        return (columns - starts).clamp_min(0)

    def layer_spec(self, layer_idx: int = LAYER_IDX) -> LayerSpec:
        """The layer that such a stream comes from; queries and keys may as well have been rotated."""
        dim = self.key.shape[3]
        return LayerSpec(
            layer_idx=layer_idx,
            num_attention_heads=self.query.shape[1],
            num_key_value_heads=self.key.shape[1],
            head_dim=dim,
            dtype=self.key.dtype,
            device=self.key.device,
            batch_size=self.batch_size,
            rotary=Rotary(10000.0 ** -(torch.arange(0, dim, 2, device=self.key.device) / dim)),
        )

    def rows(self, index: Tensor) -> "Stream":
        """The sequences `index` (integers or a mask), in that order."""
        starts = None if self.starts is None else self.starts[index]
        return Stream(self.query[index], self.key[index], self.value[index], starts)

    def alone(self, row: int) -> "Stream":
        """One sequence of the batch without its padding."""
        start = 0 if self.starts is None else int(self.starts[row])
        query, key, value = (part[row : row + 1, :, start:] for part in (self.query, self.key, self.value))
        return Stream(query, key, value)

    def diverging(self, columns: int, seed: int) -> "Stream":
        """The same sequences up to `columns`, others after: what a rejected draft was."""
        other = random_stream(seed, like=self)
        parts = ((self.query, other.query), (self.key, other.key), (self.value, other.value))
        query, key, value = (torch.cat([a[:, :, :columns], b[:, :, columns:]], dim=2) for a, b in parts)
        return Stream(query, key, value, self.starts)

    def to(self, target: torch.dtype | torch.device | str) -> "Stream":
        """The same numbers in another type, or on another device."""
        query, key, value = (part.to(target) for part in (self.query, self.key, self.value))
        return Stream(query, key, value, None if self.starts is None else self.starts.to(query.device))

    def logical(self, columns: int) -> tuple[Float[Tensor, "B Hkv L D"], Float[Tensor, "B Hkv L Dv"]]:
        """Keys and values of the first `columns` columns by logical position, 0 past a sequence's end.

        Plain slices, owing nothing to KVView.
        """
        lengths = self.lengths(columns).tolist()
        longest = max(lengths)
        parts = []
        for base in (self.key, self.value):
            moved = base.new_zeros(self.batch_size, base.shape[1], longest, base.shape[3])
            for row, length in enumerate(lengths):
                moved[row, :, :length] = base[row, :, columns - length : columns]
            parts.append(moved)
        return parts[0], parts[1]


def random_stream(
    seed: int,
    *,
    length: int = 0,
    batch: int = 1,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 64,
    lengths: Sequence[int] | None = None,
    correlation: float = 0.97,
    jump: float = 0.15,
    like: Stream | None = None,
) -> Stream:
    """Random sequences whose queries drift as they do in decoding.

    A query is `correlation` of the one before it and noise for the rest, which makes `correlation` their cosine; with
    probability `jump` a head breaks off and starts anew.

    Args:
        seed: Same seed, same stream.
        length: T.
        batch: B.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv.
        head_dim: D.
        lengths: Tokens of each sequence in a left-padded batch; gives B, and T unless given.
        correlation: 0 for independent queries.
        jump: 0 for queries that only drift.
        like: Take sizes, padding, type and device from this stream instead.
    """
    starts = None
    if like is not None:
        batch, num_attention_heads, length, head_dim = like.query.shape
        num_key_value_heads, starts = like.key.shape[1], None if like.starts is None else like.starts.cpu()
    elif lengths is not None:
        batch, length = len(lengths), length or max(lengths)
        starts = torch.tensor([length - n for n in lengths], dtype=torch.int64)
    if length < 1 or (starts is not None and (bool((starts < 0).any()) or bool((starts >= length).any()))):
        raise InputError("length", expected="1 or more, and no shorter than a sequence", got=length, remedy="Give it.")
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = noise(batch, num_attention_heads, length, head_dim)
    jumps = torch.rand(batch, num_attention_heads, length, 1, generator=generator) < jump
    kept = (1 - correlation**2) ** 0.5
    for t in range(1, length):
        drifted = correlation * query[:, :, t - 1] + kept * query[:, :, t]
        query[:, :, t] = torch.where(jumps[:, :, t], query[:, :, t], drifted)
    key = noise(batch, num_key_value_heads, length, head_dim)
    value = noise(batch, num_key_value_heads, length, head_dim)
    stream = Stream(_on_grid(query), _on_grid(key), _on_grid(value), starts)
    if starts is not None:
        padding = (torch.arange(length) < starts[:, None])[:, None, :, None]
        for part in (stream.query, stream.key, stream.value):
            part.masked_fill_(padding, float("nan"))
    return stream if like is None else stream.to(like.query.dtype).to(like.query.device)


def _on_grid(values: Tensor) -> Tensor:
    return (values * GRID).round_().div_(GRID).clamp_(-LIMIT, LIMIT)


HOSTILE = (
    "nan query",
    "inf query",
    "zero query",
    "nan key",
    "inf key",
    "-inf key",
    "zero key",
    "equal keys",
    "clustered keys",
    "huge keys",
)


def hostile_stream(stream: Stream, kind: str) -> Stream:
    """The stream with something in it that a selector must survive, one of `HOSTILE`.

    Single tokens go bad at every seventh position from 3 on, so that good ones follow and a selector can be seen to
    recover; "equal keys" ties all scores, "clustered keys" ties them in four lumps.
    """
    query, key = stream.query.clone(), stream.key.clone()
    bad = slice(3, None, 7)
    match kind:
        case "nan query":
            query[:, :, bad, 0] = float("nan")
        case "inf query":
            query[:, :, bad, 0] = float("inf")
        case "zero query":
            query[:, :, bad] = 0.0
        case "nan key":
            key[:, :, bad, 0] = float("nan")
        case "inf key":
            key[:, :, bad, 0] = float("inf")
        case "-inf key":
            key[:, :, bad, 0] = float("-inf")
        case "zero key":
            key[:, :, bad] = 0.0
        case "equal keys":
            key[:] = key[:, :, -1:]
        case "clustered keys":
            key = key[:, :, -4:][:, :, torch.arange(stream.length) % min(4, stream.length)]
        case "huge keys":
            key[:, :, bad] *= 64.0
        case _:
            raise InputError("kind", expected=f"one of {', '.join(HOSTILE)}", got=repr(kind), remedy="Choose one.")
    if stream.starts is not None:
        columns = torch.arange(stream.length, device=stream.starts.device)
        padding = (columns < stream.starts[:, None])[:, None, :, None]
        query, key = (part.masked_fill(padding, float("nan")) for part in (query, key))
    return dataclasses.replace(stream, query=query, key=key)


def hostile_scores(seed: int, *shape: int) -> Tensor:
    """Scores with ties, clusters, NaN and both infinities, float32 of that shape."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, generator=generator)
    clustered = (scores * 2).round() / 2
    kind = torch.randint(0, 12, shape, generator=generator)
    scores = torch.where(kind < 6, clustered, scores)
    for case, special in itertools.zip_longest(range(8, 12), (float("nan"), float("inf"), float("-inf"), 0.0)):
        scores = scores.masked_fill(kind == case, special)
    return scores


# Lays keys and values of a batch, `[B, Hkv, T, D]` with its starts, out in memory.
Layout = Callable[[Tensor, Tensor, Tensor | None], KVView]


@dataclass(frozen=True)
class DenseLayout:
    """One row per sequence, with room to grow that holds NaN.

    Attributes:
        spare: Columns allocated past the last token; 0 makes keys contiguous.
        channel_major: Channels lie before tokens in memory.
        static: The view shows the spare columns too, and where sequences end is known on their device alone.
    """

    spare: int = 5
    channel_major: bool = False
    static: bool = False

    def __call__(self, key: Tensor, value: Tensor, starts: Tensor | None) -> KVView:
        """Lay them out."""
        length = key.shape[2]
        starts = None if starts is None else starts.clamp_max(length)  # sequences that have not begun
        key, value = self._room(key), self._room(value)
        if not self.static:
            return KVView.dense(key[:, :, :length], value[:, :, :length], starts=starts)
        begin = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device) if starts is None else starts
        return KVView.dense(key, value, starts=starts, lengths=length - begin)

    def _room(self, base: Tensor) -> Tensor:
        length = base.shape[2]
        order = (0, 1, 3, 2) if self.channel_major else (0, 1, 2, 3)
        shape = [base.shape[0], base.shape[1], length + self.spare, base.shape[3]]
        room = base.new_full([shape[axis] for axis in order], float("nan")).permute(order)
        room[:, :, :length] = base
        return room


@dataclass(frozen=True)
class PagedLayout:
    """Blocks in shuffled order, with blocks of nobody's among them; what no sequence owns holds NaN.

    Attributes:
        block_size: P, tokens per block.
        order: What lies outermost in a block: heads, tokens or channels (last for heads: tokens, then channels).
        seed: Of the shuffle.
    """

    block_size: int = 4
    order: Literal["head", "token", "channel"] = "head"
    seed: int = 0

    def __call__(self, key: Tensor, value: Tensor, starts: Tensor | None) -> KVView:
        """Lay them out."""
        batch, _, length, _ = key.shape
        blocks = -(-length // self.block_size)
        generator = torch.Generator().manual_seed(self.seed)
        total = batch * blocks + 3
        table = torch.randperm(total, generator=generator)[: batch * blocks].view(batch, blocks)
        begin = torch.zeros(batch, dtype=torch.int64) if starts is None else starts.cpu()
        unused = (torch.arange(blocks) + 1) * self.block_size <= begin[:, None]
        keys, values = (self._laid(base, table, total) for base in (key, value))
        # Blocks that hold padding alone, and those past the end, are nobody's business.
        block_table = torch.cat([table.masked_fill(unused, NO_BLOCK), torch.full((batch, 1), NO_BLOCK)], dim=1)
        lengths = (length - begin).clamp_min(0)
        return KVView.paged(
            keys, values, block_table=block_table, lengths=lengths, max_length=max(1, int(lengths.max())), starts=starts
        )

    def _laid(self, base: Tensor, table: Tensor, total: int) -> Tensor:
        batch, heads, length, dim = base.shape
        blocks, size = table.shape[1], self.block_size
        # The axes (block, head, token, channel) in the order they are stored; each such swap undoes itself.
        order = {"head": (0, 1, 2, 3), "token": (0, 2, 1, 3), "channel": (0, 1, 3, 2)}[self.order]
        shape = (total, heads, size, dim)
        pool = base.new_full([shape[axis] for axis in order], float("nan")).permute(order)
        padded = base.new_full((batch, heads, blocks * size, dim), float("nan"))
        padded[:, :, :length] = base
        pool[table.flatten()] = padded.view(batch, heads, blocks, size, dim).transpose(1, 2).flatten(0, 1)
        return pool
