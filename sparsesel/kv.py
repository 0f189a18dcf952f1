"""KVView: the keys and values of one layer, wherever and however they lie.

Positions are *logical* everywhere: position 0 is a sequence's first token, whatever padding precedes it in a
batch and whichever block of a paged cache holds it. Only this module (and `ops/primitives.py`, in kernels) turns
a logical position into an address.
"""

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.errors import InputError


@dataclass(frozen=True)
class KVView:
    """Read-only view of a layer's cache, one row per sequence. Build it with `dense` or `paged`.

    Attributes:
        keys: Dense `[B, Hkv, T, D]`, or paged `[N, Hkv, P, D]` (N blocks of P tokens); any strides.
        values: As `keys`.
        lengths: `[B]` int64, visible tokens of each sequence.
        max_length: Host-side upper bound of `lengths`, equal to it when `uniform`.
        uniform: Every sequence has exactly `max_length` tokens, so nothing needs a mask.
        starts: `[B]` int64 column of each sequence's position 0, or None where that is 0 for all.
        block_table: `[B, M]` int64 block of each logical block, or None when dense.
        aligned: Every sequence ends at column `max_length`, so that all grow by as many tokens as it does.
    """

    keys: Float[Tensor, "B_or_N Hkv T_or_P D"]
    values: Float[Tensor, "B_or_N Hkv T_or_P Dv"]
    lengths: Int[Tensor, " B"]
    max_length: int
    uniform: bool
    starts: Int[Tensor, " B"] | None = None
    block_table: Int[Tensor, "B M"] | None = None
    aligned: bool = False

    @classmethod
    def dense(
        cls,
        keys: Float[Tensor, "B Hkv T D"],
        values: Float[Tensor, "B Hkv T Dv"],
        *,
        starts: Int[Tensor, " B"] | None = None,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> "KVView":
        """View keys and values that lie one row per sequence.

        Args:
            keys: Post-RoPE keys, the current token's included; any strides.
            values: Their values.
            starts: Column of each sequence's first token in a left-padded batch, T where there is none yet.
            lengths: Visible tokens of each sequence, from its first one on, where T columns are room to grow; no more
                than fit behind `starts`. They stay on the device and are not read here, so that a step captured in a
                CUDA graph finds those of its replay. Without them every sequence ends at T.

        Raises:
            InputError: Shapes that do not belong together.
        """
        _check_pair(keys, values)
        batch, _, columns, _ = keys.shape
        for name, given in (("starts", starts), ("lengths", lengths)):
            if given is not None and given.shape != (batch,):
                raise InputError(name, expected=f"shape ({batch},)", got=tuple(given.shape), remedy="One per row.")
        aligned = lengths is None
        if starts is not None:
            starts = starts.to(device=keys.device, dtype=torch.int64)
        if lengths is not None:
            lengths = lengths.to(device=keys.device, dtype=torch.int64)
        else:
            lengths = torch.full((batch,), columns, dtype=torch.int64, device=keys.device)
            lengths = lengths if starts is None else lengths - starts
        if starts is not None:
            starts = starts.clamp_max(columns - 1)  # a sequence without a token yet reads some existing column
        return cls(keys, values, lengths, columns, uniform=aligned and starts is None, starts=starts, aligned=aligned)

    @classmethod
    def paged(
        cls,
        keys: Float[Tensor, "N Hkv P D"],
        values: Float[Tensor, "N Hkv P Dv"],
        *,
        block_table: Int[Tensor, "B M"],
        lengths: Int[Tensor, " B"],
        max_length: int,
        starts: Int[Tensor, " B"] | None = None,
    ) -> "KVView":
        """View keys and values that lie in blocks of P tokens.

        Args:
            keys: Blocks as (block, head, token, channel); permute a channel-major layout into this order, strides
                are respected.
            values: Likewise.
            block_table: Block of each sequence's i-th P columns; entries past its length are not read.
            lengths: Visible tokens of each sequence, 1 … `max_length`.
            max_length: Upper bound of `lengths`, known on the host.
            starts: Column within the block table where each sequence's position 0 lies.

        Raises:
            InputError: Shapes that do not belong together.
        """
        _check_pair(keys, values)
        batch = block_table.shape[0]
        if lengths.shape != (batch,):
            raise InputError(
                "lengths", expected=f"shape ({batch},)", got=tuple(lengths.shape), remedy="One per sequence."
            )
        if not 0 < max_length <= block_table.shape[1] * keys.shape[2]:
            raise InputError(
                "max_length",
                expected=f"1 to {block_table.shape[1] * keys.shape[2]}, what the block table can hold",
                got=max_length,
                remedy="Give a longer block table or the true length.",
            )
        device = keys.device
        return cls(
            keys,
            values,
            lengths.to(device=device, dtype=torch.int64),
            max_length,
            uniform=False,
            starts=None if starts is None else starts.to(device=device, dtype=torch.int64),
            block_table=block_table.to(device=device, dtype=torch.int64),
        )

    @property
    def batch_size(self) -> int:
        """B, the number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_heads(self) -> int:
        """Hkv, the number of key-value heads."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """D, the channels of a key."""
        return self.keys.shape[3]

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self.keys.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self.keys.dtype

    def drop_last(self, count: int) -> "KVView":
        """The same sequences without their last `count` tokens, or without any where there are fewer."""
        if count == 0:
            return self
        lengths = (self.lengths - count).clamp_min(0)
        return dataclasses.replace(self, lengths=lengths, max_length=self.max_length - count)

    def visible(self) -> Bool[Tensor, "B L"]:
        """True at the positions that exist, L = `max_length`."""
        return torch.arange(self.max_length, device=self.device) < self.lengths[:, None]

    def logical_keys(self) -> Float[Tensor, "B Hkv L D"]:
        """All keys by logical position, L = `max_length`: a view if possible; what lies past a length is undefined."""
        return self._logical(self.keys)

    def logical_values(self) -> Float[Tensor, "B Hkv L Dv"]:
        """All values by logical position; see `logical_keys`."""
        return self._logical(self.values)

    def gather_keys(self, positions: Int[Tensor, "B Hkv N"]) -> Float[Tensor, "B Hkv N D"]:
        """Keys at logical positions; a position outside [0, `max_length`) reads some existing key, mask it yourself."""
        return self._gather(self.keys, positions)

    def gather_values(self, positions: Int[Tensor, "B Hkv N"]) -> Float[Tensor, "B Hkv N Dv"]:
        """Values at logical positions; see `gather_keys`."""
        return self._gather(self.values, positions)

    def _logical(self, base: Tensor) -> Tensor:
        if self.uniform:
            return base[:, :, : self.max_length]
        positions = torch.arange(self.max_length, device=self.device).expand(self.batch_size, self.num_heads, -1)
        return self._gather(base, positions)

    def _gather(self, base: Tensor, positions: Tensor) -> Tensor:
        # [B, Hkv, N]; clamped into the sequence, so that padding and -1 stay within allocated memory.
        last = (self.lengths - 1).clamp_min(0)[:, None, None]
        columns = torch.minimum(positions.to(torch.int64).clamp_min(0), last)
        if self.starts is not None:
            columns = columns + self.starts[:, None, None]
        if self.block_table is None:
            rows = torch.arange(self.batch_size, device=self.device)[:, None, None]
        else:
            block = base.shape[2]
            sequence = torch.arange(self.batch_size, device=self.device)[:, None, None]
            rows = self.block_table[sequence, columns // block]
            columns = columns % block
        heads = torch.arange(self.num_heads, device=self.device)[None, :, None]
        return _read_rows(base, rows, heads, columns)


def _read_rows(base: Tensor, rows: Tensor, heads: Tensor, columns: Tensor) -> Tensor:
    """`base[rows, heads, columns]`, by row copies of the flat storage where the strides allow it (much faster)."""
    dim = base.shape[3]
    row, head, column, channel = base.stride()
    if channel != 1 or row % dim or head % dim or column % dim or base.numel() == 0:
        return base[rows, heads, columns]
    extent = 1 + sum(
        (size - 1) * (stride // dim) for size, stride in zip(base.shape[:3], base.stride()[:3], strict=True)
    )
    flat = base.as_strided((extent, dim), (dim, 1))
    index = rows * (row // dim) + heads * (head // dim) + columns * (column // dim)
    return flat.index_select(0, index.reshape(-1)).view(*index.shape, dim)


def _check_pair(keys: Tensor, values: Tensor) -> None:
    if keys.ndim != 4 or values.shape[:3] != keys.shape[:3] or values.ndim != 4:
        raise InputError(
            "keys, values",
            expected="four dimensions, equal in all but the channels",
            got=f"{tuple(keys.shape)} and {tuple(values.shape)}",
            remedy="Pass one layer's keys and values.",
        )
    if keys.dtype != values.dtype or keys.device != values.device:
        raise InputError(
            "keys, values",
            expected="one dtype and one device",
            got=f"{keys.dtype} on {keys.device} and {values.dtype} on {values.device}",
            remedy="Convert one of them.",
        )
