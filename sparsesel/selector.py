"""The protocol that every selector follows, and the records it exchanges with the framework.

B batch · Hq query heads · Hkv key-value heads · G = Hq / Hkv · Tq, Tk lengths · D head_dim, Dv that of the
values (mostly D) · K support slots.
Query head h reads key-value head h // G.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsesel.config import SelectorConfig
from sparsesel.kv import KVView
from sparsesel.rotary import Rotary


@dataclass(frozen=True)
class LayerSpec:
    """What a selector may know of the layer it serves.

    Attributes:
        layer_idx: Index of the layer in its model, from 0.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv, a divisor of Hq.
        head_dim: D.
        dtype: Type of queries, keys and values.
        device: Where they lie.
        batch_size: B.
        max_length: Longest sequence that will be seen, if known.
        rotary: How queries and keys were rotated by their positions, None where that is not known.
        model: Fingerprint of the model that the layer belongs to, empty where that is not known.
    """

    layer_idx: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    batch_size: int = 1
    max_length: int | None = None
    rotary: Rotary | None = None
    model: str = ""

    @property
    def group_size(self) -> int:
        """G, the query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class Support:
    """Which positions each head attends to.

    Attributes:
        indices: `[B, H, 1, K]` int32 logical positions, H in {1, Hkv, Hq}: unique and visible, ascending, padded
            with -1 at the end. None means every visible key.
        counts: `[B, H, 1]` int32, how many of them are not padding.
    """

    indices: Int[Tensor, "B H 1 K"] | None
    counts: Int[Tensor, "B H 1"]

    @classmethod
    def of(cls, indices: Int[Tensor, "B H 1 K"]) -> "Support":
        """Support of these indices, counted."""
        return cls(indices, (indices >= 0).sum(-1, dtype=torch.int32))

    @classmethod
    def everything(cls, kv: KVView) -> "Support":
        """Every visible key, without listing them."""
        return cls(None, kv.lengths.to(torch.int32)[:, None, None])

    def as_mask(self, kv: KVView) -> Tensor:
        """`[B, H, 1, L]` bool over logical positions, L = `kv.max_length`: for metrics and tests."""
        if self.indices is None:
            return kv.visible()[:, None, None, :].clone()
        mask = torch.zeros(*self.indices.shape[:-1], kv.max_length + 1, dtype=torch.bool, device=self.indices.device)
        # Padding goes to an extra column that is cut off.
        slots = torch.where(self.indices < 0, kv.max_length, self.indices).long()
        return mask.scatter_(-1, slots, True)[..., : kv.max_length]


class Counters:
    """Sums of what happened, per query head, kept on the device and read only when asked.

    Every selector counts `steps` (query heads × sequences × tokens), `selected` and `visible` keys, so that
    `selected / visible` is the density. A selector adds names of its own (`exact`, `fallback`, …).

    A sum stays where it is in memory, so that a captured CUDA graph and a kernel can add to it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._table: tuple[tuple[str, ...], Tensor] | None = None

    def add(self, name: str, values: Tensor) -> None:
        """Add `values` `[B, Hq]` (bool, integer or float), summed over the batch, to the counter `name`."""
        amount = values.detach().to(torch.float64).sum(0)
        if name not in self._sums:
            # Not an inference tensor even under inference_mode, so that later steps may add to it outside of it.
            with torch.inference_mode(mode=False):
                self._sums[name] = torch.zeros_like(amount)
        known = self._sums[name]
        known.add_(amount.to(known.device))

    def table(self, names: tuple[str, ...], num_attention_heads: int, device: torch.device) -> Float[Tensor, "N Hq"]:
        """The sums of these names as rows of one float64 tensor, for a kernel to add to."""
        if self._table is None or self._table[0] != names or self._table[1].device != device:
            with torch.inference_mode(mode=False):
                rows = torch.zeros(len(names), num_attention_heads, dtype=torch.float64, device=device)
            for name, row in zip(names, rows, strict=True):
                if name in self._sums:
                    row.copy_(self._sums[name])
                self._sums[name] = row
            self._table = (names, rows)
        return self._table[1]

    def add_step(self, support: Support, kv: KVView, num_attention_heads: int) -> None:
        """Count one decode step with this support."""
        counts = support.counts[..., 0]  # [B, H]
        selected = counts.repeat_interleave(num_attention_heads // counts.shape[1], dim=1)
        self.add("steps", torch.ones_like(selected))
        self.add("selected", selected)
        self.add("visible", kv.lengths[:, None].expand_as(selected))

    def read(self) -> dict[str, Float[Tensor, " Hq"]]:
        """The sums so far, on the CPU (waits for the device)."""
        return {name: value.to("cpu", copy=True) for name, value in self._sums.items()}


@dataclass
class SelectorState:
    """What a selector remembers of the sequences in one layer's cache.

    Every tensor field of a subclass has the batch as its first axis, which is what lets state follow the cache
    through beam search, batch expansion and offloading. A subclass with fields overrides `reset` and `crop`.
    A selector that remembers nothing uses this class as it is.

    Attributes:
        layer: The layer served.
        counters: What happened; not part of the sequences' state, so row operations leave it alone.
    """

    layer: LayerSpec
    counters: Counters = field(default_factory=Counters)

    def _is_stateless(self) -> bool:
        return type(self) is SelectorState

    def reset(self) -> None:
        """Forget every sequence; the state is as new."""
        if not self._is_stateless():
            raise NotImplementedError(f"{type(self).__name__} must override reset")

    def crop(self, lengths: Int[Tensor, " B"]) -> None:
        """Forget everything about logical positions ≥ `lengths`."""
        if not self._is_stateless():
            raise NotImplementedError(f"{type(self).__name__} must override crop")

    def reorder(self, index: Int[Tensor, " B"]) -> None:
        """Row i becomes what row `index[i]` was."""
        self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def repeat(self, repeats: int) -> None:
        """Every row `repeats` times, neighbours together."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` (integers or a mask), in that order."""
        self._map(lambda tensor: tensor[index.to(tensor.device)])

    def to(self, device: torch.device | str) -> None:
        """Move every tensor to `device`."""
        self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def clone(self) -> Self:
        """An independent copy with counters of its own."""
        copy = dataclasses.replace(self, counters=Counters())
        copy._map(lambda tensor: tensor.clone())
        return copy

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.numel() * value.element_size() for value in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        # Not inference tensors even under inference_mode, so that later steps may write outside of it.
        with torch.inference_mode(mode=False):
            for name, value in self.tensors().items():
                setattr(self, name, change(value))


@dataclass(frozen=True)
class StepCost:
    """What one decode step of one layer must read and compute, summed over batch and heads.

    Attributes:
        key_bytes: Bytes of keys read.
        value_bytes: Bytes of values read.
        metadata_bytes: Bytes of the selector's own state read.
        score_bytes: Bytes of intermediate scores written and read back.
        flops: Floating-point operations.
        state_bytes: Bytes of state kept beside the KV cache.
        attended: Keys attended per query head.
        assumes: Of a selector that has several kinds of steps, which one this is, for people.
    """

    key_bytes: float
    value_bytes: float
    metadata_bytes: float
    score_bytes: float
    flops: float
    state_bytes: float
    attended: float
    assumes: str = ""

    @property
    def bytes_read(self) -> float:
        """All bytes read in the step."""
        return self.key_bytes + self.value_bytes + self.metadata_bytes + self.score_bytes


@runtime_checkable
class Selector(Protocol):
    """Finds, at each decode step, the positions that every head attends to, and attends to them.

    A selector is immutable: everything that changes lives in the state. Decode steps come one token at a time
    (Tq = 1), after the token's key and value have been appended; `query` is post-RoPE.
    """

    @property
    def config(self) -> SelectorConfig:
        """The configuration it was made from."""
        ...

    def init_state(self, layer: LayerSpec) -> Any:
        """State for one layer of a new cache. A state that has seen nothing is legal in `discover`."""
        ...

    def observe_prefill(self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: Any, *, scale: float) -> None:
        """See Tq tokens that were attended densely: the last Tq positions of `kv`.

        In a left-padded batch the first of them may lie before a short sequence's position 0: ignore those.
        """
        ...

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float) -> Support:
        """The support of the last position of each sequence; updates `state`."""
        ...

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: Any, *, scale: float
    ) -> Float[Tensor, "B Hq 1 Dv"]:
        """Attention output over `support`; leaves `state` alone."""
        ...

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float
    ) -> Float[Tensor, "B Hq 1 Dv"]:
        """One decode step: `aggregate(discover(…))`, or the same fused."""
        ...

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """What one decode step at `length` visible keys costs by design; of several kinds, the one that it names.

        Raises:
            InputError: A layer that it cannot serve.
        """
        ...


class Calibrator(Protocol):
    """Learns from text, before any generation, what a selector's configuration then names as a file."""

    def observe(self, layer: LayerSpec, query: Float[Tensor, "B Hq Tq D"], kv: KVView) -> None:
        """See Tq tokens of one layer, the last of `kv`, attended densely. What is kept must not grow with the text."""
        ...

    def save(self, path: Path, provenance: Mapping[str, str]) -> str:
        """Write what was learned, beside where it came from; returns a summary for people, a few lines.

        Raises:
            InputError: There was too little to learn from.
        """
        ...


def discover_and_aggregate(
    selector: Selector, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float
) -> Float[Tensor, "B Hq 1 Dv"]:
    """The meaning of `attend`, for selectors without a fused one."""
    support = selector.discover(query, kv, state, scale=scale)
    return selector.aggregate(query, kv, support, state, scale=scale)
