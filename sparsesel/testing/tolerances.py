"""How far a result may lie from its float64 reference, derived from how it is computed.

u is the unit roundoff of a type (2^-24 for float32, 2^-9 for bfloat16) and gamma(n) = n·u / (1 - n·u) bounds the
relative error of n roundings in any order (Higham, Accuracy and Stability of Numerical Algorithms, §3.1). For
attention o = sum_i w_i v_i with w = softmax(s) and s_i = scale · q·k_i, computed in float32:

- a score is off by at most gamma(D + 2) · scale · sum_d |q_d k_id|; call the largest of them e;
- its distance to the maximum is rounded, so the exponent of w_i is off by at most 2e + u·|s_i - max|;
- exp costs a few roundings, the normaliser K and a division, the sum over values K, and an online softmax
  rescales at most K times: 3K + 16 roundings cover all of it.

bfloat16 inputs are taken as they are; softmax weights and the output may each be rounded once to bfloat16.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """A float64 result and how far from it, at most, a correct computation lies; both of one shape."""

    output: Float[Tensor, "*shape"]
    bound: Float[Tensor, "*shape"]


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(count: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound on the relative error of `count` roundings to `dtype`."""
    error = count * unit_roundoff(dtype)
    return error / (1 - error)


def expected_attention(
    query: Float[Tensor, "B Hq 1 D"],
    keys: Float[Tensor, "B Hkv L D"],
    values: Float[Tensor, "B Hkv L Dv"],
    mask: Bool[Tensor, "B Hq L"],
    *,
    scale: float,
) -> Expected:
    """Softmax attention over the positions of `mask` in float64, `[B, Hq, 1, Dv]`, with its error bound.

    Args:
        query: In the type that the computation under test was given.
        keys: By logical position.
        values: Likewise.
        mask: True where a head attends; a head that attends to nothing gives zeros.
        scale: Factor of the scores.
    """
    dtype, dim, group = query.dtype, query.shape[3], query.shape[1] // keys.shape[1]
    q = query.double()
    k, v = (base.double().repeat_interleave(group, dim=1) for base in (keys, values))
    absent = ~mask[:, :, None, :]  # [B, Hq, 1, L]
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(absent, float("-inf"))
    weights = scores.softmax(-1).masked_fill(absent, 0.0)
    v = v.masked_fill(absent.transpose(2, 3), 0.0)
    output = weights @ v

    count = int(mask.sum(-1).max())
    weighed = weights > 0
    spread = (scores - scores.amax(-1, keepdim=True)).abs().masked_fill(~weighed, 0.0)
    score_error = gamma(dim + 2) * abs(scale) * (q.abs() @ k.abs().transpose(2, 3)).masked_fill(~weighed, 0.0)
    exponent = 2 * score_error.amax(-1, keepdim=True) + unit_roundoff(torch.float32) * spread
    relative = torch.expm1(exponent) + gamma(3 * count + 16)  # [B, Hq, 1, L]
    relative = relative + (weights * relative).sum(-1, keepdim=True)  # … and of the normaliser
    bound = (weights * relative) @ v.abs()
    if dtype != torch.float32:
        bound = bound + unit_roundoff(dtype) * (weights @ v.abs() + output.abs() + bound)
    # A weight that underflows in float32 is lost altogether.
    bound = bound + count * torch.finfo(torch.float32).tiny * v.abs().amax(2, keepdim=True)
    return Expected(output, bound)


def rounding_tolerance(
    query: Float[Tensor, "B Hq 1 D"],
    keys: Float[Tensor, "B Hkv L D"],
    values: Float[Tensor, "B Hkv L Dv"],
    *,
    scale: float,
) -> float:
    """How far apart two correct paths may lie that average the same values with the same weights.

    It makes no use of the weights, so that it holds for whatever a selector weighs by: twice the bound of
    `expected_attention`, with the largest score error and the largest value in the place of weighted ones.
    """
    dtype, (_, _, length, dim) = query.dtype, keys.shape
    q, k, v = (part.double().nan_to_num(0.0, 0.0, 0.0).abs() for part in (query, keys, values))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    largest = abs(scale) * (q @ k.transpose(2, 3)).amax()
    exponent = 2 * gamma(dim + 2) * largest + 2 * unit_roundoff(torch.float32) * largest
    relative = 2 * (torch.expm1(exponent) + gamma(3 * length + 16))
    if dtype != torch.float32:
        relative = relative + 2 * unit_roundoff(dtype)
    return float(2 * relative * v.amax())


def assert_close_to_float64(actual: Tensor, expected: Expected, what: str = "output") -> None:
    """Fail unless `actual` lies within the bound wherever the float64 result is finite.

    Where float64 itself gives no number, nothing is claimed.

    Raises:
        AssertionError: With the worst element.
    """
    if actual.shape != expected.output.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.output.shape)}")
    claimed = expected.output.isfinite() & expected.bound.isfinite()
    error = (actual.double() - expected.output).abs()
    wrong = claimed & ~(error <= expected.bound)  # written so that NaN is wrong
    if bool(wrong.any()):
        excess = (error / expected.bound.clamp_min(1e-300)).nan_to_num(float("inf"))
        worst = int(torch.where(wrong, excess, -1.0).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), wrong.shape))
        got, want, bound = (float(part[where]) for part in (actual, expected.output, expected.bound))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements out of bounds; "
            f"at {where} {got!r}, float64 {want!r}, bound {bound:.3g}"
        )


def assert_same_output(actual: Tensor, other: Tensor, tolerance: float, what: str = "outputs") -> None:
    """Fail unless two results agree: as numbers within `tolerance`, and in where they are none.

    Raises:
        AssertionError: With the largest difference.
    """
    if actual.shape != other.shape or actual.dtype != other.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)} and {other.dtype} {tuple(other.shape)} do not compare"
        )
    first, second = actual.double(), other.double()
    if not torch.equal(first.isfinite(), second.isfinite()):
        raise AssertionError(f"{what}: finite in different places")
    difference = float((first - second).nan_to_num(0.0, 0.0, 0.0).abs().max())
    if difference > tolerance:
        raise AssertionError(f"{what}: apart by {difference:.3g}, tolerance {tolerance:.3g}")
