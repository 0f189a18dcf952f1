"""Principal components of keys, from running sums."""

import torch
from jaxtyping import Float
from torch import Tensor

_PIECE = 4096  # tokens taken to float64 at a time


class Moments:
    """Sums of x and x xᵀ over keys, per key-value head, in float64: memory does not grow with the number of keys.

    A key with a component that is not finite is left out.

    Args:
        heads: Hkv.
        dim: D.
        device: Where keys lie.
    """

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.count = torch.zeros(heads, dtype=torch.float64, device=device)
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)

    def add(self, keys: Float[Tensor, "Hkv T D"]) -> None:
        """Take in keys of one sequence."""
        for piece in keys.split(_PIECE, dim=1):
            usable = piece.isfinite().all(-1)
            x = piece.double().masked_fill(~usable[..., None], 0.0)
            self.count += usable.sum(-1)
            self.total += x.sum(1)
            self.products += x.transpose(1, 2) @ x

    def components(self) -> tuple[Float[Tensor, "Hkv D D"], Float[Tensor, "Hkv D"]]:
        """Orthonormal components as columns, and the variance along each, descending."""
        count = self.count.clamp_min(1)[:, None]
        mean = self.total / count
        covariance = self.products / count[..., None] - mean[:, :, None] * mean[:, None, :]
        variance, basis = torch.linalg.eigh(covariance)
        return basis.flip(-1), variance.flip(-1).clamp_min(0)
