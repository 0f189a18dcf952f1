"""Scratch memory that is there before a step needs it.

On a CUDA device, what the kernels of one step hand to each other lies in one buffer, which is kept from step to step
and shared by all layers: they run one after another. It grows by doubling, so that a long generation allocates a few
times. Each stream and each thread has its own. While a CUDA graph is captured, scratch is allocated anew: it belongs
to the graph, which finds it at the same place whenever it is replayed.
"""

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, as CUDA's own allocations


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, int], Tensor] = {}


_kept = _Kept()


def scratch(device: torch.device, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors without content that are good until the next call on this device, stream and thread.

    Args:
        device: Where they are to lie. Elsewhere than on CUDA devices each is allocated by itself.
        wanted: Type and shape of each by name.
    """
    if device.type != "cuda" or _is_capturing(device):
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in wanted.items()}
    return carve(device, torch.cuda.current_stream(device).cuda_stream, wanted)


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):  # the question is about the current one
        return torch.cuda.is_current_stream_capturing()


def carve(
    device: torch.device, stream: int, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Parts of the buffer of a stream of this thread."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in wanted.items()}
    total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
    buffer = _kept.buffers.get((device, stream))
    if buffer is None or len(buffer) < total:
        # What is too small goes first, so that the two need not fit at once.
        del buffer
        _kept.buffers.pop((device, stream), None)
        # Not an inference tensor even under inference_mode, so that it may be written to outside of it.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(1 << max(20, (total - 1).bit_length()), dtype=torch.uint8, device=device)
        _kept.buffers[device, stream] = buffer
    found, at = {}, 0
    for name, (dtype, shape) in wanted.items():
        found[name] = buffer[at : at + sizes[name]].view(dtype).view(shape)
        at += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
    return found


def release() -> None:
    """Forget the buffers of this thread."""
    _kept.buffers.clear()
