"""What selectors did during a session."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """Counters of a session, summed over every cache it served.

    Attributes:
        layers: Layer index to counter name to `[Hq]` sums over sequences and steps.
        backend: What ran the selectors, `triton` or `eager`; both where layers lie on different devices.
    """

    layers: dict[int, dict[str, Float[Tensor, " Hq"]]]
    backend: str = ""

    @property
    def total(self) -> dict[str, float]:
        """Counter name to its sum over layers and heads."""
        total: dict[str, float] = {}
        for counters in self.layers.values():
            for name, values in counters.items():
                total[name] = total.get(name, 0.0) + float(values.sum())
        return total

    def share(self, name: str) -> float:
        """Fraction of (head, step) pairs counted under `name`; 0 if there was none."""
        total = self.total
        return total.get(name, 0.0) / total["steps"] if total.get("steps") else 0.0

    @property
    def density(self) -> float:
        """Keys attended / keys visible; NaN before the first step."""
        total = self.total
        return total["selected"] / total["visible"] if total.get("visible") else math.nan

    @property
    def candidates(self) -> float:
        """Mean number of candidates scored per reuse step; NaN if there was none."""
        total = self.total
        return total.get("candidates", 0.0) / total["reuse"] if total.get("reuse") else math.nan

    def __str__(self) -> str:
        total = self.total
        if not total.get("steps"):
            return "no decode step yet"
        rest = [name for name in total if name not in ("steps", "selected", "visible", "candidates")]
        parts = [f"{total['steps']:.0f} head-steps", f"density {self.density:.3f}"]
        parts += [f"{name} {self.share(name):.3f}" for name in rest]
        if not math.isnan(self.candidates):
            parts.append(f"candidates {self.candidates:.1f}")
        if self.backend:
            parts.append(f"on {self.backend}")
        return ", ".join(parts)
