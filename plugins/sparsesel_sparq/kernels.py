"""SparQ's kernels: what new tokens add to the state, approximate scores, what they choose, and the mean value's share.

A step is: `append`, `approximate`, `choose`, then `reallocated_attention` (or attention alone). Approximate scores are
written once with softmax statistics of each part of the keys; from these every weight follows by one exponential, and
so does what the chosen keys leave out, 1 - α, as what is missing of the sum over all.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops.launch import block_channels, block_tokens, kv_arguments, launch, query_arguments, topk_arguments
from sparsesel.ops.primitives import (
    keep_largest,
    load_group,
    load_rows,
    online_softmax,
    products,
    rounded,
    row_budget,
    sequence,
    token_offsets,
)
from sparsesel.ops.sparse_attention import sparse_attention_parts
from sparsesel.ops.split_k import num_splits, whole
from sparsesel.ops.topk import largest, tile_size

# Keys that one program scores in one go. Capacities of the component-major copy are multiples of it, and larger than
# any length, so that whole tiles can be read.
_KEYS = 64
# Components of them that are multiplied in one go.
_COMPONENTS = 64
# Weights that one program sums over a group in one go, and chosen keys whose weights it sums.
_WEIGHTS = 128
_CHOSEN = 512


@dataclass(frozen=True)
class Approximation:
    """Approximate scores of every key.

    Attributes:
        scores: `[B, Hq, W]` float32 by logical position, undefined from a sequence's length on.
        stats: `[B · Hq, S, 2]` float32 maximum of each of S parts, and sum of exponentials relative to it.
    """

    scores: Float[Tensor, "B Hq W"]
    stats: Float[Tensor, "heads S 2"]

    def arguments(self) -> dict[str, Any]:
        """Both as the parameters that kernels take them by."""
        splits = self.stats.shape[1]
        return {
            "p_scores": self.scores,
            "s_scores": self.scores.stride(1),
            "p_stats": self.stats,
            "num_splits": splits,
            "BLOCK_S": triton.next_power_of_2(splits),
        }


@triton.jit
def append_kernel(
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_indexed, p_components, capacity, p_sum, p_block_sums, blocks, p_parts,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program for every num_programs-th block of SPAN positions with new tokens, of a key-value head."""
    i_part, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, start = sequence(p_lengths, p_starts, i_b)
    indexed = tl.load(p_indexed + i_b).to(tl.int32)
    i_row = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    i_kv = i_h.to(tl.int64)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    p_columns = p_components + (i_row * DIM + o_d[None, :]) * capacity  # [1, D]
    b_total = tl.zeros([BLOCK_DV], tl.float32)
    for i_block in range(indexed // SPAN + i_part, tl.cdiv(length, SPAN), tl.num_programs(0)):
        begin = tl.maximum(i_block * SPAN, indexed)
        end = tl.minimum(i_block * SPAN + SPAN, length)
        b_sum = tl.zeros([BLOCK_DV], tl.float32)
        for at in range(begin, end, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)
            m_n = o_n < end
            o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv * s_kh
            b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
            tl.store(p_columns + o_n[:, None], b_k, mask=m_n[:, None] & (o_d[None, :] < DIM))
            if p_v is not None:
                o_r = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
                b_sum += tl.sum(load_rows(p_v, o_r, m_n, s_vd, DIM_V, BLOCK_DV).to(tl.float32), axis=0)
        if p_v is not None:
            p = p_block_sums + (i_row * blocks + i_block) * DIM_V + o_v
            m_old = o_v < tl.where(indexed > i_block * SPAN, DIM_V, 0)
            tl.store(p, tl.load(p, mask=m_old, other=0.0) + b_sum, mask=o_v < tl.where(begin < end, DIM_V, 0))
            b_total += b_sum
    if p_v is not None:
        m_v = o_v < DIM_V
        if p_parts is None:
            p = p_sum + i_row * DIM_V + o_v
            tl.store(p, tl.load(p, mask=m_v) + b_total, mask=m_v)
        else:
            tl.store(p_parts + (i_row * tl.num_programs(0) + i_part) * DIM_V + o_v, b_total, mask=m_v)


@triton.jit
def add_parts_kernel(p_sum, p_parts, num_parts, DIM_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program per block of channels of a key-value head."""
    i_row, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_v = tl.arange(0, BLOCK_S), i_d * BLOCK_DV + tl.arange(0, BLOCK_DV)
    m_v = o_v < DIM_V
    o = (i_row * num_parts + o_s[:, None]) * DIM_V + o_v[None, :]
    b_part = tl.load(p_parts + o, mask=(o_s[:, None] < num_parts) & m_v[None, :], other=0.0)
    p = p_sum + i_row * DIM_V + o_v
    tl.store(p, tl.load(p, mask=m_v) + tl.sum(b_part, axis=0), mask=m_v)


def append(
    kv: KVView,
    indexed: Int[Tensor, " B"],
    components: Float[Tensor, "B Hkv D C"],
    sums: tuple[Float[Tensor, "B Hkv Dv"], Float[Tensor, "B Hkv N Dv"]] | None,
    *,
    span: int,
    lacking: int,
) -> None:
    """Take in the tokens from `indexed` on, in place.

    Args:
        kv: Keys and values.
        indexed: Tokens of each sequence that are there already.
        components: Keys, component-major, with room for those of `kv`.
        sums: Sum of all values and sums by blocks of `span` positions, or None where values do not matter.
        lacking: About how many tokens there are to take in, for the size of the launch; any number are.
        span: Positions of a block.
    """
    batch, kv_heads, dim, capacity = components.shape
    dim_v = kv.values.shape[3]
    programs = num_splits(batch * kv_heads, lacking)
    arguments = kv_arguments(kv)
    if sums is None:
        arguments["p_v"] = None
    parts = None
    if sums is not None and programs > 1:
        parts = torch.empty(batch * kv_heads, programs, dim_v, dtype=torch.float32, device=kv.device)
    launch(
        append_kernel,
        (programs, kv_heads, batch),
        **arguments,
        p_indexed=indexed,
        p_components=components,
        capacity=capacity,
        p_sum=sums[0] if sums else None,
        p_block_sums=sums[1] if sums else None,
        blocks=sums[1].shape[2] if sums else 0,
        p_parts=parts,
        num_warps=8,
        max_registers=168,
        DIM=dim,
        DIM_V=dim_v,
        SPAN=span,
        BLOCK_N=max(16, block_tokens(kv.keys) // 2),
        BLOCK_D=block_channels(dim),
        BLOCK_DV=block_channels(dim_v),
    )
    if sums is not None and parts is not None:
        block = min(64, triton.next_power_of_2(dim_v))
        launch(
            add_parts_kernel,
            (batch * kv_heads, triton.cdiv(dim_v, block)),
            p_sum=sums[0],
            p_parts=parts,
            num_parts=programs,
            DIM_V=dim_v,
            BLOCK_S=triton.next_power_of_2(programs),
            BLOCK_DV=block,
        )


@triton.jit
def query_part(p_group, s_qd, m_g, p_dims, at, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The components chosen from place `at` on, int64 `[R]`, and queries `[G, R]` there, 0 beyond the last."""
    o_r = at + tl.arange(0, BLOCK_R)
    m_r = o_r < RANK
    b_dim = tl.load(p_dims + o_r, mask=m_r, other=0).to(tl.int64)
    return b_dim, tl.load(p_group + b_dim[None, :] * s_qd, mask=m_g[:, None] & m_r[None, :], other=0.0)


@triton.jit
def choose_components_kernel(
    p_q, s_qb, s_qh, s_qd, p_merit, p_dims, p_factors, scale,
    G: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per key-value head."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    i_row = (i_b * tl.num_programs(0) + i_h).to(tl.int64)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = o_g < G
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
    b_size = tl.abs(b_q.to(tl.float32))
    tl.store(p_merit + i_row * DIM + o_d, tl.sum(b_size, axis=0), mask=o_d < DIM)
    tl.debug_barrier()
    count = tl.full([], DIM, tl.int32)
    keep_largest(p_merit + i_row * DIM, None, count, RANK, p_dims + i_row * RANK, None, BLOCK_D)
    tl.debug_barrier()
    p_group = p_q + i_b.to(tl.int64) * s_qb + (i_h * G + o_g[:, None]).to(tl.int64) * s_qh
    _, b_part = query_part(p_group, s_qd, m_g, p_dims + i_row * RANK, 0, RANK, BLOCK_R)
    b_whole = tl.sum(b_size, axis=1)
    # Of a query whose sizes sum to 0 or no finite number no share can be told.
    b_share = tl.sum(tl.abs(b_part.to(tl.float32)), axis=1) / tl.where(b_whole == 0, 1.0, b_whole)
    b_share = tl.where((b_share > 0) & (b_share < float("inf")), b_share, 1.0)
    tl.store(p_factors + i_row * G + o_g, scale / tl.sqrt(b_share), mask=m_g)


@triton.jit
def approximate_scores_kernel(
    p_q, s_qb, s_qh, s_qd, p_dims, p_factors, p_components, capacity, p_lengths,
    p_scores, s_scores, p_stats, num_splits, limit,
    G: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys of a key-value head, whose components are read once for its G query heads."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(p_lengths + i_b).to(tl.int32)
    begin, end = tiles(length, i_split, num_splits, BLOCK_N)
    i_row = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    o_g, o_r = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_R)
    m_g = o_g < G
    p_group = p_q + i_b.to(tl.int64) * s_qb + (i_h * G + o_g[:, None]).to(tl.int64) * s_qh  # [G, 1]
    p_out = p_scores + (i_row * G + o_g[:, None]) * s_scores
    p_dims += i_row * RANK
    p_components += i_row * DIM * capacity
    b_factor = tl.load(p_factors + i_row * G + o_g, mask=m_g, other=0.0)
    b_dim, b_q = query_part(p_group, s_qd, m_g, p_dims, 0, RANK, BLOCK_R)
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    for at in range(begin, end, BLOCK_N):
        o_n = at + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        b_s = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
        for at_r in tl.static_range(0, RANK, BLOCK_R):
            if RANK > BLOCK_R:  # else they are here already
                b_dim, b_q = query_part(p_group, s_qd, m_g, p_dims, at_r, RANK, BLOCK_R)
            # Past the length, but within what is allocated: without a mask reads are wide, and so are writes below.
            p = p_components + b_dim[None, :] * capacity + o_n[:, None]
            b_s += products(b_q, tl.load(p, mask=(at_r + o_r < RANK)[None, :], other=0.0))  # [G, N]
        b_s *= b_factor[:, None]
        # A score that is no number, or infinite, counts as the lowest or highest finite one.
        b_s = tl.where(b_s != b_s, -limit, tl.minimum(tl.maximum(b_s, -limit), limit))
        tl.store(p_out + o_n[None, :], b_s, mask=m_g[:, None])
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        _, _, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
    p = p_stats + ((i_row * G + o_g) * num_splits + i_split) * 2
    tl.store(p, b_max, mask=m_g)
    tl.store(p + 1, b_sum, mask=m_g)


@triton.jit
def tiles(length, i_split, num_splits, BLOCK_N: tl.constexpr):
    """First and last key (exclusive) of one part. The first is a multiple of BLOCK_N even where there are none."""
    size = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    return i_split * size, tl.minimum(i_split * size + size, length)


@triton.jit
def softmax_of(p_stats, o_row, m_row, num_splits, BLOCK_S: tl.constexpr):
    """Maximum and sum of exponentials of heads `[G]` over all parts; of one without keys 0 and 1."""
    o_s = tl.arange(0, BLOCK_S)
    p = p_stats + (o_row[:, None] * num_splits + o_s[None, :]) * 2
    m = m_row[:, None] & (o_s[None, :] < num_splits)
    b_max = tl.load(p, mask=m, other=float("-inf"))  # [G, S]
    b_top = tl.max(b_max, axis=1)
    m_real = b_top > float("-inf")
    b_top = tl.where(m_real, b_top, 0.0)
    b_sum = tl.sum(tl.load(p + 1, mask=m, other=0.0) * tl.exp(b_max - b_top[:, None]), axis=1)
    return b_top, tl.where(m_real, b_sum, 1.0)


def approximate(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    components: Float[Tensor, "B Hkv D C"],
    *,
    rank: int,
    scale: float,
) -> Approximation:
    """Score every key by the components in which the query heads of its key-value head are largest together."""
    (batch, heads), device = query.shape[:2], query.device
    kv_heads, dim, capacity = components.shape[1:]
    dims = torch.empty(batch, kv_heads, rank, dtype=torch.int32, device=device)
    factors = torch.empty(batch, heads, dtype=torch.float32, device=device)
    queries = query_arguments(query, kv)
    launch(
        choose_components_kernel,
        (kv_heads, batch),
        max_registers=128,
        **queries,
        p_merit=torch.empty(batch, kv_heads, dim, dtype=torch.float32, device=device),
        p_dims=dims,
        p_factors=factors,
        scale=scale,
        RANK=rank,
        BLOCK_R=triton.next_power_of_2(rank),
    )
    width = -(-kv.max_length // _WEIGHTS) * _WEIGHTS  # whole tiles, of keys as well
    splits = num_splits(batch * kv_heads, kv.max_length)
    # So many components are read in several parts, one after another: few registers are left to read ahead. The
    # assembler spills some of 16-bit ones where it is left to choose, and of float32 where it is told.
    is_wide = rank > 128
    registers = (0 if components.dtype == torch.float32 else 255) if is_wide else 128
    found = Approximation(
        torch.empty(batch, heads, width, dtype=torch.float32, device=device),
        torch.empty(batch * heads, splits, 2, dtype=torch.float32, device=device),
    )
    del queries["BLOCK_D"]
    launch(
        approximate_scores_kernel,
        (splits, kv_heads, batch),
        max_registers=registers,
        **queries,
        **found.arguments(),
        p_dims=dims,
        p_factors=factors,
        p_components=components,
        capacity=capacity,
        p_lengths=kv.lengths.contiguous(),
        limit=torch.finfo(torch.float32).max,
        num_stages=1 if is_wide else 2,
        RANK=rank,
        BLOCK_N=_KEYS,
        BLOCK_R=min(_COMPONENTS, block_channels(rank)),
    )
    return found


@triton.jit
def merit_kernel(
    p_scores, s_scores, p_stats, num_splits, p_lengths, p_topk, topk, local, p_merit, p_maxima, s_maxima,
    G: tl.constexpr, QUARTER: tl.constexpr, TILE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys of a key-value head; `local` counts unless QUARTER of the budget is."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(p_lengths + i_b).to(tl.int32)
    budget = row_budget(p_topk, topk, i_b, length)
    if QUARTER:
        newest = budget // 4
    else:
        newest = tl.minimum(local, budget)
    begin, end = tiles(length, i_split, num_splits, BLOCK_N)
    i_row = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < G
    o_head = i_row * G + o_g
    if begin < end:
        b_top, b_total = softmax_of(p_stats, o_head, m_g, num_splits, BLOCK_S)
        for at in range(begin, end, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)  # past the length, but within what is allocated
            p = p_scores + o_head[:, None] * s_scores + o_n[None, :]
            b_s = tl.load(p, mask=m_g[:, None], other=float("-inf"))
            b_merit = tl.sum(tl.exp(b_s - b_top[:, None]) / b_total[:, None], axis=0)  # [N]
            b_merit = tl.where(o_n >= length - newest, float("inf"), b_merit)
            tl.store(p_merit + i_row * s_scores + o_n, b_merit)
            if TILE > 0:
                b_merit = tl.where(o_n < end, b_merit, float("-inf"))
                b_best = tl.max(tl.reshape(b_merit, [BLOCK_N // TILE, TILE]), axis=1)
                o_t = at // TILE + tl.arange(0, BLOCK_N // TILE)
                tl.store(p_maxima + i_row * s_maxima + o_t, b_best)


def choose(found: Approximation, kv: KVView, *, topk: int | str, local_size: int | str) -> Int[Tensor, "B Hkv K"]:
    """Positions of the newest keys and of those with the largest weights, int32, ascending, padded with -1.

    Args:
        found: Approximate scores.
        kv: Their sequences.
        topk: K.
        local_size: How many newest keys, or "topk/4".
    """
    batch, heads, width = found.scores.shape
    rows = batch * kv.num_heads
    merit = torch.empty(rows, width, dtype=torch.float32, device=kv.device)
    widest = min(resolve_topk(topk, kv.max_length), kv.max_length)
    # Selection among many begins with the largest of each tile, which are at hand here.
    tile = tile_size(width, widest)
    maxima = None
    if 0 < tile <= _WEIGHTS:
        maxima = torch.empty(rows, width // tile, dtype=torch.float32, device=kv.device)
    budget = topk_arguments(topk, kv)
    lengths = kv.lengths.contiguous()
    by_share = isinstance(local_size, str)
    group = heads // kv.num_heads
    launch(
        merit_kernel,
        (found.stats.shape[1], kv.num_heads, batch),
        max_registers=128,
        **found.arguments(),
        **budget,
        p_lengths=lengths,
        local=0 if by_share else local_size,
        p_merit=merit,
        p_maxima=maxima,
        s_maxima=0 if maxima is None else maxima.stride(0),
        G=group,
        QUARTER=by_share,
        TILE=0 if maxima is None else tile,
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_N=_WEIGHTS,
    )
    indices, _ = largest(merit, lengths, **budget, widest=widest, maxima=maxima)
    return indices.view(batch, kv.num_heads, -1)


@triton.jit
def left_out(
    p_scores, s_scores, p_stats, num_splits, p_index, s_in, slots, length, i_head,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """1 - α of head `i_head` (int64) and the chosen keys at `p_index`: `[1]`, 0 exactly where all are chosen."""
    o_one = tl.arange(0, 1)
    b_top, b_total = softmax_of(p_stats, i_head + o_one, o_one == 0, num_splits, BLOCK_S)  # [1]
    b_inside = tl.zeros([1, BLOCK_N], tl.float32)
    b_count = tl.zeros([1, BLOCK_N], tl.int32)
    for at in range(0, slots, BLOCK_N):
        o_slot = at + tl.arange(0, BLOCK_N)[None, :]
        b_n = tl.load(p_index + o_slot.to(tl.int64) * s_in, mask=o_slot < slots, other=-1)
        m_n = b_n >= 0
        b_s = tl.load(p_scores + i_head * s_scores + b_n, mask=m_n, other=float("-inf"))
        b_inside += tl.exp(b_s - b_top[:, None])
        b_count += m_n.to(tl.int32)
    b_share = tl.maximum((b_total - tl.sum(b_inside, axis=1)) / b_total, 0.0)
    return tl.where(tl.sum(b_count, axis=1) >= length, 0.0, b_share)


@triton.jit
def mass_outside_kernel(
    p_scores, s_scores, p_stats, num_splits, p_index, s_ib, s_ih, s_in, slots, p_lengths, p_left_out, heads,
    G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per query head."""
    i_head = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_head // heads, i_head % heads // G
    length = tl.load(p_lengths + i_b).to(tl.int32)
    p_index += i_b * s_ib + i_kv * s_ih
    b_share = left_out(p_scores, s_scores, p_stats, num_splits, p_index, s_in, slots, length, i_head, BLOCK_S, BLOCK_N)
    tl.store(p_left_out + i_head + tl.arange(0, 1), b_share)


def mass_outside(found: Approximation, indices: Int[Tensor, "B Hkv K"], kv: KVView) -> Float[Tensor, "B Hq"]:
    """1 - α of every query head: the approximate weight of the keys not chosen."""
    batch, heads, _ = found.scores.shape
    shares = torch.empty(batch, heads, dtype=torch.float32, device=kv.device)
    launch(
        mass_outside_kernel,
        (batch * heads,),
        **found.arguments(),
        **_index_arguments(indices),
        p_lengths=kv.lengths.contiguous(),
        p_left_out=shares,
        heads=heads,
        G=heads // kv.num_heads,
    )
    return shares


@triton.jit
def reallocate_kernel(
    p_part, p_lse, num_parts, p_scores, s_scores, p_stats, num_splits, p_index, s_ib, s_ih, s_in, slots, p_lengths,
    p_sum, p_left_out, p_o, heads,
    G: tl.constexpr, DIM_V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per block of channels of a query head: attention of what is chosen, the mean value for the rest."""
    i_head, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_kv = i_head // heads, i_head % heads // G
    length = tl.load(p_lengths + i_b).to(tl.int32)
    p_index += i_b * s_ib + i_kv * s_ih
    b_share = left_out(p_scores, s_scores, p_stats, num_splits, p_index, s_in, slots, length, i_head, BLOCK_S, BLOCK_N)
    if i_d == 0:
        tl.store(p_left_out + i_head + tl.arange(0, 1), b_share)
    o_d = i_d * BLOCK_DV + tl.arange(0, BLOCK_DV)
    m_d = o_d < DIM_V
    b_o = whole(p_part, p_lse, i_head, o_d, num_parts, DIM_V, BLOCK_P)
    b_mean = tl.load(p_sum + (i_head // G) * DIM_V + o_d, mask=m_d) / tl.maximum(length, 1).to(tl.float32)
    b_o = (1 - b_share) * b_o + b_share * b_mean
    tl.store(p_o + i_head * DIM_V + o_d, rounded(b_o, p_o), mask=m_d)


def reallocated_attention(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    indices: Int[Tensor, "B Hkv K"],
    found: Approximation,
    value_sum: Float[Tensor, "B Hkv Dv"],
    *,
    scale: float,
) -> tuple[Float[Tensor, "B Hq 1 Dv"], Float[Tensor, "B Hq"]]:
    """Attention over the chosen keys and the mean of all values, each by its share of the approximate weight.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        indices: The chosen positions, -1 where unused.
        found: Approximate scores.
        value_sum: Sum of the values of each sequence.
        scale: Factor of the scores.

    Returns:
        The output, and 1 - α of every query head.
    """
    batch, heads = query.shape[:2]
    dim_v = kv.values.shape[3]
    parts, lse = sparse_attention_parts(query, kv, indices, scale=scale)
    shares = torch.empty(batch, heads, dtype=torch.float32, device=query.device)
    output = torch.empty(batch, heads, 1, dim_v, dtype=query.dtype, device=query.device)
    block = min(64, triton.next_power_of_2(dim_v))
    launch(
        reallocate_kernel,
        (batch * heads, triton.cdiv(dim_v, block)),
        p_part=parts,
        p_lse=lse,
        num_parts=parts.shape[1],
        **found.arguments(),
        **_index_arguments(indices),
        p_lengths=kv.lengths.contiguous(),
        p_sum=value_sum,
        p_left_out=shares,
        p_o=output,
        heads=heads,
        G=heads // kv.num_heads,
        DIM_V=dim_v,
        BLOCK_P=triton.next_power_of_2(parts.shape[1]),
        BLOCK_DV=block,
    )
    return output, shares


def _index_arguments(indices: Int[Tensor, "B Hkv K"]) -> dict[str, Any]:
    row, head, slot = indices.stride()
    slots = indices.shape[2]
    block = min(_CHOSEN, triton.next_power_of_2(slots))
    return {"p_index": indices, "s_ib": row, "s_ih": head, "s_in": slot, "slots": slots, "BLOCK_N": block}


@triton.jit
def count_kernel(p_counters, p_lengths, p_topk, topk, p_left_out, batch, heads, BLOCK_B: tl.constexpr):
    """One program per query head."""
    i_h = tl.program_id(0)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < batch
    b_length = tl.load(p_lengths + o_b, mask=m_b, other=0).to(tl.int64)
    b_selected = tl.minimum(b_length, topk)
    if p_topk is not None:
        b_selected = tl.minimum(b_length, tl.load(p_topk + o_b, mask=m_b, other=0))
    p = p_counters + i_h
    tl.store(p, tl.load(p) + batch)
    tl.store(p + heads, tl.load(p + heads) + tl.sum(b_selected, axis=0).to(tl.float64))
    tl.store(p + 2 * heads, tl.load(p + 2 * heads) + tl.sum(b_length, axis=0).to(tl.float64))
    if p_left_out is not None:
        b_share = tl.load(p_left_out + o_b * heads + i_h, mask=m_b, other=0.0).to(tl.float64)
        tl.store(p + 3 * heads, tl.load(p + 3 * heads) + tl.sum(b_share, axis=0))


def count(counters: Float[Tensor, "N Hq"], kv: KVView, topk: int | str, left_out: Float[Tensor, "B Hq"] | None) -> None:
    """Add a step to the sums of steps, of selected and of visible keys, and of 1 - α where it is given."""
    heads = counters.shape[1]
    launch(
        count_kernel,
        (heads,),
        p_counters=counters,
        p_lengths=kv.lengths.contiguous(),
        **topk_arguments(topk, kv),
        p_left_out=left_out,
        batch=kv.batch_size,
        heads=heads,
        BLOCK_B=triton.next_power_of_2(kv.batch_size),
    )
