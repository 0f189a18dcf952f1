"""Quest's kernels: bounds of pages, their scores, and attention within the pages that were chosen.

A step is: `update_bounds`, `choose_pages`, `page_attention`. What is attended to is a list of slots without gaps: the
keys of the chosen pages one after another, which are whole, then those of the last page.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
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
    rounded,
    sequence,
    token_offsets,
    weighed,
)
from sparsesel.ops.split_k import combine, num_splits, part, store_part
from sparsesel.ops.topk import largest, tile_size

# A page that no sequence fills is as good as any larger one; kernels count in 32 bits.
_LARGEST_PAGE = 1 << 30
# Chosen pages lie scattered, so that waiting for them takes most of the time: more and shorter parts than of dense
# attention.
_LEAST_KEYS = 64
# Keys that one program takes into the bounds in one go.
_KEYS = 16
# Pages that one program scores, or twice as many, and channels that it looks at in one go.
_PAGES = 32
_CHANNELS = 64
# Positions that one program writes.
_SLOTS = 1024


@dataclass(frozen=True)
class Pages:
    """What one step attends to.

    Attributes:
        plan: `[3, B]` int32: pages before the last one, how many of them are chosen, first key of the last page that
            is attended to.
        chosen: `[B · Hq, N]` int32 numbers of the chosen pages, ascending, padded with -1.
        slots: Upper bound of the keys attended to.
        page_size: P.
    """

    plan: Int[Tensor, "3 B"]
    chosen: Int[Tensor, "heads N"]
    slots: int
    page_size: int


@triton.jit
def update_bounds_kernel(
    p_k, s_kb, s_kh, s_kn, s_kd, p_lengths, p_starts, p_table, s_table,
    p_indexed, p_minima, p_maxima, held, largest_number,
    DIM: tl.constexpr, PAGE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for every num_programs-th page with new keys, of a key-value head."""
    i_part, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, start = sequence(p_lengths, p_starts, i_b)
    indexed = tl.load(p_indexed + i_b).to(tl.int32)
    i_row = (i_b * tl.num_programs(1) + i_h).to(tl.int64) * held
    o_d = tl.arange(0, BLOCK_D)
    for i_page in range(indexed // PAGE_SIZE + i_part, tl.cdiv(length, PAGE_SIZE), tl.num_programs(0)):
        begin = tl.maximum(i_page * PAGE_SIZE, indexed)
        end = tl.minimum(i_page * PAGE_SIZE + PAGE_SIZE, length)
        o_bound = (i_row + i_page) * DIM + o_d
        # What is there of the page already, nothing where it begins here.
        m_old = o_d < tl.where(indexed > i_page * PAGE_SIZE, DIM, 0)
        b_min = tl.load(p_minima + o_bound, mask=m_old, other=float("inf")).to(tl.float32)  # [D]
        b_max = tl.load(p_maxima + o_bound, mask=m_old, other=float("-inf")).to(tl.float32)
        b_nan = (b_min != b_min).to(tl.int32)
        for at in range(begin, end, BLOCK_N):
            o_n = at + tl.arange(0, BLOCK_N)
            m_n = o_n < end
            o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_h.to(tl.int64) * s_kh
            b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D).to(tl.float32)  # [N, D]
            b_nan = b_nan | tl.max((b_k != b_k).to(tl.int32), axis=0)
            b_min = tl.minimum(b_min, tl.min(tl.where(m_n[:, None], b_k, float("inf")), axis=0))
            b_max = tl.maximum(b_max, tl.max(tl.where(m_n[:, None], b_k, float("-inf")), axis=0))
        # Infinities would make 0 * inf of a product that has nothing to do with them.
        b_min = tl.minimum(tl.maximum(b_min, -largest_number), largest_number)
        b_max = tl.minimum(tl.maximum(b_max, -largest_number), largest_number)
        # One that is no number makes both bounds of its channel none.
        b_min = tl.where(b_nan > 0, float("nan"), b_min)
        b_max = tl.where(b_nan > 0, float("nan"), b_max)
        m_new = o_d < tl.where(begin < end, DIM, 0)
        tl.store(p_minima + o_bound, rounded(b_min, p_minima), mask=m_new)
        tl.store(p_maxima + o_bound, rounded(b_max, p_maxima), mask=m_new)


def update_bounds(
    kv: KVView,
    indexed: Int[Tensor, " B"],
    minima: Float[Tensor, "B Hkv N D"],
    maxima: Float[Tensor, "B Hkv N D"],
    *,
    page_size: int,
    lacking: int,
) -> None:
    """Take the keys from `indexed` on into the bounds, in place.

    Args:
        kv: Keys.
        indexed: Keys of each sequence that the bounds hold already.
        minima: Bounds with room for the pages of `kv`.
        maxima: Likewise.
        page_size: P.
        lacking: About how many keys there are to take in, for the size of the launch; any number are.
    """
    batch, kv_heads, held, dim = minima.shape
    launch(
        update_bounds_kernel,
        (num_splits(batch * kv_heads, lacking), kv_heads, batch),
        max_registers=128,
        **kv_arguments(kv, values=False),
        p_indexed=indexed,
        p_minima=minima,
        p_maxima=maxima,
        held=held,
        largest_number=torch.finfo(minima.dtype).max,
        DIM=dim,
        PAGE_SIZE=min(page_size, _LARGEST_PAGE),
        BLOCK_N=min(_KEYS, triton.next_power_of_2(page_size)),
        BLOCK_D=block_channels(dim),
    )


@triton.jit
def plan_pages_kernel(
    p_lengths, p_topk, topk, p_plan, p_counters, batch, heads,
    PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program."""
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < batch
    b_length = tl.load(p_lengths + o_b, mask=m_b, other=0).to(tl.int32)
    if p_topk is not None:
        b_topk = tl.minimum(tl.load(p_topk + o_b, mask=m_b, other=0).to(tl.int32), b_length)
    else:
        b_topk = tl.minimum(topk, b_length)
    b_earlier = tl.maximum(b_length - 1, 0) // PAGE_SIZE
    b_last = b_length - b_earlier * PAGE_SIZE  # keys of the last page
    b_wanted = tl.minimum(tl.maximum(b_topk - b_last, 0) // PAGE_SIZE, b_earlier)
    b_first = tl.maximum(b_earlier * PAGE_SIZE, b_length - b_topk)  # the latest K keys of it where there are more
    tl.store(p_plan + o_b, b_earlier, mask=m_b)
    tl.store(p_plan + batch + o_b, b_wanted, mask=m_b)
    tl.store(p_plan + 2 * batch + o_b, b_first, mask=m_b)
    if p_counters is not None:
        o_h = tl.arange(0, BLOCK_H)
        m_h = o_h < heads
        selected = tl.sum((b_wanted * PAGE_SIZE + b_length - b_first).to(tl.int64), axis=0)
        visible = tl.sum(b_length.to(tl.int64), axis=0)
        b_steps = tl.load(p_counters + o_h, mask=m_h) + batch
        b_selected = tl.load(p_counters + heads + o_h, mask=m_h) + selected.to(tl.float64)
        b_visible = tl.load(p_counters + 2 * heads + o_h, mask=m_h) + visible.to(tl.float64)
        tl.store(p_counters + o_h, b_steps, mask=m_h)
        tl.store(p_counters + heads + o_h, b_selected, mask=m_h)
        tl.store(p_counters + 2 * heads + o_h, b_visible, mask=m_h)


@triton.jit
def page_scores_kernel(
    p_q, s_qb, s_qh, s_qd, p_minima, p_maxima, held, p_earlier, p_scores, s_scores, p_best, s_best,
    G: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for a tile of pages of a key-value head, whose bounds are read once for its G query heads.

    As m ≤ M, max(q·m, q·M) is q·M where q is positive and q·m elsewhere: two products of matrices.
    """
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pages = tl.load(p_earlier + i_b)
    if i_tile * BLOCK_N < pages:
        o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = o_n < pages
        o_row = ((i_b * tl.num_programs(1) + i_h).to(tl.int64) * held + o_n) * DIM
        o_g = tl.arange(0, BLOCK_G)
        m_g = o_g < G
        p_group = p_q + i_b.to(tl.int64) * s_qb + (i_h * G + o_g).to(tl.int64) * s_qh
        b_s = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
        for at in range(0, DIM, BLOCK_D):  # some channels at a time: two products of all would not fit into registers
            o_d = at + tl.arange(0, BLOCK_D)
            m_d = o_d < DIM
            b_q = tl.load(p_group[:, None] + o_d[None, :] * s_qd, mask=m_g[:, None] & m_d[None, :], other=0.0)  # [G, D]
            b_up = b_q.to(tl.float32)
            b_down = tl.where(b_up > 0, 0.0, b_up).to(b_q.dtype)
            b_up = tl.where(b_up < 0, 0.0, b_up).to(b_q.dtype)
            o_bound = o_row[:, None] + o_d[None, :]
            m_bound = m_n[:, None] & m_d[None, :]
            b_s += products(b_up, tl.load(p_maxima + o_bound, mask=m_bound, other=0.0))  # [G, N]
            b_s += products(b_down, tl.load(p_minima + o_bound, mask=m_bound, other=0.0))
        i_head = ((i_b * tl.num_programs(1) + i_h) * G + o_g).to(tl.int64)
        tl.store(p_scores + i_head[:, None] * s_scores + o_n[None, :], b_s, mask=m_g[:, None] & m_n[None, :])
        if TILE > 0:
            b_s = tl.where(m_n[None, :] & (b_s == b_s), b_s, float("-inf"))
            b_best = tl.max(tl.reshape(b_s, [BLOCK_G, BLOCK_N // TILE, TILE]), axis=2)
            o_t = i_tile * (BLOCK_N // TILE) + tl.arange(0, BLOCK_N // TILE)
            m_t = m_g[:, None] & (o_t[None, :] * TILE < pages)
            tl.store(p_best + i_head[:, None] * s_best + o_t[None, :], b_best, mask=m_t)


def choose_pages(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    minima: Float[Tensor, "B Hkv N D"],
    maxima: Float[Tensor, "B Hkv N D"],
    *,
    topk: int | str,
    page_size: int,
    counters: Float[Tensor, "3 Hq"] | None = None,
) -> Pages:
    """The pages that each query head attends to: those of highest scores, and the last one.

    Args:
        query: Post-RoPE.
        kv: Their sequences.
        minima: Bounds of every page.
        maxima: Likewise.
        topk: K.
        page_size: P.
        counters: Sums of steps, of selected and of visible keys to add this step to, or None.
    """
    (batch, heads), device = query.shape[:2], query.device
    page_size = min(page_size, _LARGEST_PAGE)
    # Budgets and lengths of all sequences are no larger than these, so that neither are the pages of any.
    most = min(resolve_topk(topk, kv.max_length), kv.max_length)
    widest, pages = (most - 1) // page_size, (kv.max_length - 1) // page_size
    plan = torch.empty(3, batch, dtype=torch.int32, device=device)
    launch(
        plan_pages_kernel,
        (1,),
        p_lengths=kv.lengths.contiguous(),
        **topk_arguments(topk, kv),
        p_plan=plan,
        p_counters=counters,
        batch=batch,
        heads=heads,
        PAGE_SIZE=page_size,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_H=triton.next_power_of_2(heads),
    )
    if not widest:
        chosen = torch.empty(batch * heads, 0, dtype=torch.int32, device=device)
        return Pages(plan, chosen, min(page_size, kv.max_length), page_size)
    # Rows begin at multiples of 16, so that what the kernel is compiled for does not change from step to step.
    scores = torch.empty(batch * heads, -(-pages // 16) * 16, dtype=torch.float32, device=device)[:, :pages]
    # Selection among many begins with the largest of each tile, which are at hand here.
    tile = tile_size(pages, widest)
    block = max(_PAGES, min(tile, 2 * _PAGES))
    best = None
    if 0 < tile <= block:
        best = torch.empty(batch * heads, triton.cdiv(pages, 16 * tile) * 16, dtype=torch.float32, device=device)
    launch(
        page_scores_kernel,
        (triton.cdiv(pages, block), kv.num_heads, batch),
        **query_arguments(query, kv) | {"BLOCK_D": min(_CHANNELS, block_channels(minima.shape[3]))},
        p_minima=minima,
        p_maxima=maxima,
        held=minima.shape[2],
        p_earlier=plan,
        p_scores=scores,
        s_scores=scores.stride(0),
        p_best=best,
        s_best=0 if best is None else best.stride(0),
        TILE=0 if best is None else tile,
        BLOCK_N=block,
    )
    chosen, _ = largest(scores, plan[0], topk=0, p_topk=plan[1], widest=widest, maxima=best)
    return Pages(plan, chosen, (widest + 1) * page_size, page_size)


@triton.jit
def slots_of(p_plan, p_lengths, i_b, batch, PAGE_SIZE: tl.constexpr):
    """Slots of sequence `i_b` that lie in chosen pages, first key of the last page, and slots in all."""
    paged = tl.load(p_plan + batch + i_b) * PAGE_SIZE
    first = tl.load(p_plan + 2 * batch + i_b)
    return paged, first, paged + tl.load(p_lengths + i_b).to(tl.int32) - first


@triton.jit
def positions_at(o_slot, m_slot, p_chosen, paged, first, PAGE_SIZE: tl.constexpr):
    """Logical positions of slots; p_chosen is the head's row."""
    m_paged = o_slot < paged
    i_page = tl.load(p_chosen + o_slot // PAGE_SIZE, mask=m_slot & m_paged, other=0)
    return tl.where(m_paged, i_page * PAGE_SIZE + o_slot % PAGE_SIZE, first + o_slot - paged)


@triton.jit
def page_support_kernel(
    p_plan, p_chosen, widest, p_lengths, p_out, slots, batch, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for some slots of a query head."""
    i_tile, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_row = (i_b * tl.num_programs(1) + i_h).to(tl.int64)
    paged, first, count = slots_of(p_plan, p_lengths, i_b, batch, PAGE_SIZE)
    o_slot = i_tile * BLOCK + tl.arange(0, BLOCK)
    m_slot = o_slot < count
    b_n = positions_at(o_slot, m_slot, p_chosen + i_row * widest, paged, first, PAGE_SIZE)
    tl.store(p_out + i_row * slots + o_slot, tl.where(m_slot, b_n, -1), mask=o_slot < slots)


def page_support(pages: Pages, kv: KVView) -> Int[Tensor, "B Hq K"]:
    """Positions attended to, int32, ascending, padded with -1."""
    batch = kv.batch_size
    heads, widest = pages.chosen.shape[0] // batch, pages.chosen.shape[1]
    positions = torch.empty(batch, heads, pages.slots, dtype=torch.int32, device=kv.device)
    block = min(_SLOTS, triton.next_power_of_2(pages.slots))
    launch(
        page_support_kernel,
        (triton.cdiv(pages.slots, block), heads, batch),
        p_plan=pages.plan,
        p_chosen=pages.chosen,
        widest=widest,
        p_lengths=kv.lengths.contiguous(),
        p_out=positions,
        slots=pages.slots,
        batch=batch,
        PAGE_SIZE=pages.page_size,
        BLOCK=block,
    )
    return positions


@triton.jit
def page_attention_kernel(
    p_q, s_qb, s_qh, s_qd,
    p_k, s_kb, s_kh, s_kn, s_kd,
    p_v, s_vb, s_vh, s_vn, s_vd,
    p_lengths, p_starts, p_table, s_table,
    p_plan, p_chosen, widest, batch, p_part, p_lse, num_splits, scale,
    G: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PAGE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program per part of the slots of a query head, so that G and BLOCK_G are 1."""
    i_split, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, start = sequence(p_lengths, p_starts, i_b)
    paged, first, count = slots_of(p_plan, p_lengths, i_b, batch, PAGE_SIZE)
    begin, end = part(count, i_split, num_splits, BLOCK_N)
    i_row = i_b * tl.num_programs(1) + i_h
    i_kv = (i_h // GROUP).to(tl.int64)
    p_chosen += i_row.to(tl.int64) * widest
    b_q = load_group(p_q, i_b, i_h, s_qb, s_qh, s_qd, G, DIM, BLOCK_G, BLOCK_D)  # [1, D]
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for at in range(begin, end, BLOCK_N):
        o_slot = at + tl.arange(0, BLOCK_N)
        m_n = o_slot < end
        o_n = positions_at(o_slot, m_n, p_chosen, paged, first, PAGE_SIZE)
        o_k = token_offsets(o_n, m_n, start, i_b, s_kb, s_kn, p_table, s_table, PAGE) + i_kv * s_kh
        b_k = load_rows(p_k, o_k, m_n, s_kd, DIM, BLOCK_D)  # [N, D]
        b_s = tl.where(m_n[None, :], products(b_q, b_k) * scale, float("-inf"))  # [1, N]
        b_p, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        o_v = token_offsets(o_n, m_n, start, i_b, s_vb, s_vn, p_table, s_table, PAGE) + i_kv * s_vh
        b_v = load_rows(p_v, o_v, m_n, s_vd, DIM_V, BLOCK_DV)  # [N, Dv]
        b_acc = b_acc * b_scale[:, None] + weighed(b_p, b_v)
    store_part(p_part, p_lse, b_acc, b_max, b_sum, end - begin, i_row, i_split, num_splits, G, DIM_V)


def page_attention(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, pages: Pages, *, scale: float
) -> Float[Tensor, "B Hq 1 Dv"]:
    """Softmax attention within the pages of each query head, split along their keys."""
    batch, heads = query.shape[:2]
    dim_v = kv.values.shape[3]
    splits = num_splits(batch * heads, pages.slots, least=_LEAST_KEYS)
    parts = torch.empty(batch * heads, splits, dim_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch * heads, splits, 2, dtype=torch.float32, device=query.device)
    launch(
        page_attention_kernel,
        (splits, heads, batch),
        max_registers=128,
        **query_arguments(query, kv) | {"G": 1, "GROUP": heads // kv.num_heads, "BLOCK_G": 1},
        **kv_arguments(kv),
        p_plan=pages.plan,
        p_chosen=pages.chosen,
        widest=pages.chosen.shape[1],
        batch=batch,
        p_part=parts,
        p_lse=lse,
        num_splits=splits,
        scale=scale,
        DIM_V=dim_v,
        PAGE_SIZE=pages.page_size,
        BLOCK_N=min(block_tokens(kv.keys), block_tokens(kv.values)),
        BLOCK_DV=block_channels(dim_v),
    )
    return combine(parts, lse, query.dtype).view(batch, heads, 1, dim_v)
