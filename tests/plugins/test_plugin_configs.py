"""Configurations and presets of the selectors that ship here, and what importing them costs."""

import math
import subprocess
import sys

import pytest

from sparsesel.errors import InputError
from sparsesel.registry import make_config, registry
from sparsesel.selector import Selector
from sparsesel_retopk.config import ReTopKConfig

NAMES = ("full", "exact_topk", "retopk")


def test_papers_defaults():
    assert make_config("retopk").model_dump() == {
        "name": "retopk",
        "topk": 512,
        "cache_size": 32,
        "window_size": 32,
        "recall_size": 4,
        "similarity_threshold": 0.85,
        "refresh_interval": 128,
        "retrieval": "similarity",
        "fallback": True,
        "fallback_scope": "head",
    }
    assert make_config("exact_topk").model_dump() == {"name": "exact_topk", "topk": 512}


def test_presets():
    assert set(registry().presets("retopk")) == {"paper", "quality", "group"}
    assert make_config("retopk:paper") == ReTopKConfig()
    assert make_config("retopk:quality") == ReTopKConfig(similarity_threshold=0.9)
    assert make_config("retopk:group") == ReTopKConfig(fallback_scope="group-mean")
    assert make_config("exact_topk:strict") == make_config("exact_topk")
    assert registry().presets("full") == {}


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ("retopk,similarity_threshold=1", "similarity_threshold", 1.0),
        ("retopk,similarity_threshold=1.5", "similarity_threshold", 1.5),
        ("retopk,similarity_threshold=-1", "similarity_threshold", -1.0),
        ("retopk,fallback=off", "fallback", False),
        ("retopk,fallback=false", "fallback", False),
        ("retopk,fallback=on", "fallback", True),
        ("retopk,window_size=0", "window_size", 0),
        ("retopk,refresh_interval=0", "refresh_interval", 0),
        ("retopk,retrieval=recent", "retrieval", "recent"),
        ("retopk,fallback_scope=group-any", "fallback_scope", "group-any"),
        ("retopk,cache_size=4,recall_size=4", "recall_size", 4),
        ("retopk,topk=6.25%", "topk", "6.25%"),
        ("exact_topk,topk=1", "topk", 1),
    ],
)
def test_accepted(spec, field, value):
    assert getattr(make_config(spec), field) == value


@pytest.mark.parametrize("name", ["exact_topk", "retopk"])
@pytest.mark.parametrize("topk", [0, -1, True, 1.5, "0%", "101%", "many", None])
def test_refused_topk(name, topk):
    with pytest.raises(InputError, match=r"topk.*expected.*got"):
        make_config(name, topk=topk)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_size", 0),
        ("cache_size", True),
        ("cache_size", 2.0),
        ("recall_size", 0),
        ("recall_size", 33),
        ("window_size", -1),
        ("window_size", False),
        ("similarity_threshold", math.nan),
        ("similarity_threshold", math.inf),
        ("similarity_threshold", "high"),
        ("similarity_threshold", True),
        ("refresh_interval", -1),
        ("retrieval", "random"),
        ("fallback", "perhaps"),
        ("fallback", 1),
        ("fallback_scope", "layer"),
    ],
)
def test_refused(field, value):
    with pytest.raises(InputError) as caught:
        make_config("retopk", **{field: value})
    assert field in caught.value.field
    assert caught.value.expected
    assert caught.value.got == repr(value)
    assert caught.value.remedy


def test_recall_size_is_held_against_cache_size():
    with pytest.raises(InputError, match="cache_size=2") as caught:
        make_config("retopk", cache_size=2)  # below the default recall_size
    assert "recall_size" in caught.value.field


def test_full_has_nothing_to_set():
    with pytest.raises(InputError, match="topk"):
        make_config("full", topk=5)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_described(name):
    fields = registry().config_class(name).model_fields
    assert all(field.description for key, field in fields.items() if key != "name")


@pytest.mark.parametrize("name", NAMES)
def test_is_found_through_its_own_entry_point(name):
    registered = registry().get(name)
    assert registered.distribution == "sparsesel"
    assert registered.entry_point == name
    assert isinstance(registry().make_selector(name), Selector)


def test_listing_and_configuring_load_no_torch():
    code = (
        "import sys, sparsesel_full.plugin, sparsesel_exact_topk.plugin, sparsesel_retopk.plugin\n"
        "import sparsesel_full.config, sparsesel_exact_topk.config, sparsesel_retopk.config\n"
        "print([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
