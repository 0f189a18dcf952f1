"""The conformance suite of every selector, as in tests/test_conformance.py, on the device under test in Triton."""

import importlib.util
import os
from pathlib import Path

from sparsesel.testing.conformance import SelectorConformance

_DEVICE = os.environ["GPU_CHECK_DEVICE"]
_PATH = Path(__file__).parents[2] / "tests" / "test_conformance.py"


def _on_device() -> dict[str, type]:
    spec = importlib.util.spec_from_file_location("conformance_of_all", _PATH)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module at {_PATH}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = {"device": _DEVICE, "backend": "triton", "quick": _DEVICE == "cpu", "__module__": __name__}
    return {
        name: type(name, (found,), settings)
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, SelectorConformance) and found is not SelectorConformance
    }


globals().update(_on_device())
