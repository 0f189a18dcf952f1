"""Measuring selectors on real models: what is run, what is written, what is shown.

`run` is imported on first use: listing and refusing load neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsesel.eval.api import Result as Result
    from sparsesel.eval.api import Results as Results
    from sparsesel.eval.api import run as run
    from sparsesel.eval.task import Bench as Bench
    from sparsesel.eval.task import Case as Case
    from sparsesel.eval.task import Setting as Setting
    from sparsesel.eval.task import Task as Task

_HOME = {
    "Result": "sparsesel.eval.api",
    "Results": "sparsesel.eval.api",
    "run": "sparsesel.eval.api",
    "Bench": "sparsesel.eval.task",
    "Case": "sparsesel.eval.task",
    "Setting": "sparsesel.eval.task",
    "Task": "sparsesel.eval.task",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsesel.eval' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
