"""Softmax attention over chosen positions, split along them; keys and values are read where they lie."""

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
    block_channels,
    block_tokens,
    index_arguments,
    kv_arguments,
    launch,
    loop_stages,
    query_arguments,
)
from sparsesel.ops.primitives import load_group, load_rows, online_softmax, products, sequence, token_offsets, weighed
from sparsesel.ops.split_k import combine, num_splits, part, store_part

# Chosen keys lie scattered, so that waiting for them takes most of the time: more and shorter parts than of dense
# attention.
_LEAST_KEYS = 64


@triton.jit
def sparse_attention_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_index, s_ib, s_ih, s_in,
    p_part, p_lse, slots, num_splits, scale,
    G: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per part of the slots, for the G of a key-value head's GROUP query heads that share them."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, start = sequence(p_lengths, p_starts, i_b)
    i_kv = (i_h * G // GROUP).to(tl.int64)
    begin, end = part(slots, i_split, num_splits, BLOCK_N)
    b_q = load_group(p_q, i_b, i_h * G, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [G, D]
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    count = 0
    for at in range(begin, end, BLOCK_N):
        o_slot = at + tl.arange(0, BLOCK_N)
        p = p_index + i_b.to(tl.int64) * s_ib + i_h.to(tl.int64) * s_ih + o_slot.to(tl.int64) * s_in
        o_n = tl.load(p, mask=o_slot < end, other=-1)
        m_n = o_n >= 0
        count += tl.sum(m_n.to(tl.int32), axis=0)
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv * s_kh
        b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = tl.where(m_n[None, :], products(b_q, b_k) * scale, float("-inf"))  # [G, N]
        b_p, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        o_v = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
        b_v = load_rows(p_v, o_v, m_n, s_vd, DIM_V, BLOCK_DV)  # [N, Dv]
        b_acc = b_acc * b_scale[:, None] + weighed(b_p, b_v)
    i_row = (i_b * tl.num_programs(1) + i_h) * G
    store_part(p_part, p_lse, b_acc, b_max, b_sum, count, i_row, i_split, num_splits, G, DIM_V)


@triton.jit
def softmax_values_kernel(
    p_scores, s_sb, s_sh, s_sn,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_index, s_ib, s_ih, s_in,
    p_part, p_lse, slots, num_splits,
    G: tl.constexpr, GROUP: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """As `sparse_attention_kernel`, of scores that are known."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, start = sequence(p_lengths, p_starts, i_b)
    i_kv = (i_h * G // GROUP).to(tl.int64)
    begin, end = part(slots, i_split, num_splits, BLOCK_N)
    o_g = tl.arange(0, BLOCK_G)
    p_row = p_scores + i_b.to(tl.int64) * s_sb + (i_h * G + o_g[:, None]).to(tl.int64) * s_sh  # [G, 1]
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    count = 0
    for at in range(begin, end, BLOCK_N):
        o_slot = (at + tl.arange(0, BLOCK_N)).to(tl.int64)
        p = p_index + i_b.to(tl.int64) * s_ib + i_h.to(tl.int64) * s_ih + o_slot * s_in
        o_n = tl.load(p, mask=o_slot < end, other=-1)
        m_n = o_n >= 0
        count += tl.sum(m_n.to(tl.int32), axis=0)
        m_s = (o_g[:, None] < G) & m_n[None, :]
        b_s = tl.load(p_row + o_slot[None, :] * s_sn, mask=m_s, other=float("-inf")).to(tl.float32)  # [G, N]
        b_p, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        o_v = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
        b_v = load_rows(p_v, o_v, m_n, s_vd, DIM_V, BLOCK_DV)  # [N, Dv]
        b_acc = b_acc * b_scale[:, None] + weighed(b_p, b_v)
    i_row = (i_b * tl.num_programs(1) + i_h) * G
    store_part(p_part, p_lse, b_acc, b_max, b_sum, count, i_row, i_split, num_splits, G, DIM_V)


def sparse_attention(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, indices: Int[Tensor, "B H 1 K"], *, scale: float
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention over chosen positions; see `reference.sparse_attention`."""
    parts, lse = sparse_attention_parts(query, kv, indices[:, :, 0], scale=scale)
    return combine(parts, lse, query.dtype).view(*query.shape[:2], 1, kv.values.shape[3])


def sparse_attention_parts(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, indices: Int[Tensor, "B H K"], *, scale: float
) -> tuple[Float[Tensor, "heads S Dv"], Float[Tensor, "heads S 2"]]:
    """The same in parts, see `split_k.store_part`, for kernels that make more of them than their sum."""
    chosen = index_arguments(indices, query, kv)
    block = min(block_tokens(kv.keys), block_tokens(kv.values))
    arguments = {**query_arguments(query, kv) | chosen, **kv_arguments(kv), "scale": scale, "BLOCK_N": block}
    return _parts(sparse_attention_kernel, arguments, query.shape[1], kv, indices.shape[2])


def softmax_values(
    scores: Float[Tensor, "B Hq K"], kv: KVView, indices: Int[Tensor, "B H K"]
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Values of chosen positions, weighed by the softmax of scores already known; see `reference.softmax_values`."""
    parts, lse = softmax_values_parts(scores, kv, indices)
    return combine(parts, lse, torch.float32).view(*scores.shape[:2], 1, kv.values.shape[3])


def softmax_values_parts(
    scores: Float[Tensor, "B Hq K"], kv: KVView, indices: Int[Tensor, "B H K"]
) -> tuple[Float[Tensor, "heads S Dv"], Float[Tensor, "heads S 2"]]:
    """The same in parts, see `split_k.store_part`, for kernels that make more of them, or output of another type."""
    arguments = {
        **index_arguments(indices, scores, kv),
        **kv_arguments(kv, keys=False),
        **dict(zip(("s_sb", "s_sh", "s_sn"), scores.stride(), strict=True)),
        "p_scores": scores,
        "BLOCK_N": block_tokens(kv.values),
    }
    return _parts(softmax_values_kernel, arguments, scores.shape[1], kv, indices.shape[2])


def _parts(
    kernel: Any, arguments: dict[str, Any], num_heads: int, kv: KVView, slots: int
) -> tuple[Float[Tensor, "heads S Dv"], Float[Tensor, "heads S 2"]]:
    """Launch one of the kernels over the parts of its slots."""
    batch, dim_v = kv.batch_size, kv.values.shape[3]
    programs, stages = num_heads // arguments["G"], loop_stages(kv.values)
    splits = num_splits(batch * programs, slots, least=_LEAST_KEYS)
    parts = torch.empty(batch * num_heads, splits, dim_v, dtype=torch.float32, device=kv.device)
    lse = torch.empty(batch * num_heads, splits, 2, dtype=torch.float32, device=kv.device)
    is_mixed = arguments.get("p_q", kv.keys).dtype != kv.keys.dtype
    launch(
        kernel,
        (splits, programs, batch),
        num_stages=stages,
        # A single query needs few; those of a group need all that there are, if of float32 or where one part is all.
        max_registers=168 if arguments["BLOCK_G"] == 1 else 255 if stages == 1 or splits == 1 or is_mixed else 0,
        **arguments,
        p_part=parts,
        p_lse=lse,
        slots=slots,
        num_splits=splits,
        DIM_V=dim_v,
        BLOCK_DV=block_channels(dim_v),
    )
    return parts, lse
