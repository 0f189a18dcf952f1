"""Cache layers that append in place and own the state of their selector.

Hugging Face's dynamic layer concatenates: every step copies all keys and values, which by itself costs more than
dense attention saves. A `SelectorLayer` writes into a buffer that grows geometrically. The selector's state lives
in it, so a new cache means new state, and whatever happens to the cache (beam search, assisted decoding, batch
expansion, offloading) happens to the state.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from sparsesel.errors import InputError
from sparsesel.hf import compat
from sparsesel.selector import Counters, LayerSpec, Selector, SelectorState

_ROUND = 64  # tokens; capacities are multiples of it


class SelectorLayer(DynamicLayer):
    """One layer's keys and values `[B, Hkv, T, D]`, views of a larger buffer, and the state of its selector.

    Attributes:
        selector: The selector that `state` belongs to, None before the first attention under one.
        state: Its state.
        starts: `[B]` int64 column of each sequence's first token in a left-padded batch, None without padding.
        capacity: Tokens that the buffer holds at least; it grows beyond them.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.selector: Selector | None = None
        self.state: SelectorState | None = None
        self.starts: Tensor | None = None
        self.capacity = capacity
        self.is_offloaded = False
        self._buffers: tuple[Tensor, Tensor] | None = None

    @classmethod
    def adopt(cls, layer: DynamicLayer, capacity: int = 0) -> "SelectorLayer":
        """A layer with the contents of Hugging Face's own dynamic layer."""
        adopted = cls(capacity)
        if layer.keys is not None and layer.values is not None and layer.get_seq_length() > 0:
            adopted.update(layer.keys, layer.values)
        return adopted

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type and device from the first keys and values."""
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self._buffers = None
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, t, D]` in place and return all keys and values, `[B, Hkv, T + t, D]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        total = past + key_states.shape[2]
        key_buffer, value_buffer = self._reserve(total, key_states, value_states)
        key_buffer[:, :, past:total] = key_states
        value_buffer[:, :, past:total] = value_states
        self.keys, self.values = key_buffer[:, :, :total], value_buffer[:, :, :total]
        return self.keys, self.values

    def _reserve(self, total: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers with room for `total` tokens that hold the present keys and values."""
        least = max(total, self.capacity)
        if self._buffers is not None and self._is_view() and self._buffers[0].shape[2] >= least:
            return self._buffers
        past = self.get_seq_length()
        if total <= self.capacity:
            capacity = self.capacity
        else:
            capacity = total if past == 0 else max(total, past + past // 2)
            capacity = -(-(capacity + 1) // _ROUND) * _ROUND
        grown: list[Tensor] = []
        # Not inference tensors even under inference_mode, so that later steps may append outside of it.
        with torch.inference_mode(mode=False):
            for present, new in ((self.keys, key_states), (self.values, value_states)):
                shape = (new.shape[0], new.shape[1], capacity, new.shape[3])
                grown.append(torch.empty(shape, dtype=new.dtype, device=new.device))
                if past and present is not None:
                    grown[-1][:, :, :past] = present
        self._buffers = (grown[0], grown[1])
        return self._buffers

    def _is_view(self) -> bool:
        """Whether `keys` and `values` still are what `update` returned, rather than something set from outside."""
        buffers, present = self._buffers, (self.keys, self.values)
        return buffers is not None and all(
            view is not None and view.data_ptr() == buffer.data_ptr() and view.stride() == buffer.stride()
            for view, buffer in zip(present, buffers, strict=True)
        )

    def bind(self, selector: Selector, spec: LayerSpec, counters: Counters) -> SelectorState:
        """The state for `selector`: the one already here if it is that selector's, otherwise a new one."""
        mine, state = self.selector, self.state
        if state is None or mine is None or type(mine) is not type(selector) or mine.config != selector.config:
            state = selector.init_state(spec)
        state.counters = counters
        self.selector, self.state = selector, state
        return state

    # Whatever happens to the cache happens to the state.

    def reset(self) -> None:
        """Forget every sequence."""
        self.keys = self.values = None
        self.is_initialized = False
        self._buffers = self.state = self.selector = self.starts = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; without any left the layer is as new."""
        length = self.get_seq_length()
        if tokens_to_remove > 0:
            if not compat.POSITIVE_CROP_KEEPS:
                raise InputError(
                    "tokens_to_remove",
                    expected="a negative number: how many tokens to remove",
                    got=tokens_to_remove,
                    remedy="Call crop(-n).",
                )
            tokens_to_remove = min(0, tokens_to_remove - length)
        kept = max(0, length + tokens_to_remove)
        if kept == length or self.keys is None or self.values is None:
            return
        if kept == 0:
            self.reset()
            return
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        if self.starts is not None:
            self.starts = self.starts.clamp_max(kept)  # of which nothing is left may start anywhere from here on
        if self.state is not None:
            device = self.keys.device if self.starts is None else self.starts.device
            lengths = torch.full((self.keys.shape[0],), kept, dtype=torch.int64, device=device)
            self.state.crop(lengths if self.starts is None else lengths - self.starts)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))
        if self.state is not None:
            self.state.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, neighbours together."""
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))
        if self.state is not None:
            self.state.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._map_rows(lambda rows: rows[indices.to(rows.device)])
        if self.state is not None:
            self.state.select(indices)

    def offload(self) -> None:
        """Move keys and values to the CPU; the state follows after the attention that still needs it."""
        if self.is_initialized:
            self._move("cpu")
            self.is_offloaded = True

    def prefetch(self) -> None:
        """Move keys, values and state back."""
        if self.is_initialized and self.is_offloaded:
            self._move(self.device)
            self.is_offloaded = False
            if self.state is not None:
                self.state.to(self.device)

    def clone(self) -> "SelectorLayer":
        """An independent copy of everything."""
        twin = copy.copy(self)
        twin._map_rows(lambda rows: rows.clone())
        if self.state is not None:
            twin.state = self.state.clone()
        return twin

    def _move(self, device: torch.device | str) -> None:
        self._map_rows(lambda rows: rows.to(device, non_blocking=True))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to everything whose first axis is the batch, and keep the spare capacity."""
        length = self.get_seq_length()
        if length == 0 or self.keys is None or self.values is None:
            return
        if self._buffers is None or not self._is_view():
            self._buffers = (self.keys, self.values)
        with torch.inference_mode(mode=False):  # as in `_reserve`
            self._buffers = (change(self._buffers[0]), change(self._buffers[1]))
            if self.starts is not None:
                self.starts = change(self.starts)
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def selector_layer(cache: Cache, layer_idx: int, capacity: int | None = None) -> SelectorLayer:
    """The layer `layer_idx` of `cache`, made a `SelectorLayer` in place if it is a plain dynamic one.

    Args:
        cache: Any cache.
        layer_idx: Of the layer.
        capacity: Tokens that it is to hold without growing; None leaves that as it is.

    Raises:
        InputError: The cache keeps this layer in another form.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if isinstance(layer, SelectorLayer):
        layer.capacity = layer.capacity if capacity is None else capacity
        return layer
    if type(layer) is not DynamicLayer:
        raise InputError(
            f"cache, layer {layer_idx}",
            expected="a dynamic cache of full-precision keys and values",
            got=f"{type(layer).__name__} in {type(cache).__name__}",
            remedy="Leave out `cache_implementation`: under sparsify the dynamic cache already appends in place.",
        )
    cache.layers[layer_idx] = adopted = SelectorLayer.adopt(layer, capacity or 0)
    return adopted


def fork(
    cache: Cache,
    pick: Callable[[int, SelectorLayer], tuple[Selector | None, SelectorState | None]] | None = None,
) -> Cache:
    """An independent copy of `cache`: decoding with one leaves the other as it was.

    Args:
        cache: Any cache used under `sparsify`.
        pick: Given a layer's index and layer, the selector and state its copy continues with. The state is used as
            it is, not copied. By default a copy of the layer's own.
    """
    twin = copy.copy(cache)
    twin.layers = []
    for layer_idx, layer in enumerate(cache.layers):
        if not isinstance(layer, SelectorLayer):
            twin.layers.append(copy.deepcopy(layer))
        elif pick is None:
            twin.layers.append(layer.clone())
        else:
            bare = copy.copy(layer)
            bare.state = None
            copied = bare.clone()
            copied.selector, copied.state = pick(layer_idx, layer)
            twin.layers.append(copied)
    return twin
