"""TokenSelect's kernels: is the query like that of the last selection, what do heads vote for, and what is the set.

All but the first and the last leave at once for a sequence whose last selection is used again.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops.launch import block_tokens, kv_arguments, launch, query_arguments, topk_arguments
from sparsesel.ops.primitives import (
    count_step,
    load_group,
    load_rows,
    online_softmax,
    products,
    rounded,
    row_budget,
    sequence,
    token_offsets,
)
from sparsesel.ops.split_k import num_splits, part
from sparsesel.ops.topk import largest
from sparsesel_tokenselect.config import TokenSelectConfig
from sparsesel_tokenselect.state import STEPS, TokenSelectState

COUNTERS = ("steps", "selected", "visible", "hit", "miss")

# First or last tokens beyond so many make no difference: kernels count in 32 bits.
_MOST_FIXED = 1 << 30
# Numbers of a query that one program looks at in one go.
_BLOCK = 1024
# Scores per program that sums votes: heads by tokens, rows of them at multiples of the last so that what a kernel is
# compiled for does not change from step to step.
_VOTE_HEADS = 8
_VOTE_TOKENS = 256
_ROW = 16


@triton.jit
def parts_of(p_topk, topk, i_b, length, SINKS: tl.constexpr, LOCAL: tl.constexpr):
    """First, selected and last tokens of sequence `i_b`: how many of each make up its budget; see `Parts`."""
    budget = row_budget(p_topk, topk, i_b, length)
    last = tl.minimum(budget, LOCAL)
    first = tl.minimum(budget - last, SINKS)
    return first, budget - first - last, last


@triton.jit
def load_query(p_q, s_qh, s_qd, o, DIM: tl.constexpr, HEADS: tl.constexpr):
    """Numbers `o` of the queries of all heads put together, float32, 0 beyond."""
    p = p_q + (o // DIM).to(tl.int64) * s_qh + (o % DIM).to(tl.int64) * s_qd
    return tl.load(p, mask=o < HEADS * DIM, other=0.0).to(tl.float32)


@triton.jit
def shrinking(largest_number):
    """The power of two that takes a positive number to between 1 and 2, where there is one; it rounds nothing."""
    exponent = largest_number.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum((254 << 23) - exponent, 1 << 23).to(tl.float32, bitcast=True)


@triton.jit
def compare_kernel(
    p_q, s_qb, s_qh, s_qd, p_queries, p_selected, p_stamps, width,
    p_lengths, p_topk, topk, threshold, p_hit, p_between, p_wanted, p_counters,
    HEADS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, SINKS: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per sequence: is the last selection used again, and if not, what is to be selected from."""
    i_b = tl.program_id(0)
    length, _ = sequence(p_lengths, None, i_b)
    first, wanted, last = parts_of(p_topk, topk, i_b, length, SINKS, LOCAL)
    i_slot = i_b.to(tl.int64) * STEPS + (length + STEPS - 2) % STEPS  # of the position before
    o = tl.arange(0, BLOCK)
    held = 0
    for at in range(0, width, BLOCK):
        b_n = tl.load(p_selected + i_slot * width + at + o, mask=at + o < width, other=-1)
        held += tl.sum((b_n >= 0).to(tl.int32), axis=0)
    is_hit = 0
    if (tl.load(p_stamps + i_slot) == length - 2) & (held == wanted):
        p_q += i_b.to(tl.int64) * s_qb
        p_queries += i_slot * (HEADS * DIM)
        b_top, b_top_then = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for at in range(0, HEADS * DIM, BLOCK):
            b_top = tl.maximum(b_top, tl.abs(load_query(p_q, s_qh, s_qd, at + o, DIM, HEADS)))
            b_top_then = tl.maximum(b_top_then, tl.abs(load_query(p_queries, DIM, 1, at + o, DIM, HEADS)))
        scale, scale_then = shrinking(tl.max(b_top, axis=0)), shrinking(tl.max(b_top_then, axis=0))
        b_dot, b_square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        b_square_then = tl.zeros([BLOCK], tl.float32)
        for at in range(0, HEADS * DIM, BLOCK):
            b_q = load_query(p_q, s_qh, s_qd, at + o, DIM, HEADS) * scale
            b_then = load_query(p_queries, DIM, 1, at + o, DIM, HEADS) * scale_then
            b_dot += b_q * b_then
            b_square += b_q * b_q
            b_square_then += b_then * b_then
        norms = tl.sqrt_rn(tl.sum(b_square, axis=0)) * tl.sqrt_rn(tl.sum(b_square_then, axis=0))
        is_sound = (norms > 0.0) & (norms < float("inf"))  # neither where it is no number
        cosine = tl.where(is_sound, tl.div_rn(tl.sum(b_dot, axis=0), tl.where(is_sound, norms, 1.0)), 0.0)
        # Rounding may take it past 1, which must not reach a threshold above 1.
        is_hit = (tl.minimum(cosine, 1.0) >= threshold).to(tl.int32)
    tl.store(p_hit + i_b, is_hit)
    tl.store(p_wanted + i_b, wanted)
    # Where a sequence selects anything, its first and last tokens are complete.
    tl.store(p_between + i_b, tl.where((is_hit == 0) & (wanted > 0), length - SINKS - LOCAL, 0))
    count_step(p_counters, 0, HEADS, first + wanted + last, length, HEADS, BLOCK_H)
    o_h = tl.arange(0, BLOCK_H)
    p_path = p_counters + (4 - is_hit) * HEADS + o_h
    tl.atomic_add(p_path, tl.full([BLOCK_H], 1.0, tl.float64), mask=o_h < HEADS, sem="relaxed")


@triton.jit
def between_scores_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_between, p_scores, s_scores, p_sums, num_splits, scale,
    G: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys between first and last ones, of a key-value head."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, start = sequence(p_lengths, p_starts, i_b)
    begin, end = part(tl.load(p_between + i_b), i_split, num_splits, BLOCK_N)
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
    o_g = tl.arange(0, BLOCK_G)
    o_row = ((i_b * tl.num_programs(1) + i_h) * G + o_g).to(tl.int64)
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    for at in range(begin, end, BLOCK_N):
        o_n = at + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        o_k = token_offsets(o_n + SINKS, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE)
        b_k = load_rows(p_k, o_k + i_h.to(tl.int64) * s_kh, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = products(b_q, b_k) * scale  # [G, N]
        b_s = tl.where(m_n[None, :] & (b_s == b_s), b_s, float("-inf"))
        tl.store(p_scores + o_row[:, None] * s_scores + o_n[None, :], b_s, mask=(o_g[:, None] < G) & m_n[None, :])
        _weights, _rescale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
    tl.store(p_sums + (o_row * num_splits + i_split) * 2, b_max, mask=o_g < G)
    tl.store(p_sums + (o_row * num_splits + i_split) * 2 + 1, b_sum, mask=o_g < G)


@triton.jit
def votes_kernel(
    p_between, p_scores, s_scores, p_sums, num_splits, p_votes, s_votes,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program for a tile of tokens: the sum over all heads, in order, of their softmax weights."""
    i_tile, i_b = tl.program_id(0), tl.program_id(1)
    between = tl.load(p_between + i_b)
    if i_tile * BLOCK_N < between:
        o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        o_s = tl.arange(0, BLOCK_S)
        b_votes = tl.zeros([BLOCK_N], tl.float32)
        for at in range(0, HEADS, BLOCK_H):
            o_h = at + tl.arange(0, BLOCK_H)
            o_row = (i_b * HEADS + o_h).to(tl.int64)
            m_s = (o_h[:, None] < HEADS) & (o_s[None, :] < num_splits)
            p = p_sums + (o_row[:, None] * num_splits + o_s[None, :]) * 2
            b_max = tl.load(p, mask=m_s, other=float("-inf"))  # [H, S]
            b_sum = tl.load(p + 1, mask=m_s, other=0.0)
            b_top = tl.max(b_max, axis=1, keep_dims=True)  # [H, 1]
            m_h = (b_top > float("-inf")) & (b_top < float("inf"))  # others' softmax is not defined: no vote
            b_base = tl.where(m_h, b_top, 0.0)
            b_total = tl.sum(tl.where(m_h, tl.exp(b_max - b_base) * b_sum, 1.0), axis=1, keep_dims=True)
            m = m_h & (o_n[None, :] < between)
            b_s = tl.load(p_scores + o_row[:, None] * s_scores + o_n[None, :], mask=m, other=float("-inf"))  # [H, N]
            b_votes += tl.sum(tl.exp(b_s - b_base) / b_total, axis=0)
        tl.store(p_votes + i_b.to(tl.int64) * s_votes + o_n, b_votes, mask=o_n < between)


@triton.jit
def set_kernel(
    p_q, s_qb, s_qh, s_qd, p_queries, p_selected, p_stamps, width,
    p_lengths, p_topk, topk, p_hit, p_chosen, widest, p_out, p_counts, slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, SINKS: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per sequence: note what is in force now, and write the three runs of its set one after another."""
    i_b = tl.program_id(0)
    i_row = i_b.to(tl.int64)
    length, _ = sequence(p_lengths, None, i_b)
    first, wanted, last = parts_of(p_topk, topk, i_b, length, SINKS, LOCAL)
    is_hit = tl.load(p_hit + i_b)
    i_then = i_row * STEPS + (length + STEPS - 2) % STEPS
    i_now = i_row * STEPS + (length + STEPS - 1) % STEPS
    p_out += i_row * slots
    o = tl.arange(0, BLOCK)
    if length > 0:  # a sequence that has not begun has no position
        for at in range(0, width, BLOCK):
            b_n = tl.load(p_selected + i_then * width + at + o, mask=at + o < width * is_hit, other=-1)
            if p_chosen is not None:
                m_new = at + o < widest * (1 - is_hit)
                b_new = tl.load(p_chosen + i_row * widest + at + o, mask=m_new, other=-1)
                b_n = tl.where(b_new >= 0, b_new + SINKS, b_n)
            tl.store(p_selected + i_now * width + at + o, b_n, mask=at + o < width)
            tl.store(p_out + first + at + o, b_n, mask=at + o < wanted)
        for at in range(0, HEADS * DIM, BLOCK):
            m_then = at + o < HEADS * DIM * is_hit
            b_then = tl.load(p_queries + i_then * (HEADS * DIM) + at + o, mask=m_then, other=0.0)
            b_q = rounded(load_query(p_q + i_row * s_qb, s_qh, s_qd, at + o, DIM, HEADS), p_queries)
            b_q = tl.where(m_then, b_then, b_q)
            tl.store(p_queries + i_now * (HEADS * DIM) + at + o, b_q, mask=at + o < HEADS * DIM)
        tl.store(p_stamps + i_now, (length - 1).to(tl.int64))
    budget = first + wanted + last
    for at in range(0, slots, BLOCK):
        o_out = at + o
        b_n = tl.where(o_out < first, o_out, tl.where(o_out < budget, length - budget + o_out, -1))
        tl.store(p_out + o_out, b_n, mask=(o_out < slots) & ((o_out < first) | (o_out >= first + wanted)))
    tl.store(p_counts + i_b, budget)


def discover(
    config: TokenSelectConfig, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: TokenSelectState, *, scale: float
) -> tuple[Int[Tensor, "B 1 1 K"], Int[Tensor, "B 1 1"]]:
    """The set of each sequence; `state` notes the selection in force, its tensors stay where they are.

    Args:
        config: Budget and threshold.
        query: Post-RoPE.
        kv: Keys and values.
        state: With room for selections of this budget.
        scale: Factor of the scores.

    Returns:
        int32 positions, ascending, padded with -1, and how many there are.
    """
    (batch, heads, _, dim), device = query.shape, query.device
    slots = min(resolve_topk(config.topk, kv.max_length), kv.max_length)
    widest = config.selected(kv.max_length)
    hit, between, wanted, counts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(4))
    indices = torch.empty(batch, 1, 1, slots, dtype=torch.int32, device=device)
    row, head, _, channel = query.stride()
    shared: dict[str, Any] = {
        "p_q": query,
        "s_qb": row,
        "s_qh": head,
        "s_qd": channel,
        "p_queries": state.queries,
        "p_selected": state.selected,
        "p_stamps": state.stamps,
        **topk_arguments(config.topk, kv),
        "width": state.selected.shape[2],
        "p_lengths": kv.lengths.contiguous(),
        "p_hit": hit,
        "HEADS": heads,
        "DIM": dim,
        "STEPS": STEPS,
        **_fixed(config),
        "BLOCK": min(_BLOCK, triton.next_power_of_2(heads * dim)),
    }
    launch(
        compare_kernel,
        (batch,),
        max_registers=128,
        **shared,
        threshold=config.similarity_threshold,
        p_between=between,
        p_wanted=wanted,
        p_counters=state.counters.table(COUNTERS, heads, device),
        BLOCK_H=triton.next_power_of_2(heads),
    )
    chosen = None
    if widest:
        found = votes(config, query, kv, between, scale=scale)
        chosen, _ = largest(found, between, topk=0, p_topk=wanted, widest=widest)
    launch(set_kernel, (batch,), **shared, p_chosen=chosen, widest=widest, p_out=indices, p_counts=counts, slots=slots)
    return indices, counts.view(batch, 1, 1)


def _fixed(config: TokenSelectConfig) -> dict[str, int]:
    return {"SINKS": min(config.sink_size, _MOST_FIXED), "LOCAL": min(config.local_size, _MOST_FIXED)}


def votes(
    config: TokenSelectConfig, query: Float[Tensor, "B Hq 1 D"], kv: KVView, between: Int[Tensor, " B"], *, scale: float
) -> Float[Tensor, "B N"]:
    """Sum over heads of each head's softmax over the tokens between the first and the last; see `soft_vote`.

    Args:
        config: How many are first and last; fewer than `kv.max_length`.
        query: Post-RoPE.
        kv: Keys.
        between: Such tokens of each sequence, 0 for one that is to be passed over.
        scale: Factor of the scores.

    Returns:
        float32, undefined from `between` on.
    """
    batch, heads = query.shape[:2]
    most = kv.max_length - config.sink_size - config.local_size
    room = -(-most // _ROW) * _ROW
    splits = num_splits(batch * kv.num_heads, most)
    scores = torch.empty(batch, heads, room, dtype=torch.float32, device=query.device)
    sums = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=query.device)
    found = torch.empty(batch, room, dtype=torch.float32, device=query.device)
    shared = {"p_between": between, "p_scores": scores, "s_scores": room, "p_sums": sums, "num_splits": splits}
    launch(
        between_scores_kernel,
        (splits, kv.num_heads, batch),
        **query_arguments(query, kv),
        **kv_arguments(kv, values=False),
        **shared,
        scale=scale,
        SINKS=config.sink_size,
        BLOCK_N=block_tokens(kv.keys),
        num_stages=3,
    )
    launch(
        votes_kernel,
        (triton.cdiv(most, _VOTE_TOKENS), batch),
        **shared,
        p_votes=found,
        s_votes=room,
        HEADS=heads,
        BLOCK_H=min(_VOTE_HEADS, triton.next_power_of_2(heads)),
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_N=min(_VOTE_TOKENS, triton.next_power_of_2(most)),
    )
    return found[:, :most]
