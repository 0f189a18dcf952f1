"""Selectors made from those that a user named, by changing one field each, and their decode-true perplexity.

What `sensitivity` and `ablation` share. Which selectors belong together is found from their configurations alone, so
that results of several runs can be reported together.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsesel.config import AnyConfig, LayeredConfig, SelectorConfig, build
from sparsesel.errors import InputError
from sparsesel.eval.report import Row, measured_on, rankable
from sparsesel.eval.tables import Column
from sparsesel.eval.task import Bench, Case, Metrics
from sparsesel.eval.tasks.perplexity import Perplexity, perplexity


class Sweep(Perplexity):
    """Perplexity on the same windows as the task `perplexity`, of the selectors named and of variants of them."""

    _given: frozenset[str] = frozenset()

    @abc.abstractmethod
    def changes(self, spec: str, config: SelectorConfig) -> Iterator[tuple[str, Any]]:
        """(field, value) of each variant of a selector named; a value that it has already makes none."""

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Each selector named, with its variants after it; equal ones once, by the first name.

        Raises:
            InputError: No selector named has a variant, or a value is refused by the selector.
        """
        chosen: dict[str, AnyConfig] = {}
        for spec, config in given.items():
            chosen[spec] = config
            if isinstance(config, LayeredConfig):  # which of its selectors a field is of is not known
                continue
            for field, value in self.changes(spec, config):
                variant, name = changed(config, field, value), varied(spec, field, value)
                if variant in given.values() or variant in chosen.values():
                    continue
                if name in given or name in chosen:
                    raise InputError(
                        "set",
                        expected="selectors that are what their specs say",
                        got=f"{name!r} with another {field}",
                        remedy=f"Leave {field} out of the spec, or out of --set.",
                    )
                chosen[name] = variant
        if len(chosen) == len(given):
            raise InputError(
                "selectors",
                expected="a selector that has one of the fields to vary",
                got=", ".join(given),
                remedy="Name retopk, or say what to vary.",
            )
        self._given = frozenset(given)
        return chosen

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """As `perplexity`, and whether the selector was named."""
        for spec, metrics in super().measure(bench, case, specs):
            yield spec, {**metrics, "given": spec in self._given}


def changed(config: SelectorConfig, field: str, value: Any) -> SelectorConfig:
    """A configuration with another value of one field.

    Raises:
        InputError: The value does not fit.
    """
    return build(type(config), {**config.model_dump(), field: value}, where=config.name)


def varied(spec: str, field: str, value: Any) -> str:
    """`retopk,topk=64` from `retopk,topk=128`: a spec with another value of one field."""
    head, *pairs = spec.split(",")
    kept = [pair.strip() for pair in pairs if pair.partition("=")[0].strip() != field]
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return ",".join([head.strip(), *kept, f"{field}={shown}"])


def field_changed(config: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """The one field in which two configurations of one selector differ, None if there is no such one."""
    if config.get("name") != base.get("name") or "layers" in config or "layers" in base:
        return None
    differing = [name for name in base if config.get(name) != base[name]]
    return differing[0] if len(differing) == 1 else None


def bases(rows: Sequence[Row]) -> list[Row]:
    """The selectors that a user named, of which the others are variants."""
    return [row for row in rows if any(line["metrics"].get("given") for line in row.lines.values())]


def common(rows: Sequence[Row]) -> list[Row]:
    """The rows with those documents alone that all of them have: only these compare."""
    shared = set.intersection(*(set(row.lines) for row in rows)) if rows else set()
    kept = [Row(row.selector, row.config, {d: row.lines[d] for d in sorted(shared)}) for row in rows]
    return kept if shared else []


def unmoved_note(base: Row, variants: Sequence[tuple[str, Row]]) -> list[str]:
    """Says which variants, with their names, gave what `base` gave: nothing follows from those."""
    same = [name for name, row in variants if _results(common([row, base])[:1]) == _results(common([base, row])[:1])]
    if not same:
        return []
    context = next(iter(base.lines.values()))["context"]
    return [
        f"{base.selector}, context {context}: {', '.join(same)} gave exactly the base's results: what "
        f"{'they change' if len(same) > 1 else 'it changes'} did not come into play."
    ]


def _results(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Metrics of each document but for times."""
    return [
        {name: value for name, value in line["metrics"].items() if name not in ("ms_per_step", "given")}
        for row in rows
        for line in row.lines.values()
    ]


def cost_columns(rows: Sequence[Row], base: Row) -> list[Column]:
    """Perplexity, exact share, candidates, time and modelled bytes of variants of `base`, one of the rows."""
    scores = [perplexity(row.lines.values()) for row in rows]
    reference = perplexity(base.lines.values())
    return [
        Column("PPL", scores, 3, better="less", ranked=rankable(rows)),
        Column("÷base", [score / reference for score in scores], 4, better="less", ranked=rankable(rows)),
        Column("exact", [row.mean("exact_share") for row in rows], 1, percent=True),
        Column("fall-\nback", [row.mean("fallback_share") for row in rows], 1, percent=True, detail=True),
        Column("re-\nfresh", [row.mean("refresh_share") for row in rows], 1, percent=True, detail=True),
        Column("candi-\ndates", [row.candidates for row in rows], 1),
        Column("dens-\nity", [row.mean("density") for row in rows], 1, percent=True, detail=True),
        Column("ms per\nstep", [row.mean("ms_per_step") for row in rows], 1),
        Column("MB\nmodelled", [_megabytes(row) for row in rows], 2, better="less"),
    ]


def cost_note(lines: Sequence[Mapping[str, Any]]) -> str:
    """What `cost_columns` mean."""
    places, eager = measured_on(lines)
    return (
        "exact, fallback, refresh: % of (head, step) pairs; candidates: keys scored in a reuse step; ms per step: "
        f"median of whole-model steps, {places}{', no measure of speed' * eager}; MB modelled: what "
        "attention reads in a step at the document's end, by design, with the path shares and candidates counted."
    )


def _megabytes(row: Row) -> float | None:
    return None if row.step_bytes is None else row.step_bytes / 1e6
