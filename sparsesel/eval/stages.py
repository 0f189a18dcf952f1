"""Where the time of a decode step goes: kernels by name, PyTorch's operations by the function that asks for them."""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsesel.ops import backend
from sparsesel.registry import registry

if TYPE_CHECKING:
    from sparsesel.ops.launch import Launch

# What kernels and functions of the package do; those of selectors are named by their plugins. The innermost function
# that asks for an operation tells its stage; a kernel that nobody names goes by its own name.
_STAGES = {
    "qk_scores_kernel": "QK",
    "indexed_qk_kernel": "QK",
    "tile_maxima_kernel": "select",
    "topk_kernel": "select",
    "softmax_values_kernel": "aggregate",
    "combine_kernel": "aggregate",
    "dense_attention_kernel": "QK + aggregate",
    "sparse_attention_kernel": "QK + aggregate",
    "gather_keys": "gather",
    "gather_values": "gather",
    "_gather": "gather",
    "qk_scores": "QK",
    "indexed_qk": "QK",
    "topk_indices": "select",
    "scores_at": "select",
    "softmax_values": "aggregate",
    "sparse_attention": "QK + aggregate",
    "dense_attention": "QK + aggregate",
}
_OTHER = "other"
_OURS = "sparsesel"


def keep_busy(device: torch.device) -> None:
    """Let a CUDA device wait for some tens of milliseconds, while the host launches what is timed next.

    Events around it then tell how long the device takes, as in a CUDA graph, not how long launching does.
    """
    if device.type == "cuda":
        torch.cuda._sleep(1 << 26)


class StageClock(TorchDispatchMode):
    """Times everything that runs within it, by stage. Made for one device; use it as a context manager.

    On CUDA the device is kept busy while a step is launched, so that times are those of the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []
        self._busy = False
        self._recording = contextlib.ExitStack()

    def milliseconds(self) -> dict[str, float]:
        """Sum of each stage (waits for the device)."""
        on_device = self._device.type == "cuda"
        if on_device:
            torch.cuda.synchronize(self._device)
        total: dict[str, float] = {}
        for stage, began, ended in self._spans:
            taken = began.elapsed_time(ended) if on_device else 1000 * (ended - began)
            total[stage] = total.get(stage, 0.0) + taken
        return total

    def __enter__(self) -> "StageClock":
        if backend.current(self._device) == "triton":
            from sparsesel.ops.launch import recording

            self._recording.enter_context(recording(running=True, around=self._around))
        keep_busy(self._device)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recording.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What Triton's interpreter asks of PyTorch is the kernel's own time.
        with contextlib.nullcontext() if self._busy else self._span(_asked_by(sys._getframe(1))):
            return func(*args, **(kwargs or {}))

    def _around(self, launch: "Launch") -> contextlib.AbstractContextManager[None]:
        module, _, name = launch.kernel.rpartition(":")
        return self._span(_stage(module, name) or name)

    @contextlib.contextmanager
    def _span(self, stage: str) -> Iterator[None]:
        self._busy = True
        began = self._now()
        try:
            yield
        finally:
            self._spans.append((stage, began, self._now()))
            self._busy = False

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _asked_by(frame: Any) -> str:
    """The stage of the innermost function that has one, up to the selector's own `attend`."""
    while frame is not None:
        name = frame.f_code.co_name
        if (stage := _stage(frame.f_globals.get("__name__", ""), name)) is not None:
            return stage
        if name == "attend":
            break
        frame = frame.f_back
    return _OTHER


def _stage(module: str, name: str) -> str | None:
    """What a kernel or function does, None if nobody says."""
    package = module.partition(".")[0]
    return _STAGES.get(name) if package == _OURS else _declared().get(package, {}).get(name)


@functools.cache
def _declared() -> Mapping[str, Mapping[str, str]]:
    """What plugins say, by their package: names of different ones may be the same."""
    found: dict[str, dict[str, str]] = {}
    for each in registry().selectors.values():
        found.setdefault(each.plugin.factory.partition(".")[0], {}).update(each.plugin.stages)
    return found
