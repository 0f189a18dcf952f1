"""Operations that selectors are built from: defined by `reference.py`, run by the backend in force.

Each op is called the same way whatever the backend; `sparsesel.ops.backend` says which one runs. Triton's are in the
module of the op's name, and loaded when first needed.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparsesel.ops import backend, reference
from sparsesel.ops.reference import row_topk, scores_at

P = ParamSpec("P")
R = TypeVar("R")


def _dispatched(op: Callable[P, R], module: str) -> Callable[P, R]:
    """`op` where the eager backend is in force for its first argument, else the Triton function of that name."""

    @functools.wraps(op)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        if backend.current(args[0].device) == "eager":  # pyright: ignore[reportAttributeAccessIssue] -- a tensor
            return op(*args, **kwargs)
        return getattr(importlib.import_module(f"sparsesel.ops.{module}"), op.__name__)(*args, **kwargs)

    return dispatch


dense_attention = _dispatched(reference.dense_attention, "dense_attention")
qk_scores = _dispatched(reference.qk_scores, "qk_scores")
topk_indices = _dispatched(reference.topk_indices, "topk")
indexed_qk = _dispatched(reference.indexed_qk, "indexed_qk")
sparse_attention = _dispatched(reference.sparse_attention, "sparse_attention")
softmax_values = _dispatched(reference.softmax_values, "sparse_attention")

__all__ = [
    "dense_attention",
    "indexed_qk",
    "qk_scores",
    "row_topk",
    "scores_at",
    "softmax_values",
    "sparse_attention",
    "topk_indices",
]


class _Operations(types.ModuleType):
    """This package. Importing a module binds it here by its name, where the operation of that name must stay."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Operations
