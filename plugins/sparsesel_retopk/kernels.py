"""Kernels of a ReTopK decode step; `step.py` launches them. Every one runs over all (head, sequence).

A step is three launches for the heads that reuse (`recall`, `score`, `finish`), or one (`reuse`), and two more for
the exact ones (`scan`, `finish_exact`), which leave at once where there are none. Who is exact is known to the device
alone: `recall` writes each head's path.

Exact heads need no scores over all L keys in memory. Any K distinct keys, here the best candidates, prove a bound: the
K-th best score of all is no lower than their K-th best. One scan that keeps only scores no lower than that bound, in
order, holds the exact support, and what it keeps is little more than K. The bound must hold for the scores that the
scan computes, whose rounding differs: so it is made of what each candidate scores at least, however it is summed.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from sparsesel.ops.primitives import (
    fill,
    keep_largest,
    kth_key,
    load_group,
    load_rows,
    ordered,
    products,
    rounded,
    row_budget,
    sequence,
    token_offsets,
)
from sparsesel.ops.split_k import part

# Behind every position when runs of positions are merged.
END = tl.constexpr(2147483646)
# Below every `ordered` key, and before every position.
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def load_query(p_q, s_qb, s_qh, s_qd, i_b, i_h, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One head's query, `[BLOCK_D]` float32, 0 beyond its channels."""
    o_d = tl.arange(0, BLOCK_D)
    p = p_q + i_b.to(tl.int64) * s_qb + i_h.to(tl.int64) * s_qh + o_d * s_qd
    return tl.load(p, mask=o_d < DIM, other=0.0).to(tl.float32)


@triton.jit
def inverse_norm(b_square):
    """1/‖q‖ of the sum of squares; 0 where the norm is zero or not finite."""
    m = (b_square > 0.0) & (b_square < float("inf"))
    return tl.where(m, tl.div_rn(1.0, tl.sqrt_rn(tl.where(m, b_square, 1.0))), 0.0)


@triton.jit
def similarities(
    p_rho, b_q, p_entries, p_stamps, position, slots, cache_size, recall_size,
    DIM: tl.constexpr, RECENT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ρ_c = q̄·q̄_c of the entries of one head that may be recalled, -inf for others, newest first.

    Norms are computed here, for all entries alike, so that equal queries tie whoever put them into the ring.

    Args:
        p_rho: Where they go, adjacent; None where only the best is wanted.
        b_q: The current query, `[BLOCK_D]` float32.
        p_entries: The head's ring of queries.
        p_stamps: The sequence's stamps.
        position: Of the current token.
        slots: S.
        cache_size: C.
        recall_size: R.
        DIM: Channels.
        RECENT: Whether only the R latest may be recalled.
        BLOCK_C: Entries looked at in one go.
        BLOCK_D: Channels of a tile.

    Returns:
        ρmax, and how many entries are in reach.
    """
    b_q = b_q * inverse_norm(tl.sum(b_q * b_q, axis=0))
    best = float("-inf")
    found = 0
    for at in range(0, cache_size, BLOCK_C):
        o_c = at + tl.arange(0, BLOCK_C)
        o_n = position - 1 - o_c
        m_c = (o_c < cache_size) & (o_n >= 0)
        o_slot = tl.where(m_c, o_n % slots, 0)
        m_found = m_c & (tl.load(p_stamps + o_slot, mask=m_c, other=LOWEST) == o_n.to(tl.int64))
        b_e = load_rows(p_entries, o_slot.to(tl.int64) * DIM, m_c, 1, DIM, BLOCK_D).to(tl.float32)  # [C, D]
        # Not as a matrix product: that may round equal entries differently, and they must tie.
        b_rho = tl.sum(b_e * b_q[None, :], axis=1) * inverse_norm(tl.sum(b_e * b_e, axis=1))
        b_rho = tl.where(b_rho == b_rho, b_rho, 0.0)  # without a finite norm
        m_recalled = m_found
        if RECENT:
            m_recalled = m_found & (found + tl.cumsum(m_found.to(tl.int32), axis=0) <= recall_size)
        b_rho = tl.where(m_recalled, b_rho, float("-inf"))
        if p_rho is not None:
            tl.store(p_rho + o_c, b_rho, mask=o_c < cache_size)
        best = tl.maximum(best, tl.max(b_rho, axis=0))
        found += tl.sum(m_found.to(tl.int32))
    return best, found


@triton.jit
def copy_recalled(
    p_rho, p_supports, p_runs, position, slots, width, cache_size, recall_size, widest,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the supports of the R most similar entries to `p_runs`, `[R, widest]`; END where there is no position."""
    last, last_c = END, -1
    for run in range(recall_size):
        # The next in the order of similarity, the newest of equal ones first.
        best, best_c = LOWEST, cache_size
        for at in range(0, cache_size, BLOCK_C):
            o_c = at + tl.arange(0, BLOCK_C)
            b_rho = tl.load(p_rho + o_c, mask=o_c < cache_size, other=float("-inf"))
            b_key = ordered(b_rho)
            m = (b_rho > float("-inf")) & ((b_key < last) | ((b_key == last) & (o_c > last_c)))
            b_key = tl.where(m, b_key, LOWEST)
            top = tl.max(b_key, axis=0)
            best_c = tl.where(top > best, tl.min(tl.where(b_key == top, o_c, cache_size), axis=0), best_c)
            best = tl.maximum(best, top)
        last, last_c = best, best_c
        held = tl.where(best > LOWEST, widest, 0)  # none where fewer than R are in reach
        slot = tl.maximum(position - 1 - best_c, 0) % slots
        for at in range(0, widest, BLOCK):
            o = at + tl.arange(0, BLOCK)
            b_n = tl.load(p_supports + slot.to(tl.int64) * width + o, mask=o < held, other=-1)
            tl.store(p_runs + run * widest + o, tl.where(b_n < 0, END, b_n), mask=o < widest)


@triton.jit
def bisect(p, o_first, b_limit, most, half, m):
    """How many of `most` ascending numbers from `o_first` on lie below each limit; `half`: the power of 2 up to it."""
    b_count = tl.zeros_like(b_limit)
    stride = half
    while stride > 0:
        b_next = b_count + stride
        # The largest number of all, which is below no limit, where there are not so many.
        b_n = tl.load(p + (o_first + b_next - 1), mask=m & (b_next <= most), other=2147483647)
        b_count = tl.where(b_n < b_limit, b_next, b_count)
        stride = stride // 2
    return b_count


@triton.jit
def merge_pairs(p_from, p_to, total, width, half, BLOCK: tl.constexpr):
    """Merge each two neighbouring runs of `width` ascending numbers; equal ones stay, side by side.

    A number goes behind those of its own run before it and those of the other run that are smaller, or, for a number of
    the right run, not larger. `half`: the power of 2 up to `width`.
    """
    for at in range(0, total, BLOCK):
        o = at + tl.arange(0, BLOCK)
        m = o < total
        b_x = tl.load(p_from + o, mask=m, other=END)
        o_left = o // (2 * width) * (2 * width)
        o_right = tl.minimum(o_left + width, total)
        m_right = o >= o_right
        o_other = tl.where(m_right, o_left, o_right)
        b_most = tl.where(m_right, width, tl.minimum(o_right + width, total) - o_right)
        b_count = bisect(p_from, o_other, b_x + m_right.to(tl.int32), b_most, half, m)
        tl.store(p_to + tl.where(m_right, o - width, o) + b_count, b_x, mask=m)


@triton.jit
def drop_duplicates(p_from, total, first, p_to, BLOCK: tl.constexpr):
    """The distinct numbers below `first` of `total` ascending ones, in order; returns how many there are."""
    count = 0
    for at in range(0, total, BLOCK):
        o = at + tl.arange(0, BLOCK)
        b_n = tl.load(p_from + o, mask=o < total, other=END)
        b_before = tl.load(p_from + o - 1, mask=(o > 0) & (o < total), other=-1)
        m = (b_n < first) & (b_n != b_before)
        tl.store(p_to + count + tl.cumsum(m.to(tl.int32), axis=0) - 1, b_n, mask=m)
        count += tl.sum(m.to(tl.int32))
    return count


@triton.jit
def candidates(
    p_rho, p_supports, p_runs, p_ids, position, slots, width, cache_size, recall_size, window_size, widest, half,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A = unique(union of the recalled supports ∪ last W positions), ascending; returns |A|.

    The supports ascend, so they are merged, two and two, LEVELS times: any number of any length. What lies in the
    window is left to the window, so `p_ids` holds distinct positions below L and no more than R · `widest` + W.

    Args:
        p_rho: Similarities, newest first.
        p_supports: The head's ring of supports.
        p_runs: Scratch for two times R · `widest`.
        p_ids: Where A goes.
        position: Of the current token, L - 1.
        slots: S.
        width: Slots of a support in the ring.
        cache_size: C.
        recall_size: R.
        window_size: W.
        widest: Most positions that a support holds.
        half: The power of 2 up to `widest`.
        LEVELS: log2(R), rounded up.
        BLOCK_C: Entries looked at in one go.
        BLOCK: Positions looked at in one go.
    """
    copy_recalled(p_rho, p_supports, p_runs, position, slots, width, cache_size, recall_size, widest, BLOCK_C, BLOCK)
    total = recall_size * widest
    # Numbers of the device even where they are the constant 1: the loop carries them.
    run, half = tl.full([], widest, tl.int32), tl.full([], half, tl.int32)
    for level in range(LEVELS):
        tl.debug_barrier()
        merge_pairs(p_runs + level % 2 * total, p_runs + (level + 1) % 2 * total, total, run, half, BLOCK)
        run, half = run * 2, half * 2
    tl.debug_barrier()
    first = tl.maximum(position + 1 - window_size, 0)
    count = drop_duplicates(p_runs + LEVELS % 2 * total, total, first, p_ids, BLOCK)
    for at in range(first, position + 1, BLOCK):
        o = at + tl.arange(0, BLOCK)
        tl.store(p_ids + count + o - first, o, mask=o <= position)
    return count + position + 1 - first


@triton.jit
def recall(
    p_q, s_qb, s_qh, s_qd, p_lengths, topk, p_topk,
    p_entries, p_supports, p_stamps, p_prefill_end, slots, width,
    cache_size, recall_size, window_size, threshold, refresh_interval,
    p_rho, p_runs, p_ids, s_ids, p_counts, p_paths, p_sums, widest, half,
    G: tl.constexpr, DIM: tl.constexpr, FALLBACK: tl.constexpr, SCOPE: tl.constexpr, RECENT: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Match, choose the path and build A for one head; returns the path and |A|. See `recall_kernel`."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    i_row = i_b.to(tl.int64) * num_heads + i_h
    length = tl.load(p_lengths + i_b).to(tl.int32)
    position = length - 1
    p_stamps += i_b.to(tl.int64) * slots
    p_rho += i_row * cache_size
    b_q = load_query(p_q, s_qb, s_qh, s_qd, i_b, i_h, DIM, BLOCK_D)
    best, found = similarities(
        p_rho, b_q, p_entries + i_row * slots * DIM, p_stamps, position, slots, cache_size, recall_size,
        DIM, RECENT, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    tl.debug_barrier()

    # Rounding may take a cosine past 1, which must not reach a threshold above 1.
    decisive = tl.minimum(best, 1.0)
    if FALLBACK and SCOPE != "head":  # both are constants
        least, total = decisive, 0.0
        i_first = i_h - i_h % G
        for g in range(G):
            i_g = i_first + g
            b_q = load_query(p_q, s_qb, s_qh, s_qd, i_b, i_g, DIM, BLOCK_D)
            i_other = i_b.to(tl.int64) * num_heads + i_g
            other, _ = similarities(
                None, b_q, p_entries + i_other * slots * DIM, p_stamps, position, slots, cache_size, recall_size,
                DIM, RECENT, BLOCK_C, BLOCK_D,
            )  # fmt: skip
            other = tl.minimum(other, 1.0)
            least = tl.minimum(least, other)
            total += other
        if SCOPE == "group-any":
            decisive = least
        else:
            decisive = total / G

    count = candidates(
        p_rho, p_supports + i_row * slots * width, p_runs + i_row * 2 * recall_size * widest, p_ids + i_row * s_ids,
        position, slots, width, cache_size, recall_size, window_size, widest, half, LEVELS, BLOCK_C, BLOCK,
    )  # fmt: skip

    budget = row_budget(p_topk, topk, i_b, length)
    since = position - tl.load(p_prefill_end + i_b).to(tl.int32)
    near = decisive >= threshold
    if not FALLBACK:
        near = found >= 0
    path = tl.where(count < budget, 4, 0)
    path = tl.where(near, path, 3)
    path = tl.where(found == 0, 2, path)
    path = tl.where((refresh_interval > 0) & (since > 0) & (since % tl.maximum(refresh_interval, 1) == 0), 1, path)
    tl.store(p_counts + i_row, count)
    tl.store(p_paths + i_row, path)

    # The counters `NAMES` of step.py.
    o = tl.arange(0, 16)
    b_sum = ((o == 0) | ((o >= 3) & (o - 2 == path)) | ((o == 7) & (path > 0)) | ((o == 8) & (path == 0))).to(tl.int32)
    b_sum = tl.where(o == 1, budget, tl.where(o == 2, length, b_sum))
    b_sum = tl.where((o == 9) & (path == 0), count, b_sum)
    tl.atomic_add(p_sums + o * num_heads + i_h, b_sum.to(tl.float64), mask=(o < 10) & (b_sum > 0), sem="relaxed")
    return path, count


@triton.jit
def recall_kernel(
    p_q, s_qb, s_qh, s_qd, p_lengths, topk, p_topk,
    p_entries, p_supports, p_stamps, p_prefill_end, slots, width,
    cache_size, recall_size, window_size, threshold, refresh_interval,
    p_rho, p_runs, p_ids, s_ids, p_counts, p_paths, p_sums, widest, half,
    G: tl.constexpr, DIM: tl.constexpr, FALLBACK: tl.constexpr, SCOPE: tl.constexpr, RECENT: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per head: similarities, path, candidates (for exact heads too, as they prove the bound), counters."""
    recall(
        p_q, s_qb, s_qh, s_qd, p_lengths, topk, p_topk,
        p_entries, p_supports, p_stamps, p_prefill_end, slots, width,
        cache_size, recall_size, window_size, threshold, refresh_interval,
        p_rho, p_runs, p_ids, s_ids, p_counts, p_paths, p_sums, widest, half,
        G, DIM, FALLBACK, SCOPE, RECENT, LEVELS, BLOCK_C, BLOCK_D, BLOCK,
    )  # fmt: skip


@triton.jit
def score_tile(
    b_q, p_k, s_kb, s_kh, s_kn, s_kd, start, p_table, s_table, p_ids, p_scores, at, count, path, i_b, i_kv, scale,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK_N candidates, for an exact head what they are at least; keys are read where they lie."""
    o = at + tl.arange(0, BLOCK_N)
    m = o < count
    o_n = tl.load(p_ids + o, mask=m, other=0)
    o_k = token_offsets(o_n, m, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv.to(tl.int64) * s_kh
    b_e = load_rows(p_k, o_k, m, s_kd, DIM, BLOCK_D).to(tl.float32) * b_q[None, :]  # [N, D]
    b_s = tl.sum(b_e, axis=1) * scale
    if path > 0:
        # Two sums of D products in any order and rounding lie within 2 (D + 2) u of the sum of their sizes, u = 2^-24;
        # four times that leaves room for tensor cores, which cut bits off.
        b_s -= tl.sum(tl.abs(b_e), axis=1) * (tl.abs(scale) * ((DIM + 2) * 2.0**-21))
    tl.store(p_scores + o, b_s, mask=m)


@triton.jit
def score_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_ids, s_ids, p_counts, p_paths, p_scores, scale,
    G: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, REUSE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per tile of a head's candidates; those of reusing heads only where REUSE."""
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_row = i_b.to(tl.int64) * tl.num_programs(1) + i_h
    count, path = tl.load(p_counts + i_row), tl.load(p_paths + i_row)
    if not REUSE:
        count = tl.where(path > 0, count, 0)
    if i_tile * BLOCK_N < count:
        _, start = sequence(p_lengths, p_starts, i_b)
        b_q = load_query(p_q, s_qb, s_qh, s_qd, i_b, i_h, DIM, BLOCK_D)
        score_tile(
            b_q, p_k, s_kb, s_kh, s_kn, s_kd, start, p_table, s_table, p_ids + i_row * s_ids, p_scores + i_row * s_ids,
            i_tile * BLOCK_N, count, path, i_b, i_h // G, scale, DIM, PAGE, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit
def weigh_values(
    p_ids, p_scores, count, best, p_v, s_vb, s_vh, s_vn, s_vd, start, p_table, s_table, p_out, i_b, i_kv,
    DIM_V: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Softmax over `count` scores, whose largest is `best`, times the values at `p_ids`; 0 without any."""
    b_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for at in range(0, count, BLOCK_N):
        o = at + tl.arange(0, BLOCK_N)
        m = o < count
        o_n = tl.load(p_ids + o, mask=m, other=0)
        b_p = tl.where(m, tl.exp(tl.load(p_scores + o, mask=m, other=0.0) - best), 0.0)
        o_v = token_offsets(o_n, m, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv.to(tl.int64) * s_vh
        b_acc += b_p[:, None] * load_rows(p_v, o_v, m, s_vd, DIM_V, BLOCK_DV).to(tl.float32)  # [N, Dv]
        b_sum += b_p
    total = tl.where(count > 0, tl.sum(b_sum, axis=0), 1.0)
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(p_out + o_d, rounded(tl.sum(b_acc, axis=0) / total, p_out), mask=o_d < DIM_V)


@triton.jit
def settle(
    p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, start, p_table, s_table,
    p_ids, p_scores, count, budget, position, p_entries, p_norms, p_supports, slots, width,
    p_kept, widest, p_out, p_support,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Of scored keys keep the K best, attend to them, and enter query and support into the head's ring.

    Args:
        p_ids: The keys, ascending.
        p_scores: Their scores.
        count: How many.
        budget: min(K, L).
        p_kept: `[…, widest]` scratch.
        p_out: `[B, Hq, Dv]`, or None where no output is wanted.
        p_support: `[B, Hq, widest]`, or None where the support is wanted in the ring alone.
    """
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    i_row = i_b.to(tl.int64) * tl.num_programs(0) + i_h
    i_slot = i_row * slots + (position + slots) % slots  # position -1: a sequence without a token
    p_held = p_supports + i_slot * width
    p_kept += i_row * widest
    kept, best = keep_largest(p_scores, p_ids, count, budget, p_held, p_kept, BLOCK)
    fill(p_held, kept, width, -1, BLOCK)
    b_q = load_query(p_q, s_qb, s_qh, s_qd, i_b, i_h, DIM, BLOCK_D)
    o_d = tl.arange(0, BLOCK_D)
    tl.store(p_entries + i_slot * DIM + o_d, rounded(b_q, p_entries), mask=o_d < DIM)
    tl.store(p_norms + i_slot, inverse_norm(tl.sum(b_q * b_q, axis=0)))
    tl.debug_barrier()
    if p_support is not None:
        for at in range(0, widest, BLOCK):
            o = at + tl.arange(0, BLOCK)
            m = o < widest
            tl.store(p_support + i_row * widest + o, tl.load(p_held + o, mask=m, other=-1), mask=m)
    if p_out is not None:
        weigh_values(
            p_held, p_kept, kept, best, p_v, s_vb, s_vh, s_vn, s_vd, start, p_table, s_table, p_out + i_row * DIM_V,
            i_b, i_h // G, DIM_V, PAGE, BLOCK_N, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def finish(
    p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, p_lengths, p_starts, p_table, s_table, topk, p_topk,
    p_entries, p_norms, p_supports, p_stamps, p_unbuilt, slots, width,
    p_ids, s_ids, p_scores, count, path, p_bounds, p_kept, widest, p_out, p_support,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, REUSE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """What becomes of one head's scored candidates. See `finish_kernel`."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    i_row = i_b.to(tl.int64) * tl.num_programs(0) + i_h
    length, start = sequence(p_lengths, p_starts, i_b)
    budget = row_budget(p_topk, topk, i_b, length)
    position = length - 1
    if path > 0:
        bound = LOWEST
        if (count >= budget) & (budget > 0):
            bound, _ = kth_key(p_scores + i_row * s_ids, count, budget, BLOCK)
        tl.store(p_bounds + i_row, bound)
    elif REUSE:
        settle(
            p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, start, p_table, s_table,
            p_ids + i_row * s_ids, p_scores + i_row * s_ids, count, budget, position,
            p_entries, p_norms, p_supports, slots, width, p_kept, widest, p_out, p_support,
            G, DIM, DIM_V, PAGE, BLOCK, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if i_h == 0:
        # The slot is out of every head's reach in this step, so it matters to none when it is written.
        i_slot = i_b.to(tl.int64) * slots + (position + slots) % slots
        tl.store(p_stamps + i_slot, tl.where(position < 0, LOWEST, position).to(tl.int64))
        tl.store(p_unbuilt + i_slot, 0)


@triton.jit
def finish_kernel(
    p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, p_lengths, p_starts, p_table, s_table, topk, p_topk,
    p_entries, p_norms, p_supports, p_stamps, p_unbuilt, slots, width,
    p_ids, s_ids, p_scores, p_counts, p_paths, p_bounds, p_kept, widest, p_out, p_support,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, REUSE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Per head: top-K, softmax, values and cache insert where it reuses (and REUSE); else the bound for the scan."""
    i_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    count, path = tl.load(p_counts + i_row), tl.load(p_paths + i_row)
    finish(
        p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, p_lengths, p_starts, p_table, s_table, topk, p_topk,
        p_entries, p_norms, p_supports, p_stamps, p_unbuilt, slots, width,
        p_ids, s_ids, p_scores, count, path, p_bounds, p_kept, widest, p_out, p_support,
        G, DIM, DIM_V, PAGE, REUSE, BLOCK, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def reuse_kernel(
    p_q, s_qb, s_qh, s_qd, p_k, s_kb, s_kh, s_kn, s_kd, p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table, topk, p_topk,
    p_entries, p_norms, p_supports, p_stamps, p_unbuilt, p_prefill_end, slots, width,
    cache_size, recall_size, window_size, threshold, refresh_interval,
    p_rho, p_runs, p_ids, s_ids, p_scores, p_counts, p_paths, p_sums, p_bounds, p_kept, widest, half,
    p_out, p_support, scale,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    FALLBACK: tl.constexpr, SCOPE: tl.constexpr, RECENT: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`recall_kernel`, `score_kernel` and `finish_kernel` in one program per head."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    i_row = i_b.to(tl.int64) * tl.num_programs(0) + i_h
    path, count = recall(
        p_q, s_qb, s_qh, s_qd, p_lengths, topk, p_topk,
        p_entries, p_supports, p_stamps, p_prefill_end, slots, width,
        cache_size, recall_size, window_size, threshold, refresh_interval,
        p_rho, p_runs, p_ids, s_ids, p_counts, p_paths, p_sums, widest, half,
        G, DIM, FALLBACK, SCOPE, RECENT, LEVELS, BLOCK_C, BLOCK_D, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    _, start = sequence(p_lengths, p_starts, i_b)
    b_q = load_query(p_q, s_qb, s_qh, s_qd, i_b, i_h, DIM, BLOCK_D)
    for at in range(0, count, BLOCK_K):
        score_tile(
            b_q, p_k, s_kb, s_kh, s_kn, s_kd, start, p_table, s_table, p_ids + i_row * s_ids, p_scores + i_row * s_ids,
            at, count, path, i_b, i_h // G, scale, DIM, PAGE, BLOCK_K, BLOCK_D,
        )  # fmt: skip
    tl.debug_barrier()
    finish(
        p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, p_lengths, p_starts, p_table, s_table, topk, p_topk,
        p_entries, p_norms, p_supports, p_stamps, p_unbuilt, slots, width,
        p_ids, s_ids, p_scores, count, path, p_bounds, p_kept, widest, p_out, p_support,
        G, DIM, DIM_V, PAGE, True, BLOCK, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def scan_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_paths, p_bounds, p_found, p_found_scores, s_found, p_found_counts, num_splits, scale,
    G: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys of a key-value head of which some query head is exact.

    Scores no lower than a head's bound go, with their positions and in order, to where the part begins in the head's
    `[L]` scratch: there is room for every key of the part.
    """
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_g = tl.arange(0, BLOCK_G)
    o_row = (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * G + o_g
    m_exact = tl.load(p_paths + o_row, mask=o_g < G, other=0) > 0
    if tl.max(m_exact.to(tl.int32), axis=0) > 0:
        length, start = sequence(p_lengths, p_starts, i_b)
        begin, end = part(length, i_split, num_splits, BLOCK_N)
        b_bound = tl.load(p_bounds + o_row, mask=m_exact, other=0)
        b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
        b_count = tl.zeros([BLOCK_G], tl.int32)
        for at in range(begin, end, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)
            m_n = o_n < end
            o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_h.to(tl.int64) * s_kh
            b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
            if b_q.dtype == b_k.dtype:
                b_s = products(b_q, b_k) * scale  # [G, N]
            else:  # neither is rounded to the other's type, of which the bounds know nothing
                b_s = products(b_q.to(tl.float32), b_k.to(tl.float32)) * scale
            m = m_exact[:, None] & m_n[None, :] & (ordered(b_s) >= b_bound[:, None])
            b_keep = m.to(tl.int32)
            b_new = tl.sum(b_keep, axis=1)
            if tl.max(b_new, axis=0) > 0:
                o = o_row[:, None] * s_found + begin + b_count[:, None] + tl.cumsum(b_keep, axis=1) - 1
                tl.store(p_found + o, tl.broadcast_to(o_n[None, :], b_s.shape), mask=m)
                tl.store(p_found_scores + o, b_s, mask=m)
            b_count += b_new
        tl.store(p_found_counts + o_row * num_splits + i_split, b_count, mask=m_exact)


@triton.jit
def close_gaps(
    p_found, p_found_scores, p_found_counts, length, num_splits,
    PART: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move what the parts of a scan found together to the front, in place and in order; returns how much it is.

    Nothing moves backward, and a block is read before it is written, so that nothing is overwritten unread.
    """
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_splits
    b_count = tl.load(p_found_counts + o_s, mask=m_s, other=0)
    total = tl.sum(b_count, axis=0)
    tl.debug_barrier()
    tl.store(p_found_counts + o_s, tl.cumsum(b_count, axis=0), mask=m_s)  # found up to the end of each part
    tl.debug_barrier()
    for at in range(0, total, BLOCK):
        o = at + tl.arange(0, BLOCK)
        m = o < total
        b_part = bisect(p_found_counts, 0, o + 1, num_splits, BLOCK_S, m)  # as many end before this one
        b_before = tl.load(p_found_counts + b_part - 1, mask=m & (b_part > 0), other=0)
        begin, _ = part(length, b_part, num_splits, PART)
        o_from = begin + o - b_before
        b_n = tl.load(p_found + o_from, mask=m, other=0)
        b_s = tl.load(p_found_scores + o_from, mask=m, other=0.0)
        tl.debug_barrier()
        tl.store(p_found + o, b_n, mask=m)
        tl.store(p_found_scores + o, b_s, mask=m)
    tl.debug_barrier()
    return total


@triton.jit
def finish_exact_kernel(
    p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, p_lengths, p_starts, p_table, s_table, topk, p_topk,
    p_entries, p_norms, p_supports, slots, width,
    p_paths, p_found, p_found_scores, s_found, p_found_counts, num_splits, p_kept, widest, p_out, p_support,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, PART: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Per exact head: top-K of what the scan found, softmax, values and cache insert."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    i_row = i_b.to(tl.int64) * tl.num_programs(0) + i_h
    if tl.load(p_paths + i_row) > 0:
        length, start = sequence(p_lengths, p_starts, i_b)
        p_found += i_row * s_found
        p_found_scores += i_row * s_found
        count = close_gaps(
            p_found, p_found_scores, p_found_counts + i_row * num_splits, length, num_splits, PART, BLOCK_S, BLOCK
        )
        settle(
            p_q, s_qb, s_qh, s_qd, p_v, s_vb, s_vh, s_vn, s_vd, start, p_table, s_table,
            p_found, p_found_scores, count, row_budget(p_topk, topk, i_b, length), length - 1,
            p_entries, p_norms, p_supports, slots, width, p_kept, widest, p_out, p_support,
            G, DIM, DIM_V, PAGE, BLOCK, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
