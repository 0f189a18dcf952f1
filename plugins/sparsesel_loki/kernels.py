"""Loki's kernel, and its step: keys and queries along the components, then the K best by the operations of all.

Keys along the components are keys of r channels, and are scored as keys are.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops.launch import (
    BLOCK_G,
    block_channels,
    block_tokens,
    kv_arguments,
    launch,
    query_arguments,
    topk_arguments,
)
from sparsesel.ops.primitives import count_step, products, rounded, row_budget, sequence, token_offsets
from sparsesel.ops.qk_scores import scores_and_maxima
from sparsesel.ops.split_k import num_splits, part
from sparsesel.ops.topk import largest, tile_size
from sparsesel_loki.state import LokiState

COUNTERS = ("steps", "selected", "visible", "prompt_calibrated")

# Components per program, the rows of a tensor core's tile, and channels multiplied in one go: each warp holds what a
# tile has of them.
_BLOCK_R = 16
_BLOCK_D = 32


@triton.jit
def along(p, o_rows, m_rows, s_d, p_basis, o_r, DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows at these offsets along some components, `[R, N]` float32; 0 where either does not exist."""
    b_out = tl.zeros([o_r.shape[0], o_rows.shape[0]], tl.float32)
    for at in range(0, DIM, BLOCK_D):
        o_d = (at + tl.arange(0, BLOCK_D)[None, :]).to(tl.int64)
        m_basis = (o_r[:, None] < RANK) & (o_d < DIM)
        b_basis = tl.load(p_basis + o_d * RANK + o_r[:, None], mask=m_basis, other=0.0)  # [R, D]
        b = tl.load(p + o_rows[:, None] + o_d * s_d, mask=m_rows[:, None] & (o_d < DIM), other=0.0)  # [N, D]
        b_out += products(b_basis, b)
    return b_out


@triton.jit
def project_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_indexed, p_basis, p_reduced, held, parts,
    p_rotated, p_topk, topk, p_fitted, p_counts, p_counters,
    G: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for some components of a part of a key-value head's new keys, or of its queries."""
    i_part, i_b = tl.program_id(0), tl.program_id(2)
    tiles = tl.cdiv(RANK, BLOCK_R)
    i_h, i_r = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    kv_heads = tl.num_programs(1) // tiles
    i_kv = (i_b * kv_heads + i_h).to(tl.int64)
    length, start = sequence(p_lengths, p_starts, i_b)
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < RANK
    p_basis += i_kv * (DIM * RANK)
    if i_part < parts:
        indexed = tl.load(p_indexed + i_b).to(tl.int32)
        begin, end = part(tl.maximum(length - indexed, 0), i_part, parts, BLOCK_N)
        for at in range(indexed + begin, indexed + end, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)
            m_n = o_n < indexed + end
            o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_h.to(tl.int64) * s_kh
            b_along = rounded(along(p_k, o_k, m_n, s_kd, p_basis, o_r, DIM, RANK, BLOCK_D), p_reduced)  # [R, N]
            o_out = (i_kv * held + o_n[None, :]) * RANK + o_r[:, None]
            tl.store(p_reduced + o_out, b_along, mask=m_r[:, None] & m_n[None, :])
    elif p_q is not None:
        o_g = tl.arange(0, BLOCK_G)
        m_g = o_g < G
        o_row = i_kv * G + o_g
        o_q = i_b.to(tl.int64) * s_qb + (i_h * G + o_g).to(tl.int64) * s_qh
        b_along = along(p_q, o_q, m_g, s_qd, p_basis, o_r, DIM, RANK, BLOCK_D)  # [R, G]
        tl.store(p_rotated + o_row[None, :] * RANK + o_r[:, None], b_along, mask=m_r[:, None] & m_g[None, :])
        if i_r == 0:
            budget = row_budget(p_topk, topk, i_b, length)
            b_one = tl.full([BLOCK_G], 1, tl.int32)
            tl.store(p_counts + o_row, b_one * budget, mask=m_g)
            count_step(p_counters, i_h * G, kv_heads * G, budget, length, G, BLOCK_G)
            if p_fitted is not None:
                b_fitted = b_one * (tl.load(p_fitted + i_b) > 0).to(tl.int32)
                p_sum = p_counters + 3 * kv_heads * G + i_h * G + o_g
                tl.atomic_add(p_sum, b_fitted.to(tl.float64), mask=m_g, sem="relaxed")


def record(kv: KVView, state: LokiState) -> None:
    """Take the keys from `state.indexed` on into `state.reduced`, in place and in room that is there."""
    _project(kv, state, 0)


def discover(
    topk: int | str, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: LokiState, *, scale: float
) -> tuple[Int[Tensor, "B Hq 1 K"], Int[Tensor, "B Hq 1"]]:
    """The K best keys of each query head along the components, new keys among them, which are taken in.

    Args:
        topk: Budget as configured.
        query: Post-RoPE.
        kv: Keys and values.
        state: With components, and room for the keys.
        scale: Factor of the scores.

    Returns:
        int32 positions, ascending, padded with -1, and how many there are.
    """
    (batch, heads), device = query.shape[:2], query.device
    budget = topk_arguments(topk, kv)
    rank = state.basis.shape[3]
    rotated = torch.empty(batch, heads, 1, rank, dtype=torch.float32, device=device)
    counts = torch.empty(batch, heads, 1, dtype=torch.int32, device=device)
    names = COUNTERS if state.from_prompt else COUNTERS[:3]
    outputs = {"p_rotated": rotated, "p_counts": counts, "p_counters": state.counters.table(names, heads, device)}
    _project(kv, state, 1, **query_arguments(query, kv), **budget, **outputs)
    reduced = state.seen(kv.max_length)
    along = KVView(reduced, reduced, kv.lengths, kv.max_length, uniform=kv.uniform)
    tile = tile_size(kv.max_length, budget["topk"])
    scores, maxima = scores_and_maxima(rotated, along, scale=scale, tile=tile)
    indices, _ = largest(
        scores.flatten(0, 1),
        kv.lengths.contiguous(),
        **budget,
        widest=budget["topk"],
        maxima=None if maxima is None else maxima.flatten(0, 1),
    )
    return indices.view(batch, heads, 1, -1), counts


def _project(kv: KVView, state: LokiState, queries: int, **arguments: Any) -> None:
    """Launch the kernel with `queries` programs for queries beside those for new keys."""
    nothing = dict.fromkeys(("p_q", "p_rotated", "p_topk", "p_counts", "p_counters"))
    shape = {"G": 1, "DIM": kv.head_dim, "BLOCK_G": BLOCK_G}
    rows, kv_heads, held, rank = state.reduced.shape
    parts = num_splits(rows * kv_heads, state.lacking(kv))
    block = min(_BLOCK_D, block_channels(kv.head_dim))
    launch(
        project_kernel,
        (parts + queries, kv_heads * triton.cdiv(rank, _BLOCK_R), rows),
        max_registers=128,
        **nothing | {"s_qb": 0, "s_qh": 0, "s_qd": 0, "topk": 0} | shape | arguments | {"BLOCK_D": block},
        **kv_arguments(kv, values=False),
        p_indexed=state.indexed,
        p_basis=state.basis,
        p_reduced=state.reduced,
        held=held,
        parts=parts,
        p_fitted=state.fitted if state.from_prompt else None,
        RANK=rank,
        BLOCK_N=block_tokens(kv.keys),
        BLOCK_R=_BLOCK_R,
    )
