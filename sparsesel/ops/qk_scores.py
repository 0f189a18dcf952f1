"""Scores of every key, each key read once for the G query heads that share it."""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops.launch import block_channels, block_tokens, kv_arguments, launch, query_arguments
from sparsesel.ops.primitives import load_group, load_rows, products, sequence, token_offsets
from sparsesel.ops.split_k import num_splits, part

# Rows of scores begin at multiples of so many: what a kernel is compiled for then does not change from step to step.
_ROW = 16


@triton.jit
def qk_scores_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_scores, s_scores, p_maxima, s_maxima, num_splits, scale,
    G: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, FILL: tl.constexpr, TILE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys of a key-value head."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, start = sequence(p_lengths, p_starts, i_b)
    begin, end = part(length, i_split, num_splits, max(TILE, BLOCK_N))  # tiles lie in one part each
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g[:, None] < G
    o_row = ((i_b * tl.num_programs(1) + i_h) * G + o_g[:, None]).to(tl.int64)
    p_scores += o_row * s_scores
    if TILE > 0:
        p_maxima += o_row * s_maxima
    b_best = tl.full([BLOCK_G, 1], float("-inf"), tl.float32)
    for at in range(begin, end, BLOCK_N):
        o_n = at + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_h.to(tl.int64) * s_kh
        b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = products(b_q, b_k) * scale  # [G, N]
        tl.store(p_scores + o_n[None, :], b_s, mask=m_g & m_n[None, :])
        if TILE > 0:
            b_s = tl.where(m_n[None, :] & (b_s == b_s), b_s, float("-inf"))
            if TILE < BLOCK_N:
                b_tile = tl.max(tl.reshape(b_s, [BLOCK_G, BLOCK_N // TILE, TILE]), axis=2)
                o_t = at // TILE + tl.arange(0, BLOCK_N // TILE)
                tl.store(p_maxima + o_t[None, :], b_tile, mask=m_g & (o_t[None, :] * TILE < end))
            else:
                b_best = tl.maximum(b_best, tl.max(b_s, axis=1, keep_dims=True))
                last = ((at + BLOCK_N) % TILE == 0) | (at + BLOCK_N >= end)
                tl.store(p_maxima + at // TILE, b_best, mask=m_g & last)
                b_best = tl.where(last, float("-inf"), b_best)
    if FILL:
        first, last = part(s_scores - length, i_split, num_splits, BLOCK_N)
        for at in range(length + first, length + last, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)[None, :]
            tl.store(p_scores + o_n, float("-inf"), mask=m_g & (o_n < length + last))


def qk_scores(query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float) -> Float[Tensor, "B Hq L"]:
    """Scaled scores of every key; see `reference.qk_scores`. Rows may lie further apart than they are long."""
    return _scores(query, kv, scale, fill=not kv.uniform)[0]


def scores_and_maxima(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float, tile: int
) -> tuple[Float[Tensor, "B Hq L"], Float[Tensor, "B Hq N"] | None]:
    """Scaled scores of every key, and the largest of each `tile` consecutive ones (NaN counted as -inf).

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        scale: Factor of the scores.
        tile: A power of two, or 0 for no maxima.

    Returns:
        Both float32 and undefined from a sequence's length on; N = ⌈L / tile⌉.
    """
    return _scores(query, kv, scale, tile=tile)


def _scores(
    query: Tensor, kv: KVView, scale: float, *, fill: bool = False, tile: int = 0
) -> tuple[Tensor, Tensor | None]:
    batch, num_heads = query.shape[:2]

    def rows(count: int) -> Tensor:
        room = torch.empty(batch, num_heads, -(-count // _ROW) * _ROW, dtype=torch.float32, device=query.device)
        return room[:, :, :count]

    scores = rows(kv.max_length)
    maxima = rows(-(-kv.max_length // tile)) if tile else None
    splits = num_splits(batch * kv.num_heads, kv.max_length)
    # Wide 16-bit keys become float32 for queries of that type: none but those at work fit into registers.
    is_wide = query.dtype != kv.keys.dtype and block_channels(kv.keys.shape[3]) > 128
    # Of narrow float32 keys the assembler, left to choose, spills some registers; of wide ones, where it is told.
    is_narrow = kv.keys.dtype == torch.float32 and kv.keys.shape[3] <= 32
    launch(
        qk_scores_kernel,
        (splits, kv.num_heads, batch),
        **query_arguments(query, kv),
        **kv_arguments(kv, values=False),
        p_scores=scores,
        s_scores=scores.stride(1),
        p_maxima=maxima,
        s_maxima=0 if maxima is None else maxima.stride(1),
        num_splits=splits,
        scale=scale,
        FILL=fill,
        TILE=tile,
        BLOCK_N=block_tokens(kv.keys),
        num_stages=1 if is_wide else 3,
        max_registers=168 if is_narrow else 0,
    )
    return scores, maxima
