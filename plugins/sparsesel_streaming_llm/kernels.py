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
    query_arguments,
    topk_arguments,
)
from sparsesel.ops.primitives import (
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

# What a launch attends to: everything that is kept, or one of its two runs of positions.
KEPT, SINKS, WINDOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Keys are few: parts as short as a tile of them.
_LEAST_KEYS = 64


@triton.jit
def sink_window_attention_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_topk, topk, sink_size, p_part, p_lse, first_part, num_parts, p_counters, scale,
    RUN: tl.constexpr,
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
    o_g = tl.arange(0, BLOCK_G)
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
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
        heads = tl.num_programs(1) * G
        p_sum = p_counters + i_h * G + o_g
        b_one = tl.full([BLOCK_G], 1, tl.int32)
        tl.atomic_add(p_sum, b_one.to(tl.float64), mask=o_g < G)
        tl.atomic_add(p_sum + heads, (b_one * budget).to(tl.float64), mask=o_g < G)
        tl.atomic_add(p_sum + 2 * heads, (b_one * length).to(tl.float64), mask=o_g < G)


def sink_window_attention(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    *,
    topk: int | str,
    sink_size: int,
    scale: float,
    near: Float[Tensor, "B Hq 1 D"] | None,
    counters: Float[Tensor, "3 Hq"],
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention over the first positions and the last, K of them; zeros for a sequence without any.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        topk: K.
        sink_size: S.
        scale: Factor of the scores.
        near: The query that sinks are scored by, float32, or None for `query`.
        counters: Sums of steps, of selected and of visible keys, to add this step to.
    """
    batch, num_heads = query.shape[:2]
    dim_v = kv.values.shape[3]
    kept = min(resolve_topk(topk, kv.max_length), kv.max_length)
    # A query of another type takes a launch of its own.
    runs = [(KEPT, query, kept)] if near is None else [(WINDOW, query, kept), (SINKS, near, min(sink_size, kept))]
    splits = [num_splits(batch * kv.num_heads, keys, least=_LEAST_KEYS) for _, _, keys in runs]
    parts = torch.empty(batch * num_heads, sum(splits), dim_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch * num_heads, sum(splits), 2, dtype=torch.float32, device=query.device)
    for i, (run, vectors, _) in enumerate(runs):
        launch(
            sink_window_attention_kernel,
            (splits[i], kv.num_heads, batch),
            **query_arguments(vectors, kv),
            **kv_arguments(kv),
            **topk_arguments(topk, kv),
            sink_size=sink_size,
            p_part=parts,
            p_lse=lse,
            first_part=sum(splits[:i]),
            num_parts=sum(splits),
            p_counters=counters,
            scale=scale,
            RUN=run.value,
            DIM_V=dim_v,
            # As many keys as fit when they are of the query's type.
            BLOCK_N=min(block_tokens(vectors), block_tokens(kv.keys), block_tokens(kv.values)),
            BLOCK_DV=block_channels(dim_v),
        )
    return combine(parts, lse, query.dtype).view(batch, num_heads, 1, dim_v)
