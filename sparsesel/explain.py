"""What a decode step would launch, found out without a device and without numbers."""

import dataclasses
from typing import Any

import torch

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.ops.launch import Launch, recording
from sparsesel.selector import LayerSpec, Selector


@dataclasses.dataclass(frozen=True)
class Trace:
    """The kernels of one layer, by phase of a generation.

    Attributes:
        prefill: Of a prompt.
        first: Of the first decode step, which may have to catch up on the prompt.
        step: Of any later one.
        state: The selector's state after it, on the device "meta".
    """

    prefill: list[Launch]
    first: list[Launch]
    step: list[Launch]
    state: Any


def trace(selector: Selector, layer: LayerSpec, length: int, *, page_size: int = 0) -> Trace:
    """Record the kernels of a prompt of `length - 2` tokens and two decode steps, the last at `length` visible keys.

    Everything lies on the device "meta", whose tensors have no content: a step that waited for its device fails here.

    Args:
        selector: The selector, which must have a Triton path.
        layer: Its layer; the device is replaced.
        length: Visible keys at the last step, at least 3.
        page_size: Tokens of a block of a paged cache, 0 for a dense one.

    Raises:
        NotImplementedError: A step looks at the content of a tensor. torch says at which.
    """
    meta = torch.device("meta")
    layer = dataclasses.replace(layer, device=meta)
    batch, heads, dim = layer.batch_size, layer.num_attention_heads, layer.head_dim
    scale = dim**-0.5
    found = []
    with torch.no_grad(), backend.using("triton"):
        state = selector.init_state(layer)
        for tokens, visible in ((length - 2, length - 2), (1, length - 1), (1, length)):
            kv = _view(layer, visible, length, page_size)
            query = torch.empty(batch, heads, tokens, dim, dtype=layer.dtype, device=meta)
            with recording() as launches:
                if tokens > 1 or visible == length - 2:
                    selector.observe_prefill(query, kv, state, scale=scale)
                else:
                    selector.attend(query, kv, state, scale=scale)
            found.append(launches)
    prefill, first, step = found
    return Trace(prefill, first, step, state)


def _view(layer: LayerSpec, visible: int, length: int, page_size: int) -> KVView:
    def empty(*shape: int, dtype: torch.dtype = layer.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, dim, batch = layer.num_key_value_heads, layer.head_dim, layer.batch_size
    if not page_size:
        keys, values = (empty(batch, heads, length, dim)[:, :, :visible] for _ in range(2))
        return KVView.dense(keys, values)
    blocks = -(-length // page_size)
    keys, values = (empty(batch * blocks, heads, page_size, dim) for _ in range(2))
    return KVView.paged(
        keys,
        values,
        block_table=empty(batch, blocks, dtype=torch.int64),
        lengths=empty(batch, dtype=torch.int64),
        max_length=visible,
    )
