"""Compile recorded launches for a GPU that need not be there, and see what they would take of it.

Triton brings its own compilers and disassemblers, so this works on a machine without any device. It does not work in a
process in which Triton's interpreter is switched on, as functions are not compiled there at all.
"""

import importlib
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsesel.errors import InputError
from sparsesel.ops.backend import interpreted
from sparsesel.ops.launch import Launch, compiler_options

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

SHARED_LIMITS = {
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
"""Bytes of shared memory that one program can have."""

_INSTRUCTION = 16  # bytes, on NVIDIA's devices since Volta


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        registers: Per thread; on AMD devices vector registers.
        spilled: Bytes per thread that did not fit into registers.
        shared: Bytes of shared memory per program.
        instructions: Machine instructions in the kernel.
    """

    registers: int
    spilled: int
    shared: int
    instructions: int


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compile one launch for `target`, a key of `TARGETS`.

    Raises:
        InputError: Triton's interpreter is switched on in this process.
        triton.compiler.errors.CompilationError: The kernel does not compile.
    """
    if interpreted():
        raise InputError(
            "TRITON_INTERPRET",
            expected="0, where kernels are to be compiled",
            got="1",
            remedy="Compile in a process without it.",
        )
    module, name = launch.kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    names = [parameter for parameter, _ in launch.signature]
    source = ASTSource(
        fn=function,
        signature=dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs={(names.index(parameter),): [["tt.divisibility", 16]] for parameter in launch.aligned},
    )
    is_amd = TARGETS[target].backend == "hip"
    options = compiler_options(launch.num_warps, launch.num_stages, 0 if is_amd else launch.max_registers)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    measure = _of_amdgcn if is_amd else _of_cubin
    registers, spilled, instructions = measure(compiled)
    return Resources(registers, spilled, compiled.metadata.shared, instructions)


def _of_cubin(compiled: Any) -> tuple[int, int, int]:
    # Triton brings the tool that tells what a cubin takes; its disassembler would be slow.
    cubin = compiled.asm["cubin"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"], _code_bytes(cubin) // _INSTRUCTION


def _code_bytes(elf: bytes) -> int:
    """Bytes of the sections of an ELF file that are executable."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + place * size) for place in range(count)]
    return sum(length for _, _, flags, _, _, length in sections if flags & 4)


def _of_amdgcn(compiled: Any) -> tuple[int, int, int]:
    text = compiled.asm["amdgcn"]

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    instructions = len(re.findall(r"^\t[a-z][a-z0-9_]+ ?", text, re.MULTILINE))
    return number(r"\.vgpr_count:\s+(\d+)"), number(r"\.private_segment_fixed_size:\s+(\d+)"), instructions
