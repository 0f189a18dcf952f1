"""Scores of chosen keys, each read by its index where it lies: no keys are gathered into a tensor."""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops.launch import block_tokens, index_arguments, kv_arguments, launch, query_arguments
from sparsesel.ops.primitives import load_group, load_rows, products, sequence, token_offsets


@triton.jit
def indexed_qk_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_lengths, p_starts, p_table, s_table,
    p_index, s_ib, s_ih, s_in, p_counts, s_cb, s_ch,
    p_scores, s_ob, s_oh, slots, scale,
    G: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per tile of slots, for the G of a key-value head's GROUP query heads that share them."""
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = slots
    if p_counts is not None:
        count = tl.minimum(tl.load(p_counts + i_b.to(tl.int64) * s_cb + i_h * s_ch).to(tl.int32), slots)
    if i_tile * BLOCK_N < count:
        _, start = sequence(p_lengths, p_starts, i_b)
        o_slot = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_slot = o_slot < count
        p = p_index + i_b.to(tl.int64) * s_ib + i_h.to(tl.int64) * s_ih + o_slot.to(tl.int64) * s_in
        o_n = tl.load(p, mask=m_slot, other=-1)
        m_n = o_n >= 0
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE)
        i_kv = (i_h * G // GROUP).to(tl.int64)
        b_k = load_rows(p_k, o_k + i_kv * s_kh, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
        b_s = tl.where(m_n[None, :], products(b_q, b_k) * scale, float("-inf"))  # [G, N]
        o_g = tl.arange(0, BLOCK_G)
        p_o = p_scores + i_b.to(tl.int64) * s_ob + (i_h * G + o_g[:, None]).to(tl.int64) * s_oh + o_slot[None, :]
        tl.store(p_o, b_s, mask=(o_g[:, None] < G) & m_slot[None, :])


def indexed_qk(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    indices: Int[Tensor, "B H M"],
    *,
    scale: float,
    counts: Int[Tensor, "B H"] | None = None,
    out: Float[Tensor, "B Hq M"] | None = None,
) -> Float[Tensor, "B Hq M"]:
    """Scaled scores of chosen keys only; see `reference.indexed_qk`.

    Args:
        query: Post-RoPE.
        kv: Keys and values.
        indices: Logical positions, H in {1, Hkv, Hq}, -1 where unused.
        scale: Factor of the scores.
        counts: Slots of each row that are looked at, known to the device alone; scores of the others stay as they
            are in `out`. None for all.
        out: float32 to write the scores to, adjacent along M.
    """
    batch, num_heads = query.shape[:2]
    slots = indices.shape[2]
    if out is None:
        out = torch.empty(batch, num_heads, slots, dtype=torch.float32, device=query.device)
    block = block_tokens(kv.keys)
    chosen = index_arguments(indices, query, kv)
    programs = num_heads // chosen["G"]
    if counts is not None:
        counts = counts.expand(batch, programs)
    launch(
        indexed_qk_kernel,
        (triton.cdiv(slots, block), programs, batch),
        **query_arguments(query, kv) | chosen,
        **kv_arguments(kv, values=False),
        p_counts=counts,
        s_cb=0 if counts is None else counts.stride(0),
        s_ch=0 if counts is None else counts.stride(1),
        p_scores=out,
        s_ob=out.stride(0),
        s_oh=out.stride(1),
        slots=slots,
        scale=scale,
        BLOCK_N=block,
    )
    return out
