"""Helpers to test a selector with: inputs, a driver, error bounds, and the conformance suite.

`sparsesel.testing.conformance` is the suite; it needs pytest and hypothesis and is imported by its full name.
"""

from sparsesel.testing.inputs import (
    HOSTILE,
    DenseLayout,
    Layout,
    PagedLayout,
    Stream,
    hostile_scores,
    hostile_stream,
    random_stream,
)
from sparsesel.testing.replay import Replay, Step, check_support
from sparsesel.testing.tolerances import (
    Expected,
    assert_close_to_float64,
    assert_same_output,
    expected_attention,
    gamma,
    rounding_tolerance,
    unit_roundoff,
)

__all__ = [
    "HOSTILE",
    "DenseLayout",
    "Expected",
    "Layout",
    "PagedLayout",
    "Replay",
    "Step",
    "Stream",
    "assert_close_to_float64",
    "assert_same_output",
    "check_support",
    "expected_attention",
    "gamma",
    "hostile_scores",
    "hostile_stream",
    "random_stream",
    "rounding_tolerance",
    "unit_roundoff",
]
