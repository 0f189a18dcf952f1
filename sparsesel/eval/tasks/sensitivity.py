"""How much each parameter of a selector matters: one is varied at a time, and perplexity measured."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from sparsesel.config import AnyConfig, SelectorConfig, unknown_name
from sparsesel.errors import InputError
from sparsesel.eval.figures import Curves, Figure, Series
from sparsesel.eval.report import REFERENCES, Line, Row, about, rows_by_context
from sparsesel.eval.sweep import Sweep, bases, changed, common, cost_columns, cost_note, field_changed, unmoved_note
from sparsesel.eval.tables import Section, Table
from sparsesel.eval.tasks.perplexity import PerplexityConfig, perplexity

Swept = bool | int | float | str

_SYMBOLS = {
    "topk": "K",
    "cache_size": "C",
    "recall_size": "R",
    "similarity_threshold": "tau",
    "refresh_interval": "Tr",
    "window_size": "W",
}


class SensitivityConfig(PerplexityConfig):
    """What is varied, and what is scored."""

    values: dict[str, list[Swept]] = Field(
        default_factory=dict,
        description="Field of a selector to the values it takes in turn, [64, 128] or one; in every selector named "
        "that has the field.",
        json_schema_extra={
            "default": "of all but full and exact_topk: topk, cache_size and recall_size halved and doubled; "
            "similarity_threshold 0.8 to 0.95; refresh_interval 0, 32, 128, 512; window_size 0 to twice cache_size"
        },
    )

    @field_validator("values", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: value if isinstance(value, list) else [value] for name, value in values.items()}

    @field_validator("values")
    @classmethod
    def _some_of_each(cls, values: dict[str, list[Swept]]) -> dict[str, list[Swept]]:
        if not all(values.values()):
            raise ValueError("at least one value of each field")
        return values


class Sensitivity(Sweep):
    """Documents as in the task `perplexity`; the paper's sweeps of K, C, R, tau, Tr and W/C."""

    varies_budgets = True

    def __init__(self, config: SensitivityConfig) -> None:
        super().__init__(config)
        self._values = config.values

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Each selector named, with its variants.

        Raises:
            InputError: A field that no selector named has, or a value that one refuses.
        """
        known = {
            name for one in given.values() if isinstance(one, SelectorConfig) for name in type(one).model_fields
        } - {"name"}
        for name in self._values:
            if name not in known:
                raise unknown_name("values", name, known, what="field")
        return super().selectors(given)

    def changes(self, spec: str, config: SelectorConfig) -> Iterator[tuple[str, Any]]:
        """The values given, of the fields that it has; by default those around its own that it accepts."""
        if self._values:
            fields = type(config).model_fields
            yield from ((name, value) for name, values in self._values.items() if name in fields for value in values)
        elif config.name not in REFERENCES:
            for name, value in _around(config):
                with contextlib.suppress(InputError):
                    changed(config, name, value)
                    yield name, value

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """One table for each field varied, and how perplexity and exact share follow it."""
        if not lines:
            return []
        tables: list[Table] = []
        curves: dict[str, list[tuple[str, list[tuple[float, Row]]]]] = {}
        notes = [cost_note(lines)]
        for context, rows in rows_by_context(lines).items():
            named = bases(rows)
            for base in named:
                for field, sweep in _sweeps(base, rows).items():
                    references = [row for row in named if row.is_reference and row is not base]
                    tables.append(_table(context, base, field, sweep, references))
                    variants = [row for row in sweep if row.selector != base.selector]
                    notes += unmoved_note(base, [(f"{field} = {_shown(row.config[field])}", row) for row in variants])
                    placed = [(x, row) for row in sweep if (x := _number(row.config[field])) is not None]
                    if len(placed) > 1:
                        name = f"{base.selector}, context {context}"
                        curves.setdefault(field, []).append((name, sorted(placed, key=lambda pair: pair[0])))
        figures = [figure for field, series in curves.items() for figure in _figures(field, series, cost_note(lines))]
        return [Section("Sensitivity", tables, about(lines), notes, figures)]


def _around(config: SelectorConfig) -> Iterator[tuple[str, Any]]:
    """Values around those that a selector has, of the fields that the paper varies."""
    own = config.model_dump()
    if "topk" in own:
        yield from (("topk", value) for value in _scaled(own["topk"]))
    if "cache_size" in own:
        yield from (("cache_size", value) for value in _scaled(own["cache_size"]))
    if "recall_size" in own:
        yield from (("recall_size", value) for value in sorted({1, 2, *_scaled(own["recall_size"])}))
    if "similarity_threshold" in own:
        yield from (("similarity_threshold", value) for value in (0.8, 0.85, 0.9, 0.95))
    if "refresh_interval" in own:
        yield from (("refresh_interval", value) for value in (0, 32, 128, 512))
    if "window_size" in own and "cache_size" in own:
        yield from (("window_size", value) for value in (0, *_scaled(own["cache_size"]), own["cache_size"]))


def _scaled(value: int | str) -> list[int | str]:
    """Half and double of a count or a percentage."""
    if isinstance(value, str):
        percent = float(value.rstrip("%"))
        return [f"{percent / 2:g}%", f"{percent * 2:g}%"]
    return [max(1, value // 2), value * 2]


def _sweeps(base: Row, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Field to the rows that differ from `base` in it alone, `base` among them, by value; on shared documents."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (field := field_changed(row.config, base.config)) is not None:
            found.setdefault(field, [base]).append(row)
    sweeps = {field: common(members) for field, members in found.items()}
    return {
        field: sorted(members, key=lambda row: _place(row.config[field]))
        for field, members in sweeps.items()
        if len(members) > 1
    }


def _table(context: int, base: Row, field: str, sweep: Sequence[Row], references: Sequence[Row]) -> Table:
    documents = sweep[0].lines.keys()
    shown = [row for row in common([*references, sweep[0]])[:-1] if row.lines.keys() == documents]
    own = next(row for row in sweep if row.selector == base.selector)
    names = [_shown(row.config[field]) + " (given)" * (row is own) for row in sweep]
    count = len(documents)
    return Table(
        f"{base.selector}, context {context}: {field}{_symbol(field)}, {count} document{'s' * (count > 1)}",
        [row.selector for row in shown] + names,
        cost_columns([*shown, *sweep], own),
        len(shown),
        kind=field,
    )


def _figures(field: str, series: Sequence[tuple[str, list[tuple[float, Row]]]], note: str) -> list[Figure]:
    label = f"{field}{_symbol(field)}"
    places = [x for _, placed in series for x, _ in placed]
    log = min(places) > 0 and max(places) >= 4 * min(places)

    def curve(title: str, y_label: str, value: Any, caption: str) -> Curves:
        lines = [Series(name, [x for x, _ in placed], [value(row) for _, row in placed]) for name, placed in series]
        return Curves(title, label, y_label, lines, log_x=log, caption=caption)

    figures: list[Figure] = [
        curve(
            f"Perplexity against {field}",
            "perplexity",
            lambda row: perplexity(row.lines.values()),
            f"Decode-true perplexity, {label} alone varied; every other field as given.",
        )
    ]
    if any(row.mean("exact_share") not in (None, 1.0) for _, placed in series for _, row in placed):
        figures.append(
            curve(f"Exact path against {field}", "exact (head, step) pairs", lambda row: row.mean("exact_share"), note)
        )
    return figures


def _symbol(field: str) -> str:
    return f" ({_SYMBOLS[field]})" if field in _SYMBOLS else ""


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError):
        return float(str(value).rstrip("%"))
    return None


def _place(value: Any) -> tuple[float, str]:
    number = _number(value)
    return (float("inf") if number is None else number, str(value))
