"""For every test: no network, no cache of the user's, memory poisoned before it is written, shapes checked."""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Kernels run in Triton's interpreter, on the CPU, where a test asks for the triton backend. Read when triton is loaded.
os.environ["TRITON_INTERPRET"] = "1"

# The demonstration model's copy lies with what pytest keeps between runs, one for each environment.
# Set here, before huggingface_hub reads it.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / Path(sys.prefix).name)
os.environ["HF_HUB_CACHE"] = os.path.join(os.environ["XDG_CACHE_HOME"], "hub")

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Before anything imports them. Shape annotations cost nothing outside tests.
CHECKED = ["sparsesel.kv", "sparsesel.rotary", "sparsesel.ops.reference", "sparsesel.per_token"]
CHECKED += ["sparsesel.testing.inputs", "sparsesel.testing.tolerances"]
# Of a plugin, all but what describes it, since pydantic checks that and has annotations that beartype cannot; and all
# but its kernels, which are source code to Triton.
PLUGINS = Path(__file__).parents[1] / "plugins"
CHECKED += [
    f"{path.parent.name}.{path.stem}"
    for path in PLUGINS.glob("*/[!_]*.py")
    if path.stem not in ("plugin", "config", "kernels")
]
install_import_hook(CHECKED, "beartype.beartype")

# Its width is settled when it is loaded, if COLUMNS is set then: tests set it later, each for itself.
os.environ.pop("COLUMNS", None)
importlib.import_module("sparsesel.cli.console")

# Tensors in tests are tiny: threads would only wait for one another.
THREADS = torch.get_num_threads()
torch.set_num_threads(1)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if importlib.util.find_spec("triton"):
    from sparsesel.testing.interpreter import guard

    guard()

# The sample project's tests need the sample project; test_third_party.py says so where it must be there.
collect_ignore = [] if importlib.util.find_spec("sparsesel_strided") else ["third_party"]


def pytest_collection_modifyitems(items):
    """Leave the full grid of shapes to `make test-kernels-full`."""
    if os.environ.get("SPARSESEL_FULL"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="make test-kernels-full runs it"))


def _poisoned(allocate):
    """`allocate`, its result full of NaN, or of a number no index has."""

    @functools.wraps(allocate)
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.requires_grad:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).min // 2)
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch):
    """What `torch.empty` and its like return is garbage in earnest, so that reading it before writing shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def threads_for_real_models(request):
    """A test of the demonstration model gets every core, unless other workers want them."""
    if "PYTEST_XDIST_WORKER" in os.environ or request.node.get_closest_marker("model") is None:
        yield
        return
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)
