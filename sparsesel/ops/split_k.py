"""Attention split along the keys: how many parts, and how their results become one.

A decode step has few queries, so one program per head would leave most of a device idle. Each part computes softmax
attention over its own keys and the log of the sum of its exponentials; from these, the whole follows exactly.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from sparsesel.ops.launch import launch
from sparsesel.ops.primitives import rounded

# Programs that keep a large device busy, and keys that make a part worth a program of its own.
_PROGRAMS = 512
_LEAST_KEYS = 256
_MOST = 128


def num_splits(programs: int, keys: int, *, least: int = _LEAST_KEYS) -> int:
    """Parts for attention that has `programs` programs (rows × heads) per part, over up to `keys` keys.

    A part has `least` keys or more, but for the last one.
    """
    return max(1, min(-(-_PROGRAMS // max(1, programs)), -(-keys // least), _MOST))


@triton.jit
def part(length, i_split, num_splits, BLOCK_N: tl.constexpr):
    """First and last key (exclusive) of one part: equal numbers of whole blocks."""
    size = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    return tl.minimum(i_split * size, length), tl.minimum((i_split + 1) * size, length)


@triton.jit
def store_part(
    p_out, p_lse, b_acc, b_max, b_sum, count, i_row, i_split, num_splits, G: tl.constexpr, DIM: tl.constexpr
):
    """Write what one part gives for the heads `i_row` to `i_row + G`, not yet divided by its sum.

    Args:
        p_out: `[rows, S, Dv]` float32.
        p_lse: `[rows, S, 2]` float32: maximum and sum of exponentials relative to it, -1 for a part without keys.
        b_acc: `[BLOCK_G, BLOCK_D]`.
        b_max: `[BLOCK_G]`.
        b_sum: `[BLOCK_G]`.
        count: Keys of the part, a number or `[BLOCK_G]`.
        i_row: First head, counted through the batch.
        i_split: The part.
        num_splits: S.
        G: Heads.
        DIM: Dv.
    """
    o_g, o_d = tl.arange(0, b_acc.shape[0]), tl.arange(0, b_acc.shape[1])
    o_row = (i_row + o_g).to(tl.int64) * num_splits + i_split
    m_g = o_g < G
    tl.store(p_lse + o_row * 2, b_max, mask=m_g)
    tl.store(p_lse + o_row * 2 + 1, tl.where(count > 0, b_sum, -1.0), mask=m_g)
    tl.store(p_out + o_row[:, None] * DIM + o_d[None, :], b_acc, mask=m_g[:, None] & (o_d[None, :] < DIM))


@triton.jit
def whole(p_part, p_lse, i_row, o_d, num_splits, DIM: tl.constexpr, BLOCK_S: tl.constexpr):
    """What the parts of head `i_row` (int64) come to at some channels, float32; 0 where there was no key at all."""
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_splits
    b_max = tl.load(p_lse + (i_row * num_splits + o_s) * 2, mask=m_s, other=float("-inf"))
    b_sum = tl.load(p_lse + (i_row * num_splits + o_s) * 2 + 1, mask=m_s, other=-1.0)
    top = tl.max(b_max, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    m_real = b_sum != -1.0
    b_scale = tl.where(m_real, tl.exp(b_max - top), 0.0)
    o = (i_row * num_splits + o_s[:, None]) * DIM + o_d[None, :]
    b_part = tl.load(p_part + o, mask=m_real[:, None] & (o_d[None, :] < DIM), other=0.0)  # [S, D]
    # Keys whose scores are all -inf give 0 / 0, as a softmax has it; no keys at all give 0.
    total = tl.where(tl.sum(m_real.to(tl.int32), axis=0) > 0, tl.sum(b_sum * b_scale, axis=0), 1.0)
    return tl.sum(b_part * b_scale[:, None], axis=0) / total


@triton.jit
def combine_kernel(p_part, p_lse, p_o, num_splits, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per block of channels of a head of a sequence."""
    i_row, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b_o = whole(p_part, p_lse, i_row, o_d, num_splits, DIM, BLOCK_S)
    tl.store(p_o + i_row * DIM + o_d, rounded(b_o, p_o), mask=o_d < DIM)


def combine(
    parts: Float[Tensor, "rows S D"], lse: Float[Tensor, "rows S 2"], dtype: torch.dtype
) -> Float[Tensor, "rows D"]:
    """The whole from its parts, see `store_part`; 0 for a row without any key."""
    rows, splits, dim = parts.shape
    output = torch.empty(rows, dim, dtype=dtype, device=parts.device)
    # Few channels each: of as many parts as there may be, a tile of all of them would not fit into registers.
    block = min(64, triton.next_power_of_2(dim))
    launch(
        combine_kernel,
        (rows, triton.cdiv(dim, block)),
        p_part=parts,
        p_lse=lse,
        p_o=output,
        num_splits=splits,
        DIM=dim,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=block,
    )
    return output
