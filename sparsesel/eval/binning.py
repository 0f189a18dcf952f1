"""Values by bins of another: sums where they are measured, means over documents where they are reported."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bin_sums(places: "Tensor", edges: Sequence[float], weights: "Tensor | None" = None) -> list[float]:
    """How many of `places` lie in each bin, or the sum of their `weights`.

    A bin holds its lower edge, the last one both of its own. Places beyond the outermost edges count in the
    outermost bins, as rounding takes a cosine past 1; those that are not finite count in none.
    """
    import torch

    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device=places.device)
    bins = torch.bucketize(places.double(), inner, right=True)
    bins = torch.where(places.isfinite(), bins, len(edges) - 1)
    weights = None if weights is None else weights.double().flatten()
    return torch.bincount(bins.flatten(), weights, minlength=len(edges))[: len(edges) - 1].tolist()


def bin_means(sums: Sequence[float], counts: Sequence[float]) -> list[float | None]:
    """Mean of each bin, None of an empty one."""
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def pooled(means: Sequence[Sequence[float | None]], counts: Sequence[Sequence[float]]) -> list[float | None]:
    """Means of several documents' bins, `[documents][bins]`, each by how many it is of."""
    sums = [
        sum((mean or 0.0) * count for mean, count in zip(column, sizes, strict=True))
        for column, sizes in zip(zip(*means, strict=True), zip(*counts, strict=True), strict=True)
    ]
    return bin_means(sums, [sum(sizes) for sizes in zip(*counts, strict=True)])


def middles(edges: Sequence[float]) -> list[float]:
    """Middle of each bin."""
    return [(low + high) / 2 for low, high in itertools.pairwise(edges)]


def bin_names(edges: Sequence[float]) -> list[str]:
    """Each bin by its edges."""
    return [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
