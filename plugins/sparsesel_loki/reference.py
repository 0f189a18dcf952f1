"""Loki for one head in plain loops and float64: what `selector.py` is tested against.

Nothing is shared with the vectorised selector. Keys of a key-value head are `[L][D]`, nested lists of numbers.
"""

import math
from collections.abc import Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]


def covariance(keys: Matrix) -> list[list[float]]:
    """Of keys around their mean; those that are not finite are left out."""
    usable = [key for key in keys if all(math.isfinite(x) for x in key)]
    dim, count = len(keys[0]), max(1, len(usable))
    mean = [sum(key[d] for key in usable) / count for d in range(dim)]
    return [
        [sum((key[a] - mean[a]) * (key[b] - mean[b]) for key in usable) / count for b in range(dim)] for a in range(dim)
    ]


def eigenvalues(symmetric: Matrix) -> list[float]:
    """Descending, by Jacobi's rotations (Golub and Van Loan, Matrix Computations, §8.5)."""
    a = [list(row) for row in symmetric]
    dim = len(a)
    for _ in range(50):
        if sum(a[i][j] ** 2 for i in range(dim) for j in range(dim) if i != j) < 1e-24:
            break
        for p in range(dim):
            for q in range(p + 1, dim):
                if a[p][q] == 0:
                    continue
                angle = 0.5 * math.atan2(2 * a[p][q], a[q][q] - a[p][p])
                c, s = math.cos(angle), math.sin(angle)
                for k in range(dim):
                    a[k][p], a[k][q] = c * a[k][p] - s * a[k][q], s * a[k][p] + c * a[k][q]
                for k in range(dim):
                    a[p][k], a[q][k] = c * a[p][k] - s * a[q][k], s * a[p][k] + c * a[q][k]
    return sorted((a[i][i] for i in range(dim)), reverse=True)


def variance_along(symmetric: Matrix, basis: Matrix) -> float:
    """Variance that the components `[D][r]` capture; the first r principal ones capture the most there is."""
    dim, rank = len(basis), len(basis[0])
    return sum(basis[a][r] * symmetric[a][b] * basis[b][r] for r in range(rank) for a in range(dim) for b in range(dim))


def merits(query: Vector, keys: Matrix, basis: Matrix) -> list[float]:
    """What every key is ranked by: the product of its components with the query's; NaN is -inf."""
    rank = range(len(basis[0]))
    along = [sum(x * row[r] for x, row in zip(query, basis, strict=True)) for r in rank]
    found = []
    for key in keys:
        product = sum(along[r] * sum(x * row[r] for x, row in zip(key, basis, strict=True)) for r in rank)
        found.append(-math.inf if math.isnan(product) else product)
    return found


def support(merit: Vector, topk: int) -> list[int]:
    """The min(topk, L) best positions, ascending; ties go to the lower index."""
    return sorted(sorted(range(len(merit)), key=lambda i: -merit[i])[:topk])


def attend(query: Vector, keys: Matrix, values: Matrix, positions: Sequence[int], *, scale: float) -> list[float]:
    """Softmax attention of one query head over `positions`, in all components."""
    scores = [scale * sum(q * k for q, k in zip(query, keys[i], strict=True)) for i in positions]
    if any(math.isnan(score) for score in scores) or math.isinf(max(scores)):
        return [math.nan] * len(values[0])  # as a softmax has it
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [
        sum(weight * values[i][channel] for weight, i in zip(weights, positions, strict=True)) / total
        for channel in range(len(values[0]))
    ]
