"""The sample project in tests/third_party is found through its entry point alone, as anyone's would be."""

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

import sparsesel
from sparsesel.registry import registry

PROJECT = Path(__file__).parents[1] / "third_party" / "sparsesel_strided"
REMEDY = f"install it: pip install --no-deps --no-build-isolation {PROJECT}"


@pytest.fixture
def declared():
    """What its pyproject.toml says, if it is installed."""
    try:
        importlib.metadata.distribution("sparsesel-strided")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            pytest.fail(f"the sample third-party project is missing; {REMEDY}")
        pytest.skip(f"the sample third-party project is not installed; {REMEDY}")
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def test_is_found_with_its_distribution_and_version(declared):
    registered = registry().get("strided")
    assert registered.distribution == declared["name"]
    assert registered.version == declared["version"]
    assert registered.entry_point == "strided"


def test_is_made_by_name(declared):
    selector = sparsesel.make_selector("strided,stride=3", topk=5)
    assert type(selector).__module__ == "sparsesel_strided.selector"
    assert selector.config.model_dump() == {"name": "strided", "topk": 5, "stride": 3}


def test_nothing_of_ours_names_it():
    root = PROJECT.parents[2]
    sources = [*root.glob("sparsesel/**/*.py"), *root.glob("plugins/**/*.py"), root / "pyproject.toml"]
    assert not [path for path in sources if "sparsesel_strided" in path.read_text(encoding="utf-8")]
