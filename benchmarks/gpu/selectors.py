"""Every selector in Triton against the eager one, step by step on the same device, and its output against float64."""

import dataclasses
from typing import Any

from gpu.inputs import Case, Geometry, expected_in_parts, make_case
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.selector import Selector, Support
from sparsesel.testing.replay import check_support
from sparsesel.testing.tolerances import assert_close_to_float64, assert_same_output
from sparsesel.testing.tolerances import rounding_tolerance as tolerance_of

SHOWN = 40  # queries of the prompt's end: more than a ring of past queries holds

# Scores of numbers on the grid are exact, so most selectors must select the very same. These rank by numbers that are
# rounded on the way (weights, rotated keys), and may choose otherwise where two are nearly equal.
ROUNDED = ("sparq", "loki", "tokenselect")
APART = 0.02
"""Largest share of a support in which those may differ."""


def build(spec: str, level: int | None) -> Selector:
    """The selector, of one of ReTopK's levels of fusion where given."""
    selector: Any = make_selector(spec)
    return selector if level is None else dataclasses.replace(selector, level=level)


def weighs_its_support(selector: Selector) -> bool:
    """Whether the output is attention over the support, neither more nor at other positions."""
    config = selector.config
    return not getattr(config, "reallocate", False) and getattr(config, "positions", "original") == "original"


def check_selector(spec: str, level: int | None, geometry: Geometry, steps: int, device: str) -> dict[str, Any]:
    """Some steps after a prompt: the same supports and counts as eager, and outputs as float64 has them."""
    shown = min(SHOWN, geometry.length - steps - 1)
    case = make_case(geometry, device, seed=geometry.length, queries=shown + steps, on_grid=True)
    selector, scale = build(spec, level), geometry.head_dim**-0.5
    rounded = selector.config.name in ROUNDED
    prompt = case.columns - steps
    states = {}
    for name in ("triton", "eager"):
        with backend.using(name):
            states[name] = selector.init_state(case.stream.layer_spec())
            queries = case.queries(prompt - shown, prompt)
            selector.observe_prefill(queries, case.view(prompt), states[name], scale=scale)
    apart, largest = 0, 0
    for at in range(steps):
        columns = prompt + at + 1
        query, kv = case.queries(columns - 1, columns), case.view(columns)
        with backend.using("eager"):
            expected = selector.discover(query, kv, states["eager"], scale=scale)
            usual = selector.aggregate(query, kv, expected, states["eager"], scale=scale)
        with backend.using("triton"):
            probe = states["triton"].clone()
            support = selector.discover(query, kv, probe, scale=scale)
            outputs = {
                "aggregate": selector.aggregate(query, kv, support, probe, scale=scale),
                "attend": selector.attend(query, kv, states["triton"], scale=scale),
            }
        lengths = case.stream.lengths(columns)
        sizes = {"num_attention_heads": query.shape[1], "num_key_value_heads": geometry.kv_heads}
        check_support(support, lengths, **sizes)
        mask, other = (_by_head(one, kv, query.shape[1], int(lengths.max())) for one in (support, expected))
        different = (mask ^ other).sum(-1)  # [B, Hq]
        apart, largest = apart + int(different.sum()), max(largest, int(other.sum(-1).max()))
        limit = APART * other.sum(-1).clamp_min(50) if rounded else 0
        if bool((different > limit).any()):
            row, head = (different > limit).nonzero()[0].tolist()
            raise AssertionError(
                f"step {at}, row {row}, head {head}: {int(different[row, head])} of "
                f"{int(other[row, head].sum())} positions differ from eager's"
            )
        _check_outputs(selector, case, columns, mask, different == 0, outputs, usual, f"step {at}", scale)
    counted = {name: state.counters.read() for name, state in states.items()}
    if not rounded:
        _check_counters(counted["triton"], counted["eager"])
    total = {name: float(values.sum()) for name, values in counted["triton"].items()}
    return {"positions apart": apart, "largest support": largest, "counters": total}


def _check_outputs(
    selector: Selector,
    case: Case,
    columns: int,
    mask: Tensor,
    same: Tensor,
    outputs: dict[str, Tensor],
    usual: Tensor,
    what: str,
    scale: float,
) -> None:
    """Against attention over the selector's own support in float64, or where its output is more than that, eager's."""
    query, (keys, values) = case.queries(columns - 1, columns), case.stream.logical(columns)
    expected = None
    if weighs_its_support(selector):
        expected = expected_in_parts(query, keys, values, mask, scale=scale)
    for name, output in outputs.items():
        if expected is not None:
            assert_close_to_float64(output, expected, f"{what}, {name}")
        else:
            tolerance = tolerance_of(query, keys, values, scale=scale)
            assert_same_output(output[same], usual[same], tolerance, f"{what}, {name}")


def _check_counters(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        got = found.get(name)
        if got is None or got.tolist() != values.tolist():
            raise AssertionError(f"counter {name}: {got if got is None else got.tolist()}, eager's {values.tolist()}")


def _by_head(support: Support, kv: KVView, heads: int, longest: int) -> Tensor:
    mask = support.as_mask(kv)[:, :, 0, :longest]
    return mask.expand(-1, heads, -1) if mask.shape[1] == 1 else mask.repeat_interleave(heads // mask.shape[1], dim=1)
