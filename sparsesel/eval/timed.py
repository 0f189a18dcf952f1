"""A selector whose share of a model's step is timed."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from sparsesel.eval.decode import Clock
from sparsesel.eval.shadow import Watched
from sparsesel.kv import KVView
from sparsesel.selector import Selector


class Timed(Watched):
    """A selector that decodes as it would alone, each step between the start and the stop of a clock.

    Args:
        selector: Any selector.
        clock: May be that of several layers, which run one after another.
    """

    def __init__(self, selector: Selector, clock: Clock) -> None:
        super().__init__(selector, lambda step: None)
        self._clock = clock

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step, timed."""
        self._clock.start()
        output = self._selector.attend(query, kv, state, scale=scale)
        self._clock.stop()
        return output
