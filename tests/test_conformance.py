"""Every selector that is installed, ours and third parties', through the conformance suite."""

import pytest

from sparsesel.registry import registry
from sparsesel.testing.conformance import SelectorConformance

OURS = "sparsesel"

# Corners of a selector that its defaults do not reach at the suite's small sizes.
VARIANTS = {
    "retopk": [
        "retopk,cache_size=6,recall_size=2,window_size=3,refresh_interval=5",
        "retopk,window_size=0,refresh_interval=0",
        "retopk,similarity_threshold=2.0",
        "retopk,similarity_threshold=-1.0,retrieval=recent,cache_size=4",
    ],
}
# Specs whose query heads of one key-value head decide together.
GROUPED = ["retopk:group", "retopk,fallback_scope=group-any"]


def specs() -> list[str]:
    found = {}
    for name, registered in registry().selectors.items():
        ours = registered.distribution == OURS
        presets = [f"{name}:{preset}" for preset in registry().presets(name)] if ours else []
        for spec in (name, *presets, *VARIANTS.get(name, ())):
            found.setdefault(registry().make_config(spec), spec)  # a preset may be the defaults by another name
    return [spec for spec in found.values() if spec not in GROUPED]


@pytest.mark.parametrize("selector_spec", specs())
class TestEverySelector(SelectorConformance):
    pass


@pytest.mark.parametrize("selector_spec", GROUPED)
class TestGroupDecisions(SelectorConformance):
    decides_per = "group"


def test_nothing_installed_is_broken():
    assert registry().broken == []
