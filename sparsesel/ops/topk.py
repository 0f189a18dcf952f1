"""The K largest scores of each row, exactly, however many and whatever they are.

A row is cut into tiles, and the K tiles of largest maxima are found (of equal ones the first). Their maxima are K
scores no smaller than the K-th largest tile maximum θ, so that the K-th largest score is no smaller either, and every
tile that holds a score above θ is among them. Of the scores equal to θ the first are wanted: before one in a tile
passed over lie those of all tiles at θ that were taken, which with the scores above θ are K. So the scores ≥ θ of those
K tiles hold the support; they are gathered in order, and the K largest of them kept.

That looks at each maximum about five times and at K tiles once, in one program per row. No buffer can overflow: K tiles
have K · tile scores.
"""

# Device code is Triton's language, which types of Python do not describe.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.errors import InputError
from sparsesel.ops.launch import launch
from sparsesel.ops.primitives import fill, keep_above, keep_largest, kth_key, ordered, row_budget

# Scores that a program looks at in one go: of rows and of the few that are left of them. A row that is no longer than
# the first needs no tiles.
_BLOCK = 2048
_BLOCK_NEAR = 1024


def tile_size(total: int, widest: int) -> int:
    """Scores per tile for rows of `total` scores of which up to `widest` are wanted; 0 where tiles do not help.

    Five looks at total / T maxima and one at widest · T scores are fewest at T = √(5 · total / widest).
    """
    widest = min(widest, total)
    if total <= _BLOCK or not widest:
        return 0
    tile = 1 << max(3, min(10, round(math.log2(5 * total / widest) / 2)))
    return tile if total > tile * widest else 0


@triton.jit
def tile_maxima_kernel(
    p_scores, s_scores, p_lengths, p_maxima, s_maxima, HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """One program for some tiles of a row."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(p_lengths + i_row // HEADS).to(tl.int32)
    o_t = i_part * TILES + tl.arange(0, TILES)
    if i_part * TILES * TILE < length:
        o_n = o_t[:, None] * TILE + tl.arange(0, TILE)[None, :]
        b_s = tl.load(p_scores + i_row * s_scores + o_n, mask=o_n < length, other=float("-inf"))
        b_s = tl.where(b_s == b_s, b_s, float("-inf"))
        tl.store(p_maxima + i_row * s_maxima + o_t, tl.max(b_s, axis=1), mask=o_t * TILE < length)


@triton.jit
def topk_kernel(
    p_scores, s_scores, p_maxima, s_maxima, p_lengths, p_topk, topk, widest,
    p_tiles, p_near, p_near_scores, s_near, p_out, p_out_scores, p_counters,
    HEADS: tl.constexpr, TILE: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_NEAR: tl.constexpr,
):  # fmt: skip
    """One program per row; every HEADS rows have one length and budget."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lengths + i_row // HEADS).to(tl.int32)
    k = tl.minimum(row_budget(p_topk, topk, i_row // HEADS, length), widest)
    p_scores += i_row * s_scores
    p_out += i_row * widest
    p_out_scores += i_row * widest
    if p_maxima is None:
        kept, _ = keep_largest(p_scores, None, length, k, p_out, p_out_scores, BLOCK)
    else:
        p_maxima += i_row * s_maxima
        p_tiles += i_row * widest
        p_near += i_row * s_near
        p_near_scores += i_row * s_near
        num_tiles = tl.cdiv(tl.where(k > 0, length, 0), TILE)  # none where nothing is wanted of them
        threshold, ties = -2147483648, num_tiles  # below every key
        if k < num_tiles:
            threshold, ties = kth_key(p_maxima, num_tiles, k, BLOCK)
        keep_above(p_maxima, None, num_tiles, threshold, ties, p_tiles, None, BLOCK)
        tl.debug_barrier()
        near, seen = 0, tl.minimum(k, num_tiles) * TILE
        for at in range(0, seen, BLOCK):
            o = at + tl.arange(0, BLOCK)
            m = o < seen
            o_n = tl.load(p_tiles + o // TILE, mask=m, other=0) * TILE + o % TILE
            m = m & (o_n < length)
            b_s = tl.load(p_scores + o_n, mask=m, other=float("-inf"))
            m = m & (ordered(b_s) >= threshold)
            b_count = tl.cumsum(m.to(tl.int32), axis=0)
            tl.store(p_near + near + b_count - 1, o_n, mask=m)
            tl.store(p_near_scores + near + b_count - 1, b_s, mask=m)
            near += tl.sum(m.to(tl.int32))
        tl.debug_barrier()
        kept, _ = keep_largest(p_near_scores, p_near, near, k, p_out, p_out_scores, BLOCK_NEAR)
    fill(p_out, kept, widest, -1, BLOCK_NEAR)
    fill(p_out_scores, kept, widest, float("-inf"), BLOCK_NEAR)
    if COUNTERS > 0:
        p_counters += i_row % HEADS
        tl.atomic_add(p_counters, tl.cast(kept, tl.float64), sem="relaxed")
        tl.atomic_add(p_counters + HEADS, tl.cast(length, tl.float64), sem="relaxed")
        for i in tl.static_range(2, COUNTERS):
            tl.atomic_add(p_counters + i * HEADS, tl.full([], 1.0, tl.float64), sem="relaxed")


def topk_indices(
    scores: Float[Tensor, "*rows L"],
    topk: int | Int[Tensor, "*rows"],
    lengths: Int[Tensor, "*rows"],
    *,
    widest: int | None = None,
) -> Int[Tensor, "*rows K"]:
    """Positions of the highest scores of each row; see `reference.topk_indices`.

    Raises:
        InputError: Scores that float32 does not hold.
    """
    if scores.dtype == torch.float64 or not scores.is_floating_point():
        raise InputError(
            "scores", expected="float32 or shorter", got=scores.dtype, remedy="Convert them, or choose backend=eager."
        )
    if widest is None:
        widest = topk if isinstance(topk, int) else int(topk.max())
    rows, total = scores.shape[:-1], scores.shape[-1]
    scores = scores.float().reshape(math.prod(rows), total)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    # One number expanded to many lies in one place, and `reshape` alone would leave it there.
    per_row = {"p_topk": None, "topk": topk}
    if not isinstance(topk, int):
        per_row = {"p_topk": topk.reshape(-1).contiguous(), "topk": 0}
    indices, _ = largest(scores, lengths.reshape(-1).contiguous(), **per_row, widest=widest)
    return indices.view(*rows, indices.shape[1])


def largest(
    scores: Float[Tensor, "rows L"],
    lengths: Int[Tensor, " sequences"],
    *,
    topk: int,
    p_topk: Int[Tensor, " sequences"] | None,
    widest: int,
    maxima: Float[Tensor, "rows N"] | None = None,
    counters: Float[Tensor, "N heads"] | None = None,
) -> tuple[Int[Tensor, "rows K"], Float[Tensor, "rows K"]]:
    """The largest scores of each row, see `topk_indices`, of rows that share their length and budget.

    Scratch is 4 bytes per tile, and per row K tiles of 8 bytes per score: 8 · √(5 · K · L) bytes or so.

    Args:
        scores: Adjacent within a row.
        lengths: Visible positions, for every rows / sequences rows.
        topk: Budget.
        p_topk: Budgets in its place, likewise.
        widest: Upper bound of the budgets.
        maxima: The largest score of each tile of `tile_size(L, widest)`, NaN counted as -inf, where these are known
            already.
        counters: float64 sums by row of a sequence, to which are added: kept and visible scores, and 1 from then on.

    Returns:
        int32 indices, ascending, -1 where unused, and the scores there, -inf where unused.
    """
    rows, total = scores.shape
    widest = min(widest, total)
    indices = torch.empty(rows, widest, dtype=torch.int32, device=scores.device)
    kept = torch.empty(rows, widest, dtype=torch.float32, device=scores.device)
    if not widest or not rows:
        return indices, kept
    heads = rows // lengths.shape[0]
    tile = tile_size(total, widest)
    tiles = near = near_scores = None
    if tile:
        if maxima is None:
            maxima = _tile_maxima(scores, lengths, heads, tile)
        tiles = torch.empty(rows, widest, dtype=torch.int32, device=scores.device)
        near = torch.empty(rows, widest * tile, dtype=torch.int32, device=scores.device)
        near_scores = torch.empty(rows, widest * tile, dtype=torch.float32, device=scores.device)
    block = _BLOCK if (-(-total // tile) if tile else total) > _BLOCK_NEAR else _BLOCK_NEAR
    launch(
        topk_kernel,
        (rows,),
        p_scores=scores,
        s_scores=scores.stride(0),
        p_maxima=maxima,
        s_maxima=0 if maxima is None else maxima.stride(0),
        p_lengths=lengths,
        p_topk=p_topk,
        topk=topk,
        widest=widest,
        p_tiles=tiles,
        p_near=near,
        p_near_scores=near_scores,
        s_near=widest * tile,
        p_out=indices,
        p_out_scores=kept,
        p_counters=counters,
        COUNTERS=0 if counters is None else counters.shape[0],
        HEADS=heads,
        TILE=tile,
        BLOCK=block,
        BLOCK_NEAR=_BLOCK_NEAR,
        num_warps=16 if block > _BLOCK_NEAR else 8,
        max_registers=128,
    )
    return indices, kept


def _tile_maxima(scores: Tensor, lengths: Tensor, heads: int, tile: int) -> Tensor:
    rows, total = scores.shape
    count = -(-total // tile)
    maxima = torch.empty(rows, -(-count // 16) * 16, dtype=torch.float32, device=scores.device)
    tiles = _BLOCK // tile
    launch(
        tile_maxima_kernel,
        (rows, -(-count // tiles)),
        p_scores=scores,
        s_scores=scores.stride(0),
        p_lengths=lengths,
        p_maxima=maxima,
        s_maxima=maxima.stride(0),
        HEADS=heads,
        TILE=tile,
        TILES=tiles,
    )
    return maxima
