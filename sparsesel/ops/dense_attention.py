"""Dense attention of one query per head, split along the keys; each key is read once for its G query heads."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops.launch import block_channels, block_tokens, kv_arguments, launch, query_arguments
from sparsesel.ops.primitives import (
    count_step,
    load_group,
    load_rows,
    online_softmax,
    products,
    sequence,
    token_offsets,
    weighed,
)
from sparsesel.ops.split_k import combine, num_splits, part, store_part


@triton.jit
def dense_attention_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_part, p_lse, p_counters, num_splits, scale,
    G: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per part of the keys of a key-value head."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, start = sequence(p_lengths, p_starts, i_b)
    begin, end = part(length, i_split, num_splits, BLOCK_N)
    i_kv = i_h.to(tl.int64)
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for at in range(begin, end, BLOCK_N):
        o_n = at + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv * s_kh
        b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = tl.where(m_n[None, :], products(b_q, b_k) * scale, float("-inf"))  # [G, N]
        b_p, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        o_v = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
        b_v = load_rows(p_v, o_v, m_n, s_vd, DIM_V, BLOCK_DV)  # [N, Dv]
        b_acc = b_acc * b_scale[:, None] + weighed(b_p, b_v)
    i_row = (i_b * tl.num_programs(1) + i_h) * G
    store_part(p_part, p_lse, b_acc, b_max, b_sum, end - begin, i_row, i_split, num_splits, G, DIM_V)
    if p_counters is not None and i_split == 0:
        count_step(p_counters, i_h * G, tl.num_programs(1) * G, length, length, G, BLOCK_G)


def dense_attention(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, *, scale: float, counters: Float[Tensor, "3 Hq"] | None = None
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention of one query per head over every visible key; see `reference.dense_attention`.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        scale: Factor of the scores.
        counters: Sums of steps, of selected and of visible keys, to add this step to, or None.
    """
    batch, num_heads = query.shape[:2]
    dim_v = kv.values.shape[3]
    splits = num_splits(batch * kv.num_heads, kv.max_length)
    parts = torch.empty(batch * num_heads, splits, dim_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch * num_heads, splits, 2, dtype=torch.float32, device=query.device)
    launch(
        dense_attention_kernel,
        (splits, kv.num_heads, batch),
        **query_arguments(query, kv),
        **kv_arguments(kv),
        p_part=parts,
        p_lse=lse,
        p_counters=counters,
        num_splits=splits,
        scale=scale,
        # Left to choose, the assembler spills some where queries are not of the keys' type.
        max_registers=0 if query.dtype == kv.keys.dtype else 255,
        DIM_V=dim_v,
        BLOCK_N=min(block_tokens(kv.keys), block_tokens(kv.values)),
        BLOCK_DV=block_channels(dim_v),
    )
    return combine(parts, lse, query.dtype).view(batch, num_heads, 1, dim_v)
