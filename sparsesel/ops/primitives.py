"""Device helpers that kernels are built from; nothing here is launched.

Names in kernels: `p_` pointers, `s_` strides, `i_` indices, `o_` offsets, `m_` masks, `b_` values of a block. Address
arithmetic is int64: a cache may hold more than 2^31 numbers.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from sparsesel.ops.backend import interpreted

# Triton's interpreter keeps bfloat16 as its bits: `tl.dot` and arithmetic would take those for integers, and conversion
# to it cuts bits off rather than rounding to nearest, as devices do.
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def sequence(p_lengths, p_starts, i_b):
    """Visible tokens of sequence `i_b`, and the column of its position 0; both int32."""
    length = tl.load(p_lengths + i_b).to(tl.int32)
    start = 0
    if p_starts is not None:
        start = tl.load(p_starts + i_b).to(tl.int32)
    return length, start


@triton.jit
def row_budget(p_topk, topk, i_b, length):
    """min(K, L) of sequence `i_b`, int32."""
    budget = topk
    if p_topk is not None:
        budget = tl.load(p_topk + i_b).to(tl.int32)
    return tl.minimum(budget, length)


@triton.jit
def token_offsets(o_n, m_n, start, i_b, s_b, s_n, p_table, s_table, PAGE: tl.constexpr):
    """Offset of each logical position's first channel in head 0, int64.

    Args:
        o_n: Logical positions, any shape.
        m_n: Which of them exist; others give some offset that must not be read.
        start: Column of position 0.
        i_b: The sequence.
        s_b: Stride of a row, or of a block where paged.
        s_n: Stride of a token.
        p_table: Block table, or None.
        s_table: Stride of its rows.
        PAGE: Tokens of a block; 0 if dense.
    """
    column = o_n + start
    if PAGE == 0:
        offsets = i_b.to(tl.int64) * s_b + column.to(tl.int64) * s_n
    else:
        block = tl.load(p_table + i_b.to(tl.int64) * s_table + column // PAGE, mask=m_n, other=0)
        offsets = block * s_b + (column % PAGE).to(tl.int64) * s_n
    return offsets


@triton.jit
def load_rows(p, o_rows, m_rows, s_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows at these offsets, `[N, BLOCK_D]`, 0 where a row or channel does not exist."""
    o_d = tl.arange(0, BLOCK_D)
    p += o_rows[:, None] + o_d[None, :].to(tl.int64) * s_d
    return tl.load(p, mask=m_rows[:, None] & (o_d[None, :] < DIM), other=0.0)


@triton.jit
def load_group(
    p_q,
    i_b,
    i_first,
    s_qb,
    s_qh,
    s_qd,
    G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The queries of G heads from `i_first` on, `[BLOCK_G, BLOCK_D]`, 0 beyond."""
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    p = p_q + i_b.to(tl.int64) * s_qb + (i_first + o_g[:, None]).to(tl.int64) * s_qh + o_d[None, :] * s_qd
    return tl.load(p, mask=(o_g[:, None] < G) & (o_d[None, :] < DIM), other=0.0)


@triton.jit
def bfloat16_parts(b):
    """Three bfloat16 tiles whose sum is `b` float32, exactly: each has 8 of the 24 bits of a number."""
    b_high = (b.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    b_rest = tl.where(tl.abs(b) == float("inf"), 0.0, b - b_high)
    b_mid = (b_rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return b_high.to(tl.bfloat16), b_mid.to(tl.bfloat16), (b_rest - b_mid).to(tl.bfloat16)


@triton.jit
def products(b_q, b_k):
    """`[G, N]` float32 products of finite queries `[G, D]` and keys `[N, D]`, exact but for the order of summation.

    One query is multiplied channel by channel: it would fill a sixteenth of a tensor core's tile. float32 queries of
    16-bit keys are multiplied in parts of 16 bits, as tensor cores do not multiply float32 numbers exactly.
    """
    if b_q.shape[0] == 1:
        out = tl.expand_dims(tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=1), 0)
    elif b_q.dtype == b_k.dtype and not INTERPRETED:
        out = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    elif INTERPRETED:
        # Equal keys must tie. In float32 numpy's sums depend on where in a tile they lie.
        out = tl.dot(b_q.to(tl.float64), tl.trans(b_k.to(tl.float64)), out_dtype=tl.float64).to(tl.float32)
    elif b_q.dtype != tl.float32 or b_q.shape[1] > 128:  # parts of longer ones would fill the registers
        out = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
    elif b_k.dtype == tl.bfloat16:
        b_high, b_mid, b_low = bfloat16_parts(b_q)
        b_k = tl.trans(b_k)
        out = tl.dot(b_high, b_k, tl.dot(b_mid, b_k, tl.dot(b_low, b_k)))
    else:
        b_high, b_mid, b_low = bfloat16_parts(b_q)
        b_first, b_second, _ = bfloat16_parts(tl.trans(b_k).to(tl.float32))  # 11 bits
        out = tl.dot(b_low, b_first, tl.dot(b_mid, b_second, tl.dot(b_low, b_second)))
        out = tl.dot(b_high, b_first, tl.dot(b_mid, b_first, tl.dot(b_high, b_second, out)))
    return out


@triton.jit
def rounded(b, p):
    """`b` float32 in the type that `p` points to, rounded to nearest even."""
    if INTERPRETED and p.dtype.element_ty == tl.bfloat16:
        bits = b.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        b = tl.where(b == b, bits.to(tl.float32, bitcast=True), b)
    return b.to(p.dtype.element_ty)


@triton.jit
def weighed(b_p, b_v):
    """`[G, D]` float32 sum of values `[N, D]`, each weighed by `[G, N]` float32.

    On 16-bit values a weight is taken as the sum of two 16-bit numbers: tensor cores multiply both, and what is lost
    is below the rounding of a 16-bit output by as much again. A single weight for each value is multiplied as it is.
    """
    if b_p.shape[0] == 1:
        out = tl.expand_dims(tl.sum(tl.trans(b_p) * b_v.to(tl.float32), axis=0), 0)
    elif b_v.dtype == tl.float32 or INTERPRETED:
        out = tl.dot(b_p, b_v.to(tl.float32), input_precision="ieee")
    else:
        b_high = b_p.to(b_v.dtype)
        b_low = (b_p - b_high.to(tl.float32)).to(b_v.dtype)
        out = tl.dot(b_low, b_v) + tl.dot(b_high, b_v)
    return out


@triton.jit
def online_softmax(b_s, b_max, b_sum):
    """One step of softmax over tiles `[G, N]` of scores, -inf where a score does not count.

    Returns:
        Weights of the tile relative to the new maximum, by what earlier sums are to be multiplied, the new maximum
        and the new sum `[G]`.
    """
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # Nothing seen yet: any finite number in place of -inf, whose difference to itself is not a number.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp(b_s - b_base[:, None])
    b_scale = tl.exp(b_max - b_base)
    return b_p, b_scale, b_new, b_sum * b_scale + tl.sum(b_p, axis=1)


@triton.jit
def ordered(b_s):
    """Scores as int32 that compare like them: NaN as -inf, the two zeros alike."""
    b_s = tl.where(b_s != b_s, float("-inf"), b_s)
    b_s = tl.where(b_s == 0.0, 0.0, b_s)
    bits = b_s.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(b_key):
    """The score that `ordered` made this of."""
    bits = b_key ^ ((b_key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def kth_key(p_scores, count, k, BLOCK: tl.constexpr):
    """Where the k largest of `count` float32 scores in memory end: radix selection, 8 bits of `ordered` at a time.

    Args:
        p_scores: The scores, adjacent, whatever they are.
        count: How many; at least k.
        k: At least 1.
        BLOCK: Scores looked at in one go; any number of them is gone through.

    Returns:
        A threshold and a number of ties: the k largest are the scores whose key lies above the threshold, and the first
        so many of those at it. That is the k-th largest key, or a lower one as soon as that is enough.
    """
    o = tl.arange(0, BLOCK)
    o_bin = tl.arange(0, 256)
    prefix = 0  # the key's leading bits, sign-extended
    threshold = 0
    left = k  # of the scores that share them, how many are among the largest
    shared = left + 1  # how many share them; where all of these are, no further bit matters
    for step in tl.static_range(4):
        if shared > left:
            b_hist = tl.zeros([256], dtype=tl.int32)
            for at in range(0, count, BLOCK):
                m = at + o < count
                b_key = ordered(tl.load(p_scores + at + o, mask=m, other=0.0))
                if step == 0:
                    b_digit = (b_key >> 24) + 128  # the sign is in the first digit
                else:
                    m = m & ((b_key >> (32 - 8 * step)) == prefix)
                    b_digit = (b_key >> (24 - 8 * step)) & 255
                b_hist += tl.histogram(b_digit, 256, mask=m)
            b_least = tl.cumsum(b_hist, axis=0, reverse=True)  # scores with this digit or a larger one
            digit = tl.sum((b_least >= left).to(tl.int32)) - 1
            left -= tl.sum(tl.where(o_bin > digit, b_hist, 0))
            shared = tl.sum(tl.where(o_bin == digit, b_hist, 0))
            if step == 0:
                prefix = digit - 128
            else:
                prefix = (prefix << 8) | digit
            threshold = prefix << (24 - 8 * step)
    return threshold, left


@triton.jit
def keep_above(p_scores, p_ids, count, threshold, ties, p_out_ids, p_out_scores, BLOCK: tl.constexpr):
    """The scores above a threshold and the first `ties` at it, in the order in which they lie.

    Args:
        p_scores: float32 scores, adjacent.
        p_ids: int32 what each belongs to; None for its own place.
        count: How many there are; may be 0.
        threshold: An `ordered` key.
        ties: How many at it are kept.
        p_out_ids: The ids kept, adjacent.
        p_out_scores: Their scores, or None.
        BLOCK: Scores looked at in one go, at most 2^14.

    Returns:
        How many were kept, and the largest score (NaN counted as -inf).
    """
    o = tl.arange(0, BLOCK)
    kept = 0
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, count, BLOCK):
        m = at + o < count
        b_s = tl.load(p_scores + at + o, mask=m, other=float("-inf"))
        b_key = ordered(b_s)
        m_above, m_tie = m & (b_key > threshold), m & (b_key == threshold)
        # Both are counted in one number, ties in its upper half.
        b_count = m_above.to(tl.int32) + (m_tie.to(tl.int32) << 16)
        b_sums = tl.cumsum(b_count, axis=0)
        b_ties = tl.minimum(b_sums >> 16, ties)  # kept up to here
        m_keep = m_above | (m_tie & (b_sums >> 16 <= ties))
        o_out = kept + (b_sums & 0xFFFF) + b_ties - 1
        if p_ids is not None:
            b_id = tl.load(p_ids + at + o, mask=m, other=-1)
        else:
            b_id = at + o
        tl.store(p_out_ids + o_out, b_id, mask=m_keep)
        if p_out_scores is not None:
            tl.store(p_out_scores + o_out, b_s, mask=m_keep)
        b_best = tl.maximum(b_best, tl.where(m_keep, unordered(b_key), float("-inf")))
        total = tl.sum(b_count)
        tied = tl.minimum(total >> 16, ties)
        kept += (total & 0xFFFF) + tied
        ties -= tied
    return kept, tl.max(b_best, axis=0)


@triton.jit
def keep_largest(p_scores, p_ids, count, k, p_out_ids, p_out_scores, BLOCK: tl.constexpr):
    """The k largest of `count` scores, in the order in which they lie; of equal ones the first.

    Args:
        p_scores: float32 scores, adjacent.
        p_ids: int32 what each belongs to; None for its own place.
        count: How many there are; may be 0.
        k: How many are kept; all where it is no less than `count`.
        p_out_ids: The ids kept, adjacent.
        p_out_scores: Their scores, or None.
        BLOCK: Scores looked at in one go, at most 2^14.

    Returns:
        How many were kept, and the largest score (NaN counted as -inf).
    """
    k = tl.minimum(k, count)
    threshold, ties = -2147483648, count  # below every key
    if k <= 0:
        count = 0
    elif k < count:
        threshold, ties = kth_key(p_scores, count, k, BLOCK)
    return keep_above(p_scores, p_ids, count, threshold, ties, p_out_ids, p_out_scores, BLOCK)


@triton.jit
def fill(p, begin, end, value, BLOCK: tl.constexpr):
    """Set the numbers from `begin` to before `end`."""
    o = tl.arange(0, BLOCK)
    for at in range(begin, end, BLOCK):
        tl.store(p + at + o, value, mask=at + o < end)


@triton.jit
def count_step(p_counters, i_first, num_heads, selected, visible, G: tl.constexpr, BLOCK_G: tl.constexpr):
    """Add a decode step of one sequence and the heads `i_first` to `i_first + G` to `[3, Hq]` float64 sums.

    Args:
        p_counters: Sums of steps, of selected and of visible keys, see `sparsesel.selector.Counters`.
        i_first: First head.
        num_heads: Hq.
        selected: Keys selected, a number or `[BLOCK_G]`.
        visible: Keys visible, a number.
        G: Heads.
        BLOCK_G: A power of two no smaller.
    """
    o_g = tl.arange(0, BLOCK_G)
    b_one = tl.full([BLOCK_G], 1, tl.int32)
    p = p_counters + i_first + o_g
    # Whole numbers, whose sums are the same in any order.
    tl.atomic_add(p, b_one.to(tl.float64), mask=o_g < G, sem="relaxed")
    tl.atomic_add(p + num_heads, (b_one * selected).to(tl.float64), mask=o_g < G, sem="relaxed")
    tl.atomic_add(p + 2 * num_heads, (b_one * visible).to(tl.float64), mask=o_g < G, sem="relaxed")
