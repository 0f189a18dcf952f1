"""Which implementation of the operations runs, and why.

- `triton`: kernels, on CUDA and ROCm devices; on the CPU in Triton's interpreter, for tests.
- `eager`: PyTorch, on any of its devices; the specification of the others.

Selectors need not know: `sparsesel.ops` dispatches by the backend in force, which is the one named with `using`, or
else the best one for the tensors' device. Nothing ever falls back from the one to the other.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from sparsesel.config import BackendName
from sparsesel.errors import InputError

Name = BackendName
NAMES: tuple[Name, ...] = get_args(Name)

_in_force: ContextVar[Name] = ContextVar("sparsesel_backend", default="auto")


@dataclass(frozen=True)
class Backend:
    """One implementation of the operations.

    Attributes:
        name: How it is called.
        available: Whether it can run on this machine.
        why: The reason, for people.
    """

    name: str
    available: bool
    why: str


def available() -> list[Backend]:
    """Every backend that this version of sparsesel has."""
    return [_triton(), Backend("eager", True, f"PyTorch {torch.__version__}, on any of its devices")]


def resolve(name: Name, device: torch.device) -> Literal["triton", "eager"]:
    """The backend that `name` means on `device`.

    Raises:
        InputError: There is no such backend, or it cannot run there.
    """
    if name == "eager":
        return "eager"
    if name == "auto":
        return "triton" if device.type == "cuda" and _has_triton() else "eager"
    if name != "triton":
        raise InputError("backend", expected=f"one of {', '.join(NAMES)}", got=repr(name), remedy="Name one of them.")
    if not _has_triton():
        raise InputError(
            "backend",
            expected="an installed triton",
            got="backend triton without it",
            remedy="Install triton 3.6 or newer, or choose backend=eager.",
        )
    if device.type in ("cuda", "meta") or interpreted():
        return "triton"
    raise InputError(
        "backend",
        expected="tensors on a CUDA or ROCm device",
        got=f"backend triton on {device.type}",
        remedy="Choose backend=eager; for a test in Triton's interpreter, set TRITON_INTERPRET=1 before the start.",
    )


@contextlib.contextmanager
def using(name: Name) -> Iterator[None]:
    """Put a backend in force for what runs within; not for other threads."""
    token = _in_force.set(name)
    try:
        yield
    finally:
        _in_force.reset(token)


def current(device: torch.device) -> Literal["triton", "eager"]:
    """The backend in force for tensors on `device`.

    Raises:
        InputError: The one named with `using` cannot run there.
    """
    return resolve(_in_force.get(), device)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as the environment said when triton was loaded."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton() -> Backend:
    if not _has_triton():
        return Backend("triton", False, "triton is not installed")
    import triton

    kind = f"Triton {triton.__version__}"
    if torch.cuda.is_available():
        return Backend("triton", True, f"{kind}, on {torch.cuda.get_device_name()}")
    if interpreted():
        return Backend("triton", True, f"{kind} in its interpreter, on the CPU, for tests")
    return Backend("triton", False, f"{kind}, but torch sees no CUDA or ROCm device")
