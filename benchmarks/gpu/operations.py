"""Every shared operation in Triton against float64, and top-K against a stable sort."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from gpu.inputs import LAYOUTS, Case, Geometry, expected_in_parts, make_case
from torch import Tensor

from sparsesel import ops
from sparsesel.ops import backend, reference
from sparsesel.testing.inputs import hostile_scores, hostile_stream, random_stream
from sparsesel.testing.tolerances import Expected, assert_close_to_float64, gamma


def check_attention(geometry: Geometry, device: str, topk: int) -> dict[str, Any]:
    """All operations of one step on random numbers."""
    case = make_case(geometry, device, seed=geometry.head_dim + geometry.length)
    with backend.using("triton"):
        return _check_step(case, topk, geometry.head_dim**-0.5)


def check_hostile(kind: str, layout: str, device: str) -> dict[str, Any]:
    """The same on numbers that are none: right where float64 gives a number, and a number nowhere else."""
    stream = hostile_stream(random_stream(5, lengths=[101, 66], head_dim=32), kind).to(device)
    case = Case(stream.query[:, :, -1:], stream, LAYOUTS[layout])
    with backend.using("triton"):
        return _check_step(case, 24, 0.15)


def _check_step(case: Case, topk: int, scale: float) -> dict[str, Any]:
    """The last token of each sequence."""
    stream, columns = case.stream, case.columns
    kv, query = case.view(columns), case.queries(columns - 1, columns)
    keys, values = stream.logical(columns)
    lengths = stream.lengths(columns).to(query.device)
    heads, longest = query.shape[1], keys.shape[2]
    visible = (torch.arange(longest, device=query.device) < lengths[:, None])[:, None].expand(-1, heads, -1)

    output = ops.dense_attention(query, kv, scale=scale)
    dense = expected_in_parts(query, keys, values, visible, scale=scale)
    _close(output, dense, "dense_attention")

    scores = ops.qk_scores(query, kv, scale=scale)
    exact = _scores(query, keys, scale)
    seen = scores[:, :, :longest]
    _require(bool((scores.isneginf() | _padded(visible, kv.max_length)).all()), "qk_scores: a score past a length")
    _close(seen.masked_fill(~visible, 0.0), _masked(exact, visible), "qk_scores")

    rows = lengths[:, None].expand(-1, heads)
    for budget, widest in ((topk, None), (torch.minimum(rows, torch.full_like(rows, topk)), topk)):
        found = ops.topk_indices(scores, budget, rows, widest=widest)
        _same(found, stably_sorted(scores, budget, rows, found.shape[-1]), "topk_indices")

    for shared in (1, kv.num_heads, heads):
        indices = _positions(found, shared)
        chosen = ops.indexed_qk(query, kv, indices, scale=scale)
        per_head = indices.repeat_interleave(heads // shared, dim=1)
        used = per_head >= 0
        at = per_head.clamp_min(0).long()
        _require(bool((chosen.isneginf() | used).all()), "indexed_qk: a score where there is no index")
        picked = Expected(exact.output.gather(2, at), exact.bound.gather(2, at))
        _close(chosen.masked_fill(~used, 0.0), _masked(picked, used), f"indexed_qk, {shared} lists")

        mask = torch.zeros_like(_padded(visible, longest + 1))
        mask = mask.scatter_(2, torch.where(used, at, longest), True)[..., :longest]
        output = ops.sparse_attention(query, kv, indices[:, :, None], scale=scale)
        _close(output, expected_in_parts(query, keys, values, mask, scale=scale), f"sparse_attention, {shared} lists")

        known = ops.softmax_values(reference.indexed_qk(query, kv, indices, scale=scale), kv, indices)
        wide = expected_in_parts(query.float(), keys, values, mask, scale=scale)
        # Of 16-bit values each weight is the sum of two 16-bit numbers: what is lost lies below this.
        lost = 2.0**-16 * values.double().nan_to_num(0.0, 0.0, 0.0).abs().amax((2, 3)).amax(1)[:, None, None, None]
        bound = wide.bound + (lost if query.dtype != torch.float32 else 0.0)
        _close(known, Expected(wide.output, bound), f"softmax_values, {shared} lists")
    return {"longest": longest}


def _scores(query: Tensor, keys: Tensor, scale: float) -> Expected:
    """Scores `[B, Hq, L]` in float64, and how far off float32 may be."""
    batch, heads, _, dim = query.shape
    grouped = query.double().view(batch, keys.shape[1], -1, dim)
    wide = keys.double().transpose(2, 3)
    output, size = grouped @ wide * scale, grouped.abs() @ wide.abs() * abs(scale)
    return Expected(output.view(batch, heads, -1), gamma(dim + 2) * size.view(batch, heads, -1))


def _positions(found: Tensor, shared: int) -> Tensor:
    """`[B, shared, K]` of the positions `[B, Hq, K]` found, one without any and one with a gap among them."""
    indices = found[:, :: found.shape[1] // shared].clone()
    indices[0, -1, indices.shape[2] // 2] = -1
    if shared > 1:
        indices[-1, 0] = -1
    return indices


def check_topk(kinds: Sequence[str], rows: int, length: int, topk: int, device: str) -> dict[str, Any]:
    """The K largest of rows of scores, of one length and of several."""
    whole = torch.full((rows,), length, device=device)
    ragged = (whole * torch.arange(1, rows + 1, device=device) // rows).clamp_min(1)
    wrong = []
    with backend.using("triton"):
        for kind in kinds:
            scores = _kinds(kind, rows, length, device)
            for lengths in (whole, ragged):
                for budget, widest in ((topk, None), (torch.full_like(lengths, topk) - 1 + lengths % 2, topk)):
                    found = ops.topk_indices(scores, budget, lengths, widest=widest)
                    expected = stably_sorted(scores, budget, lengths, found.shape[-1])
                    if not torch.equal(found, expected):
                        how = "of one length" if lengths is whole else "of several lengths"
                        wrong.append(f"{kind} {how}, budget {'on the device' if widest else 'known'}")
    _require(not wrong, f"topk_indices does not give the {topk} largest of {length}: {'; '.join(wrong)}")
    return {"kinds": list(kinds)}


KINDS = (
    "random",
    "hostile",
    "constant",
    "nan",
    "-inf",
    "zeros of both signs",
    "few levels",
    "rising",
    "falling",
    "clustered",
    "denormal",
    "peak",
)


def _kinds(kind: str, rows: int, length: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(7)
    place = torch.arange(length, device=device).expand(rows, -1)
    random = torch.randn(rows, length, generator=generator, device=device)
    match kind:
        case "random":
            return random
        case "hostile":
            return hostile_scores(7, rows, length).to(device)
        case "constant":
            return torch.full_like(random, -1.5)
        case "nan":
            return torch.full_like(random, math.nan)
        case "-inf":
            return torch.full_like(random, -math.inf).masked_fill_(place % 3 == 1, math.nan)
        case "zeros of both signs":
            return torch.zeros_like(random).masked_fill_(place % 3 == 0, -0.0)
        case "few levels":
            return random.round()
        case "rising":
            return place.float().contiguous()
        case "falling":
            return -place.float()
        case "clustered":  # apart in their last bits alone
            return 1e4 + (random * 20).round() / 1024
        case "denormal":
            return random * 1e-42
        case "peak":  # nearly all of the support in adjacent positions
            return random + 9.0 * ((place - length // 3).abs() < max(4, min(300, length // 8)))
    raise ValueError(kind)


def stably_sorted(scores: Tensor, topk: int | Tensor, lengths: Tensor, widest: int) -> Tensor:
    """The K largest by a stable sort in float64, `[*rows, widest]`: NaN counts as -inf, of equal ones the first."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    ranked = scores.double().masked_fill(scores.isnan() | (place >= lengths[..., None]), -math.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :widest]
    budget = torch.as_tensor(topk, device=scores.device)
    allowed = torch.minimum(lengths, budget.expand_as(lengths))[..., None]
    kept = torch.where(torch.arange(order.shape[-1], device=scores.device) < allowed, order, scores.shape[-1])
    kept = kept.sort(dim=-1).values
    return kept.masked_fill(kept == scores.shape[-1], -1).int()


def _padded(mask: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, width - mask.shape[-1]))


def _masked(expected: Expected, mask: Tensor) -> Expected:
    return Expected(expected.output.masked_fill(~mask, 0.0), expected.bound.masked_fill(~mask, 0.0))


def _close(actual: Tensor, expected: Expected, what: str) -> None:
    assert_close_to_float64(actual, expected, what)
    stray = int((actual.isnan() != expected.output.isnan()).sum())
    _require(not stray, f"{what}: {stray} elements differ from float64 in being a number")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    wrong = (found != expected).any(-1)
    _require(not bool(wrong.any()), f"{what}: {int(wrong.sum())} of {wrong.numel()} rows are not the K largest")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
