"""Rotary position embedding of vectors that have been through it already: turning them on to another position."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """How a layer turned its queries and keys: by `position * inv_freq`, pair of channels by pair.

    A constant factor of the embedding (YaRN's attention scaling) is in the vectors already and is left alone.

    Attributes:
        inv_freq: `[N]` radians per position of each pair, N ≤ D/2. The first 2N channels are turned, the others
            carry no position; N = 0 for a layer without positions.
        interleaved: Whether pair n is channels 2n and 2n + 1, rather than n and N + n.
    """

    inv_freq: Float[Tensor, " N"]
    interleaved: bool = False

    def rotate(self, vectors: Float[Tensor, "B H T D"], offsets: Int[Tensor, " B"]) -> Float[Tensor, "B H T D"]:
        """Vectors as they would be `offsets` positions later (earlier where negative), in float32."""
        count = self.inv_freq.shape[0]
        # In float64: a float32 angle of many turns is off by more than the positions it is to tell apart.
        angles = offsets.double()[:, None] * self.inv_freq.to(offsets.device).double()
        cos, sin = (part.float()[:, None, None] for part in (angles.cos(), angles.sin()))  # [B, 1, 1, N]
        turned, rest = vectors.float().split([2 * count, vectors.shape[3] - 2 * count], dim=3)
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :count], turned[..., count:]
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pair, dim=-1).flatten(3) if self.interleaved else torch.cat(pair, dim=-1)
        return torch.cat([turned, rest], dim=-1)
