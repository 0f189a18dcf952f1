"""Sink-and-window attention in one kernel and the usual combination: its positions follow from lengths alone."""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops.launch import (
    block_channels,
    block_tokens,
    kv_arguments,
    launch,
    loop_stages,
    query_arguments,
    topk_arguments,
)
from sparsesel.ops.primitives import (
    count_step,
    load_group,
    load_rows,
    online_softmax,
    products,
    row_budget,
    sequence,
    token_offsets,
    weighed,
)
from sparsesel.ops.split_k import combine, num_splits, part, store_part
from sparsesel.rotary import Rotary

# What a launch attends to: everything that is kept, or one of its two runs of positions.
KEPT, SINKS, WINDOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Keys are few: parts as short as a tile of them.
_LEAST_KEYS = 64


@triton.jit
def cosine_and_sine(b_turns):
    """Of angles in float64, counted in full turns, to float32: polynomials of the nearest quarter turn's distance."""
    b_quarter = tl.floor(b_turns * 4.0 + 0.5)
    b_x = (b_turns * 4.0 - b_quarter).to(tl.float32) * 1.5707963267948966  # within an eighth of a turn
    b_z = b_x * b_x
    b_sin = b_x + b_x * b_z * (-1.6666654611e-1 + b_z * (8.3321608736e-3 - b_z * 1.9515295891e-4))
    b_cos = 4.166664568298827e-2 - b_z * (1.388731625493765e-3 - b_z * 2.443315711809948e-5)
    b_cos = 1.0 - 0.5 * b_z + b_z * b_z * b_cos
    b_quarter = b_quarter.to(tl.int64) & 3
    m_odd = (b_quarter & 1) == 1
    b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
    m_minus_cos, m_minus_sin = (b_quarter == 1) | (b_quarter == 2), b_quarter >= 2
    return tl.where(m_minus_cos, -b_first, b_first), tl.where(m_minus_sin, -b_second, b_second)


@triton.jit
def load_rotated_group(
    p_q, i_b, i_first, s_qb, s_qh, s_qd, p_freq, s_freq, offset, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr,
    G: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """As `load_group`, `offset` positions further on, float32; see `sparsesel.rotary.Rotary.rotate`."""
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_turned = o_d < 2 * COUNT
    if INTERLEAVED:
        o_pair, o_other, m_first = o_d // 2, o_d ^ 1, o_d % 2 == 0
    else:
        o_pair, m_first = o_d % COUNT, o_d < COUNT
        o_other = tl.where(m_first, o_d + COUNT, o_d - COUNT)
    # In float64: a float32 angle of many turns is off by more than the positions it is to tell apart.
    b_turns = tl.load(p_freq + o_pair * s_freq, mask=m_turned, other=0.0).to(tl.float64) * offset
    b_turns = b_turns * tl.full([BLOCK_D], 0.15915494309189535, tl.float64)  # radians to turns
    b_cos, b_sin = cosine_and_sine(b_turns)
    p_row = p_q + i_b.to(tl.int64) * s_qb + (i_first + o_g[:, None]).to(tl.int64) * s_qh  # [G, 1]
    m_g = o_g[:, None] < G
    b_own = tl.load(p_row + o_d[None, :] * s_qd, mask=m_g & (o_d[None, :] < DIM), other=0.0).to(tl.float32)
    b_other = tl.load(p_row + o_other[None, :] * s_qd, mask=m_g & m_turned[None, :], other=0.0).to(tl.float32)
    b_side = tl.where(m_first, -b_sin, b_sin)[None, :]
    return tl.where(m_turned[None, :], b_own * b_cos[None, :] + b_other * b_side, b_own)


@triton.jit
def sink_window_attention_kernel(
    p_q, s_qb, s_qh, s_qd, p_freq, s_freq,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_topk, topk, sink_size, p_part, p_lse, first_part, num_parts, p_counters, scale,
    RUN: tl.constexpr, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per part of a run of a key-value head; of all programs, those of the first part count the step."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, start = sequence(p_lengths, p_starts, i_b)
    budget = row_budget(p_topk, topk, i_b, length)
    sinks = tl.maximum(tl.minimum(budget - 1, sink_size), 0)
    # Of the slots 0 to K - 1, those before `sinks` hold the first positions, the others the last ones.
    first, last = 0, budget
    if RUN == SINKS:
        last = sinks
    if RUN == WINDOW:
        first = sinks
    begin, end = part(last - first, i_split, tl.num_programs(0), BLOCK_N)
    i_kv = i_h.to(tl.int64)
    # [G, D]
    if RUN == SINKS:
        b_q = load_rotated_group(
            p_q, i_b, i_h * G, s_qb, s_qh, s_qd, p_freq, s_freq, budget - length, COUNT, INTERLEAVED,
            G, DIM, BLOCK_G, BLOCK_D,
        )  # fmt: skip
    else:
        b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for at in range(first + begin, first + end, BLOCK_N):
        o_slot = at + tl.arange(0, BLOCK_N)
        m_n = o_slot < first + end
        o_n = tl.where(o_slot < sinks, o_slot, o_slot + (length - budget))
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv * s_kh
        b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = tl.where(m_n[None, :], products(b_q, b_k) * scale, float("-inf"))  # [G, N]
        b_p, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        o_v = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
        b_v = load_rows(p_v, o_v, m_n, s_vd, DIM_V, BLOCK_DV)  # [N, Dv]
        b_acc = b_acc * b_scale[:, None] + weighed(b_p, b_v)
    i_row, i_part = (i_b * tl.num_programs(1) + i_h) * G, first_part + i_split
    store_part(p_part, p_lse, b_acc, b_max, b_sum, end - begin, i_row, i_part, num_parts, G, DIM_V)
    if i_part == 0:
        count_step(p_counters, i_h * G, tl.num_programs(1) * G, budget, length, G, BLOCK_G)


def sink_window_attention(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    *,
    topk: int | str,
    sink_size: int,
    scale: float,
    rotary: Rotary | None,
    counters: Float[Tensor, "3 Hq"],
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention over the first positions and the last, K of them; zeros for a sequence without any.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        topk: K.
        sink_size: S.
        scale: Factor of the scores.
        rotary: How to score the sinks by the query as it would be at position K - 1; None to score them by it as it is.
        counters: Sums of steps, of selected and of visible keys, to add this step to.
    """
    batch, num_heads = query.shape[:2]
    dim_v = kv.values.shape[3]
    kept = min(resolve_topk(topk, kv.max_length), kv.max_length)
    block = min(block_tokens(kv.keys), block_tokens(kv.values))
    runs = [(KEPT, kept, block)]
    frequencies = None
    if rotary is not None and rotary.inv_freq.shape[0] and sink_size:
        # A rotated query is float32: products with it take a launch of their own, on the smallest tiles, as they take
        # more registers and sinks are few.
        frequencies = rotary.inv_freq.to(query.device)
        runs = [(WINDOW, kept, block), (SINKS, min(sink_size, kept), 16)]
    splits = [num_splits(batch * kv.num_heads, keys, least=_LEAST_KEYS) for _, keys, _ in runs]
    parts = torch.empty(batch * num_heads, sum(splits), dim_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch * num_heads, sum(splits), 2, dtype=torch.float32, device=query.device)
    for i, (run, _, tokens) in enumerate(runs):
        turned = frequencies if run == SINKS else None
        launch(
            sink_window_attention_kernel,
            (splits[i], kv.num_heads, batch),
            num_stages=loop_stages(kv.values),
            **query_arguments(query, kv),
            **kv_arguments(kv),
            **topk_arguments(topk, kv),
            p_freq=turned,
            s_freq=0 if turned is None else turned.stride(0),
            sink_size=sink_size,
            p_part=parts,
            p_lse=lse,
            first_part=sum(splits[:i]),
            num_parts=sum(splits),
            p_counters=counters,
            scale=scale,
            RUN=run.value,
            COUNT=0 if turned is None else turned.shape[0],
            INTERLEAVED=rotary is not None and rotary.interleaved,
            DIM_V=dim_v,
            BLOCK_N=tokens,
            BLOCK_DV=block_channels(dim_v),
        )
    return combine(parts, lse, query.dtype).view(batch, num_heads, 1, dim_v)
