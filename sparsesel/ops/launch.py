"""How kernels are launched, and how to see what would be launched without a device.

Every launch of every kernel goes through `launch`. Within `recording`, nothing runs: launches are written down, with
the types that a kernel would be compiled for. On tensors of the device "meta" that shows which kernels a step
consists of, lets each be compiled for any target (`sparsesel.ops.compilation`), and proves that a step waits for no
device, since a meta tensor has no content that could be read.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops.reference import row_topk

# Rows of a tile of queries: tensor cores take no fewer, and no model known has more query heads for a key-value head.
BLOCK_G = 16
# A tile has all channels of 16 keys or more: longer ones would not fit into shared memory.
MAX_HEAD_DIM = 512
# Programs along the second and third axis of a grid, on CUDA.
MAX_GRID = 65535

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as far as compilation goes.

    Attributes:
        kernel: `"module:function"`.
        signature: Parameter and type (`"*bf16"`, `"i32"`, `"fp32"` or `"constexpr"`), in order.
        constants: Parameter and value of those that are `"constexpr"`.
        aligned: Parameters known to be multiples of 16.
        num_warps: Warps per program.
        num_stages: Software pipeline stages.
        max_registers: What NVIDIA's assembler may use per thread; 0 leaves it to choose.
        grid: Programs; not part of what is compiled, so not compared.
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    max_registers: int
    grid: tuple[int, ...]

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What distinguishes one compiled kernel from another."""
        return (
            self.kernel,
            self.signature,
            self.constants,
            self.aligned,
            self.num_warps,
            self.num_stages,
            self.max_registers,
        )


Around = Callable[[Launch], contextlib.AbstractContextManager[object]]

_record: ContextVar[tuple[list[Launch], bool, Around | None] | None] = ContextVar("sparsesel_launches", default=None)


@contextlib.contextmanager
def recording(*, running: bool = False, around: Around | None = None) -> Iterator[list[Launch]]:
    """Launches within are recorded in order and do not run; what they would have written is undefined.

    Args:
        running: Whether they run as well.
        around: Makes what is entered while one of them runs, to time it for example.
    """
    launches: list[Launch] = []
    token = _record.set((launches, running, around))
    try:
        yield launches
    finally:
        _record.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int = 0,
    **arguments: Any,
) -> None:
    """Launch a kernel on the device of its tensors; nothing at all where the grid is empty.

    Args:
        kernel: The `@triton.jit` function.
        grid: Programs along up to three axes.
        num_warps: Warps per program.
        num_stages: Software pipeline stages of its loops.
        max_registers: Registers of a thread that NVIDIA's assembler may use, as many as it likes if 0. Left to choose,
            it rather spills some of them than run fewer programs at a time.
        arguments: By parameter name. None for a pointer means that there is nothing there.

    Raises:
        InputError: The grid has more programs along its second or third axis than CUDA devices launch.
    """
    if 0 in grid:
        return
    if max(grid[1:], default=1) > MAX_GRID:
        raise InputError(
            "batch size or heads",
            expected=f"at most {MAX_GRID} of each: a grid of programs has no more but along its first axis",
            got="×".join(map(str, grid)),
            remedy="Decode fewer sequences at a time, or choose backend=eager.",
        )
    record = _record.get()
    watched: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if record is not None:
        launches, running, around = record
        launches.append(_describe(kernel, grid, num_warps, num_stages, max_registers, arguments))
        if not running:
            return
        watched = watched if around is None else around(launches[-1])
    options = compiler_options(num_warps, num_stages, 0 if torch.version.hip else max_registers)
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext(), watched:
        kernel[grid](**arguments, **options)


def compiler_options(num_warps: int, num_stages: int, max_registers: int) -> dict[str, Any]:
    """What Triton compiles with; AMD's compiler knows no limit of registers, so it must be 0 there."""
    # Multiply-add fusion is named because Triton 3.9 warns where it is left to its default, which is about to change.
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return options | {"maxnreg": max_registers} if max_registers else options


def kv_arguments(kv: KVView, *, keys: bool = True, values: bool = True) -> dict[str, Any]:
    """Where the keys and values of `kv` lie, as the parameters that kernels take them by.

    `p_k, s_kb, s_kh, s_kn, s_kd` and `p_v, s_vb, s_vh, s_vn, s_vd` (strides of row or block, head, token, channel),
    `p_lengths`, `p_starts` (or None), `p_table` (or None), `s_table`, `PAGE` (tokens of a block, 0 if dense).
    """
    table = kv.block_table
    arguments: dict[str, Any] = {
        "p_lengths": kv.lengths.contiguous(),
        "p_starts": None if kv.starts is None else kv.starts.contiguous(),
        "p_table": table,
        "s_table": 0 if table is None else table.stride(0),
        "PAGE": 0 if table is None else kv.keys.shape[2],
    }
    if table is not None and table.stride(1) != 1:
        arguments["p_table"] = table.contiguous()
        arguments["s_table"] = table.shape[1]
    for wanted, base, name in ((keys, kv.keys, "k"), (values, kv.values, "v")):
        if wanted:
            arguments[f"p_{name}"] = base
            strides = zip(("b", "h", "n", "d"), base.stride(), strict=True)
            arguments |= {f"s_{name}{axis}": stride for axis, stride in strides}
    return arguments


def query_arguments(query: Tensor, kv: KVView) -> dict[str, Any]:
    """Queries `[B, Hq, 1, D]` as the parameters that kernels take them by, see `primitives.load_group`.

    `p_q, s_qb, s_qh, s_qd`, `G` (query heads of a key-value head), `DIM` (D), `BLOCK_G`, `BLOCK_D`.

    Raises:
        InputError: More query heads share a key-value head than a tile has rows, or more channels than one holds.
    """
    group, dim = query.shape[1] // kv.num_heads, query.shape[3]
    if group > BLOCK_G:
        raise InputError(
            "group size",
            expected=f"at most {BLOCK_G} query heads for each key-value head",
            got=group,
            remedy="Choose backend=eager for this model.",
        )
    row, head, _, channel = query.stride()
    return {
        "p_q": query,
        "s_qb": row,
        "s_qh": head,
        "s_qd": channel,
        "G": group,
        "DIM": dim,
        "BLOCK_G": BLOCK_G,
        "BLOCK_D": block_channels(dim),
    }


def index_arguments(indices: Tensor, query: Tensor, kv: KVView) -> dict[str, Any]:
    """Chosen positions `[B, H, K]` of `query` or scores `[B, Hq, …]` as the parameters that kernels take them by.

    `p_index, s_ib, s_ih, s_in` (strides of row, head of a program, slot), `G` (query heads that a program serves: one
    where each has positions of its own, else those of a key-value head), `GROUP` (query heads of a key-value head),
    `BLOCK_G` (1 where G is). Hq / G programs read key-value head `i_h * G // GROUP`.
    """
    num_heads, sets = query.shape[1], indices.shape[1]
    group = num_heads // kv.num_heads
    served = group if sets <= kv.num_heads else 1
    row, head, slot = indices.stride()
    return {
        "p_index": indices,
        "s_ib": row,
        "s_ih": head if sets > 1 else 0,
        "s_in": slot,
        "G": served,
        "GROUP": group,
        "BLOCK_G": 1 if served == 1 else BLOCK_G,
    }


def block_channels(dim: int) -> int:
    """Channels of a tile that holds `dim` of them: a power of two, and no fewer than tensor cores take.

    Raises:
        InputError: No tile holds so many.
    """
    if dim > MAX_HEAD_DIM:
        raise InputError(
            "head_dim",
            expected=f"at most {MAX_HEAD_DIM} channels, which a tile of keys or values can hold",
            got=dim,
            remedy="Choose backend=eager for this model.",
        )
    return max(16, triton.next_power_of_2(dim))


def block_tokens(base: Tensor) -> int:
    """Keys or values `[…, D]` per tile, 16 to 64: as many as keep it within 16 KiB, or 8 KiB of float32.

    The product of two float32 tiles takes several of tensor cores, whose parts need registers.
    """
    row = block_channels(base.shape[-1]) * base.element_size()
    return max(16, min(64, (1 << (13 if base.dtype == torch.float32 else 14)) // row))


def loop_stages(base: Tensor) -> int:
    """Stages of a loop over tiles of keys or values `[…, D]`: more float32 on the way would take too many registers."""
    return 1 if base.dtype == torch.float32 else 2


def topk_arguments(topk: int | str, kv: KVView) -> dict[str, Any]:
    """A budget as the parameters that kernels take it by: `topk`, and `p_topk` `[B]` int64 or None.

    Kernels read it with `primitives.row_budget`, which gives min(K, L) of a row.
    """
    rows = row_topk(topk, kv.lengths)
    if isinstance(rows, int):
        return {"topk": rows, "p_topk": None}
    return {"topk": resolve_topk(topk, kv.max_length), "p_topk": rows}


def _describe(
    kernel: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    max_registers: int,
    arguments: dict[str, Any],
) -> Launch:
    function = kernel.fn
    signature: list[tuple[str, str]] = []
    constants: list[tuple[str, Any]] = []
    aligned: list[str] = []
    parameters = inspect.signature(function).parameters
    if set(parameters) != set(arguments):
        raise TypeError(f"{function.__name__} takes {sorted(parameters)}, got {sorted(arguments)}")
    for name, parameter in parameters.items():
        value = arguments[name]
        # As Triton specialises: None and 1 become constants, multiples of 16 are known as such.
        if "constexpr" in str(parameter.annotation) or value is None or (type(value) is int and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            signature.append((name, f"*{TYPES[value.dtype]}"))
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, int):
            signature.append((name, "i32" if -(1 << 31) <= value < 1 << 31 else "i64"))
            if value % 16 == 0:
                aligned.append(name)
        else:
            signature.append((name, "fp32"))
    return Launch(
        kernel=f"{function.__module__}:{function.__name__}",
        signature=tuple(signature),
        constants=tuple(constants),
        aligned=tuple(aligned),
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=max_registers,
        grid=grid,
    )
