"""Sparse-attention selectors for long-context decoding.

Names are imported on first use, so that `import sparsesel` loads neither torch nor triton.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsesel.config import SelectorConfig as SelectorConfig
    from sparsesel.config import TaskConfig as TaskConfig
    from sparsesel.errors import InputError as InputError
    from sparsesel.hf.inject import Session as Session
    from sparsesel.hf.inject import sparsify as sparsify
    from sparsesel.hookspecs import SelectorPlugin as SelectorPlugin
    from sparsesel.hookspecs import TaskPlugin as TaskPlugin
    from sparsesel.hookspecs import hookimpl as hookimpl
    from sparsesel.kv import KVView as KVView
    from sparsesel.registry import make_config as make_config
    from sparsesel.registry import make_selector as make_selector
    from sparsesel.selector import LayerSpec as LayerSpec
    from sparsesel.selector import Selector as Selector
    from sparsesel.selector import SelectorState as SelectorState
    from sparsesel.selector import StepCost as StepCost
    from sparsesel.selector import Support as Support

__version__ = "0.1.0"

_HOME = {
    "InputError": "sparsesel.errors",
    "SelectorConfig": "sparsesel.config",
    "SelectorPlugin": "sparsesel.hookspecs",
    "TaskConfig": "sparsesel.config",
    "TaskPlugin": "sparsesel.hookspecs",
    "hookimpl": "sparsesel.hookspecs",
    "make_config": "sparsesel.registry",
    "make_selector": "sparsesel.registry",
    "KVView": "sparsesel.kv",
    "Selector": "sparsesel.selector",
    "SelectorState": "sparsesel.selector",
    "Support": "sparsesel.selector",
    "LayerSpec": "sparsesel.selector",
    "StepCost": "sparsesel.selector",
    "sparsify": "sparsesel.hf.inject",
    "Session": "sparsesel.hf.inject",
}

__all__ = ["__version__", *sorted(_HOME)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsesel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
