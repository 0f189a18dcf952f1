"""One prefill seen by several selectors at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import SelectorConfig
from sparsesel.kv import KVView
from sparsesel.selector import Counters, LayerSpec, Selector, SelectorState, StepCost


class ObserveAllConfig(SelectorConfig):
    """Names the selectors that watch."""

    name: str = "observe_all"
    selectors: tuple[str, ...]


@dataclass
class ObserveAllState(SelectorState):
    """One state per selector, in their order."""

    states: list[Any] = field(default_factory=list)

    def reset(self) -> None:
        """Reset each."""
        for state in self.states:
            state.reset()

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Crop each."""
        for state in self.states:
            state.crop(lengths)

    def reorder(self, index: Int[Tensor, " B"]) -> None:
        """Reorder each."""
        for state in self.states:
            state.reorder(index)

    def repeat(self, repeats: int) -> None:
        """Repeat each."""
        for state in self.states:
            state.repeat(repeats)

    def select(self, index: Tensor) -> None:
        """Select from each."""
        for state in self.states:
            state.select(index)

    def to(self, device: Any) -> None:
        """Move each."""
        for state in self.states:
            state.to(device)

    def clone(self) -> Self:
        """A copy of each."""
        return type(self)(self.layer, Counters(), [state.clone() for state in self.states])

    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(state.nbytes() for state in self.states)


class ObserveAll:
    """Shows a prefill to several selectors, so that each can decode from a fork of the one cache.

    It decodes nothing itself: the cache is forked and each fork continues with one selector and its state.
    """

    def __init__(self, selectors: Sequence[Selector]) -> None:
        self.selectors = tuple(selectors)
        self._config = ObserveAllConfig(selectors=tuple(str(selector.config) for selector in selectors))

    @property
    def config(self) -> ObserveAllConfig:
        """Which selectors watch."""
        return self._config

    def init_state(self, layer: LayerSpec) -> ObserveAllState:
        """A state of each selector's."""
        return ObserveAllState(layer, states=[selector.init_state(layer) for selector in self.selectors])

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: ObserveAllState, *, scale: float
    ) -> None:
        """Show the tokens to each."""
        for selector, own in zip(self.selectors, state.states, strict=True):
            selector.observe_prefill(query, kv, own, scale=scale)

    def discover(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise RuntimeError("a prefill seen by several selectors was continued without choosing one of them")

    aggregate = attend = discover

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Refused."""
        self.discover()
