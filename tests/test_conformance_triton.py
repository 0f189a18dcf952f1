"""Every selector of ours through the conformance suite on Triton, in its interpreter.

In the quick form, which is every test at small sizes. With SPARSESEL_FULL set, at the complete sizes (an hour or two on
one core), and every variant that the eager suite knows besides in the quick form.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from sparsesel.ops import backend
from sparsesel.ops.launch import recording
from sparsesel.registry import registry
from sparsesel.testing.conformance import SelectorConformance

_SPEC = importlib.util.spec_from_file_location("eager_conformance", Path(__file__).with_name("test_conformance.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
eager = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(eager)

FULL = bool(os.environ.get("SPARSESEL_FULL"))

# Small rings and windows, so that few tokens fill them, and intervals that few steps reach.
PLAIN = [
    "full",
    "exact_topk",
    "retopk,cache_size=4",
    "streaming_llm",
    "quest,page_size=4",
    "loki,rank=16",
]
GROUPED = ["retopk,fallback_scope=group-any,cache_size=4,recall_size=2,window_size=3,refresh_interval=2"]
MEAN_VALUE = ["sparq"]
FIXED_PARTS = ["tokenselect"]
CACHE_POSITIONS = ["streaming_llm:paper"]
ALWAYS = [*PLAIN, *GROUPED, *MEAN_VALUE, *FIXED_PARTS, *CACHE_POSITIONS]


class OnTriton:
    """Has a suite run on Triton, and see that kernels are what runs."""

    backend = "triton"

    @pytest.fixture(autouse=True)
    def size(self, selector_spec):
        self.quick = not FULL or selector_spec not in ALWAYS

    def test_a_step_launches_kernels(self, subject):
        replay = subject.replay(self.stream(200, length=subject.prompt + 2)).prefill(subject.prompt)
        assert backend.current(torch.device("cpu")) == "triton"
        for step in (replay.step, replay.attend):
            with recording(running=True) as launches:
                step()
            assert launches


def each(specs, variants=()):
    """Parametrises a class by `specs`; on demand by what else the eager suite tests as well."""
    return pytest.mark.parametrize("selector_spec", dict.fromkeys([*specs, *(variants if FULL else ())]))


def ours():
    return [
        spec for spec in eager.specs() if registry().get(spec.split(",")[0].split(":")[0]).distribution == eager.OURS
    ]


@each(PLAIN, ours())
class TestEverySelectorOnTriton(OnTriton, SelectorConformance):
    pass


@each(GROUPED, eager.GROUPED)
class TestGroupDecisionsOnTriton(OnTriton, SelectorConformance):
    decides_per = "group"


@each(MEAN_VALUE, eager.MEAN_VALUE)
class TestMeanValueOnTriton(OnTriton, eager.MeanValueConformance):
    pass


@each(FIXED_PARTS, eager.FIXED_PARTS)
class TestFixedPartsOnTriton(OnTriton, eager.FixedPartsConformance):
    pass


@each(CACHE_POSITIONS, eager.CACHE_POSITIONS)
class TestCachePositionsOnTriton(OnTriton, eager.CachePositionsConformance):
    pass
