"""Triton's interpreter, made fit for tests: memory is guarded, and half the time is saved.

On a device, and in the interpreter as it comes, a kernel that reads past the end of a tensor gets whatever lies there:
numbers that happen to be right, or a crash of the process. Under `guard` it gets an IndexError.
"""

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np


def guard() -> None:
    """Prepare Triton's interpreter, once per process, before the first kernel runs.

    From then on a kernel may load from and store to the memory of the tensors that it was launched with, and none
    other. The interpreter must have been asked for: `TRITON_INTERPRET=1` before triton is imported.
    """
    from triton.runtime import interpreter as module

    interpreter: Any = module
    memory = _Memory(interpreter._interpreter)
    interpreter._interpreter = memory
    prepare = interpreter.GridExecutor._init_args_hst

    def prepare_and_note(self: Any, args: Any, kwargs: Any) -> Any:
        prepared = prepare(self, args, kwargs)
        memory.owned_by([*prepared[0], *prepared[1].values()])
        return prepared

    interpreter.GridExecutor._init_args_hst = prepare_and_note
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang, [interpreter.tl, interpreter.tl.core])


class _Memory:
    """What the interpreter reaches memory through, with a look at every address first."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._begins: list[int] = []
        self._ends: list[int] = []

    def owned_by(self, arguments: list[Any]) -> None:
        """Allow the memory of the tensors among `arguments`."""
        storages = [argument.untyped_storage() for argument in arguments if hasattr(argument, "untyped_storage")]
        owned = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        self._begins, self._ends = [begin for begin, _ in owned], [end for _, end in owned]

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self._check("loads from", pointers[mask], np.dtype(dtype).itemsize)
        return self._raw.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self._check("stores to", pointers[mask], value.dtype.itemsize)
        return self._raw.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self._check("updates", pointers[mask], value.dtype.itemsize)
        return self._raw.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: np.ndarray, expected: np.ndarray, value: np.ndarray, order: Any) -> Any:
        self._check("updates", pointers, value.dtype.itemsize)
        return self._raw.atomic_cas(pointers, expected, value, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def _check(self, what: str, addresses: np.ndarray, size: int) -> None:
        if not addresses.size:
            return
        if self._owns(int(addresses.min()), int(addresses.max()) + size):  # nearly always: all in one tensor
            return
        outside = sum(not self._owns(address, address + size) for address in addresses.ravel().tolist())
        if outside:
            raise IndexError(
                f"a kernel {what} {outside} of {addresses.size} addresses that no tensor of its launch owns"
            )

    def _owns(self, begin: int, end: int) -> bool:
        at = bisect.bisect_right(self._begins, begin)
        return at > 0 and end <= self._ends[at - 1]


def _once_per_launch(patch_lang: Callable[[Any], Any], names: list[Any]) -> Callable[[Any], Any]:
    """`patch_lang`, which replaces the language by what is interpreted, where it has not been done in this launch.

    The interpreter calls it whenever one function of a kernel calls another, which finds nothing left to replace and
    yet takes close to half of all its time.
    """
    patched: list[list[bool]] = []  # how the functions called so far in this launch know the language

    class Already:
        def restore(self) -> None:
            pass

    def patch_once(function: Any) -> Any:
        known = [any(value is name for value in function.__globals__.values()) for name in names]
        if known in patched:
            return Already()
        scope = patch_lang(function)
        if not patched:  # the kernel itself
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        patched.append(known)
        return scope

    return patch_once
