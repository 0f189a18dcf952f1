"""What a kernel is made of, so that it is known which ones changed since they were compiled."""

import ast
import hashlib
import importlib
import inspect
import textwrap
from typing import Any

import triton.language as tl


def fingerprint(kernel: str) -> str:
    """Short hash of a kernel, `"module:function"`, of every function that it calls, and of the constants they use.

    Comments, layout and docstrings do not count.
    """
    module, _, name = kernel.partition(":")
    found: dict[str, str] = {}
    _visit(getattr(importlib.import_module(module), name), found)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def _visit(function: Any, found: dict[str, str]) -> None:
    inner = function.fn
    where = f"{inner.__module__}:{inner.__name__}"
    if where in found:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
    found[where] = ast.unparse(tree)
    for node in ast.walk(tree):
        value = inner.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if hasattr(value, "fn") and hasattr(value.fn, "__globals__"):
            if not value.fn.__module__.startswith("triton."):  # Triton's own come with its version
                _visit(value, found)
        elif isinstance(value, tl.constexpr | int | float):
            # This one is false wherever kernels are compiled.
            constant = False if node.id == "INTERPRETED" else getattr(value, "value", value)
            found[f"{where}.{node.id}"] = repr(constant)
