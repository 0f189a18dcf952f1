"""The operations that `sparsesel.ops` exports, each of the name of a module of its."""

import importlib
import pkgutil

import sparsesel.ops


def test_an_operation_stays_one_when_the_module_of_its_name_is_loaded():
    for module in pkgutil.iter_modules(sparsesel.ops.__path__):
        importlib.import_module(f"sparsesel.ops.{module.name}")
    assert [name for name in sparsesel.ops.__all__ if not callable(getattr(sparsesel.ops, name))] == []
