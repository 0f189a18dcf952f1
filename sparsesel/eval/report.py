"""What a folder's results say, computed from its lines alone: each task shows its own, by rows of selectors."""

import os
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsesel.errors import InputError
from sparsesel.eval.tables import Column, Section
from sparsesel.registry import registry

REFERENCES = ("full", "exact_topk")
"""Selectors that others are compared with; their rows stand apart."""

Line = Mapping[str, Any]

FEWEST = 5
"""Documents from which on there is an interval: of fewer, it is little more than their own values."""

TOO_FEW = f"Fewer than {FEWEST} documents are too few for an interval."

_RESAMPLES = 2000


def report(lines: Sequence[Line]) -> list[Section]:
    """What each task has to show of its lines, in the order in which they were measured.

    Lines of a task that is not installed are not shown; that is said.
    """
    return [section for _, _, sections in by_task(lines) for section in sections]


def by_task(lines: Sequence[Line]) -> list[tuple[str, list[Line], list[Section]]]:
    """Each task's name, its lines and what it has to show of them.

    A task that is not installed, or that cannot make anything of some of its lines, says so in a section without
    tables.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["task"], []).append(line)
    return [(name, own, _sections(name, own)) for name, own in groups.items()]


def _sections(name: str, lines: Sequence[Line]) -> list[Section]:
    try:
        task = registry().task_class(name)
    except InputError as error:
        return [Section(name, (), notes=(f"{len(lines)} results of {name!r} are not shown: {error}",))]
    return sections_of(f"in {name}", task.report, lines)


def sections_of(where: str, make: Callable[[Sequence[Line]], list[Section]], lines: Sequence[Line]) -> list[Section]:
    """What `make` shows of lines; those that it fails on, each by itself, are left out and named.

    A third party's task may do anything, and lines may be of another version of it.

    Args:
        where: What does not show them, for that note.
        make: Makes sections of lines.
        lines: Of any task.
    """
    sections, problem = _made(make, lines)
    if not problem:
        return sections
    failing = [line for line in lines if _made(make, [line])[1]]
    if others := _without(lines, failing):
        sections, still = _made(make, others)
        if still:
            failing = list(lines)
    first = failing[0]
    which = f"the first is {first['selector']} at context {first['context']}, document {first['document']}"
    note = f"{len(failing)} results are not shown {where} ({which}): its report failed with {problem}"
    return [*sections, Section(where.removeprefix("in ").capitalize(), (), notes=(note,))]


def _without(lines: Sequence[Line], others: Sequence[Line]) -> list[Line]:
    left_out = {id(line) for line in others}
    return [line for line in lines if id(line) not in left_out]


def _made(make: Callable[[Sequence[Line]], list[Section]], lines: Sequence[Line]) -> tuple[list[Section], str]:
    """Sections with every cell of their tables as text, or what went wrong."""
    try:
        sections = make(lines)
        for section in sections:
            for table in section.tables:
                for column in table.columns:
                    _ = column.cells
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    return sections, ""


@dataclass
class Row:
    """One selector at one context.

    Attributes:
        selector: The spec.
        config: Its resolved configuration.
        lines: Document to result line.
    """

    selector: str
    config: Mapping[str, Any]
    lines: dict[int, Line] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with it."""
        return self.config.get("name") in REFERENCES

    def values(self, metric: str) -> list[float]:
        """A metric's values, where it applies."""
        values = (line["metrics"].get(metric) for line in self.lines.values())
        return [value for value in values if value is not None]

    def mean(self, metric: str) -> float | None:
        """Mean of a metric over documents, None where it does not apply to this selector."""
        known = self.values(metric)
        return statistics.fmean(known) if known else None

    @property
    def step_bytes(self) -> float | None:
        """Mean of what a decode step reads by design, with the paths and candidates counted; None if none says so."""
        costs = (line["provenance"].get("cost") or {} for line in self.lines.values())
        known = [read for cost in costs if (read := cost.get("step_bytes")) is not None]
        return statistics.fmean(known) if known else None

    @property
    def candidates(self) -> float | None:
        """Mean number of candidates over all reuse steps: documents count by how many they had."""
        known = [
            (metrics["candidates"], metrics["reuse_share"])
            for metrics in (line["metrics"] for line in self.lines.values())
            if metrics.get("candidates") is not None
        ]
        total = sum(share for _, share in known)
        return sum(count * share for count, share in known) / total if total else None


def rows_by_context(lines: Sequence[Line]) -> dict[int, list[Row]]:
    """Rows of each context, ascending; within one, references first, then in the order of the lines."""
    contexts: dict[int, dict[str, Row]] = {}
    for line in lines:
        rows = contexts.setdefault(line["context"], {})
        rows.setdefault(line["selector"], Row(line["selector"], line["config"])).lines[line["document"]] = line
    return {context: ordered(contexts[context].values()) for context in sorted(contexts)}


def ordered(rows: Iterable[Row]) -> list[Row]:
    """References first, `exact_topk` after `full`; the others as they come."""
    return sorted(rows, key=lambda row: (not row.is_reference, row.config.get("name") == "exact_topk"))


def reference_of(row: Row, rows: Iterable[Row], name: str) -> Row | None:
    """The reference `name` that a row is compared with: of the row's own budget, or the only one there is."""
    candidates = [other for other in rows if other.config.get("name") == name]
    same = [other for other in candidates if budget_of(other.config) == budget_of(row.config)]
    fitting = same or candidates
    return fitting[0] if len(fitting) == 1 else None


def budget_of(config: Mapping[str, Any]) -> int | str | None:
    """The budget of a configuration; of one by layers, that of all its layers that have one."""
    known = (one.get("topk") for one in (config.get("layers") or {"": config}).values())
    budgets = {budget for budget in known if isinstance(budget, int | str)}  # another's `topk` may mean anything
    return budgets.pop() if len(budgets) == 1 else None


def rankable(rows: Iterable[Row]) -> bool:
    """Whether documents can tell which of these rows is the best: one alone cannot."""
    return all(len(row.lines) > 1 for row in rows)


def about(lines: Sequence[Line]) -> str:
    """Model, text and budget of results; no text where none of them has one."""
    models = dict.fromkeys(str(line["provenance"].get("model", "?")).rsplit("@", 1)[0] for line in lines)
    known = (line["provenance"].get("parameters", {}).get("text") for line in lines)
    texts = list(dict.fromkeys(os.path.basename(str(text)) for text in known if text))
    budgets = dict.fromkeys(str(budget) for line in lines if (budget := budget_of(line["config"])) is not None)
    named = f"; text {', '.join(texts) if len(texts) <= 3 else f'{len(texts)} files'}" if texts else ""
    return f"Model {', '.join(models)}{named}; topk {' and '.join(budgets) or 'not set'}"


def work_columns(rows: Sequence[Row]) -> list[Column]:
    """What selectors did: the paths that their steps took, and what that cost."""

    def share(heading: str, metric: str) -> Column:
        return Column(heading, [row.mean(metric) for row in rows], 1, percent=True, detail=True)

    return [
        share("exact", "exact_share"),
        share("reuse", "reuse_share"),
        share("fall-\nback", "fallback_share"),
        share("re-\nfresh", "refresh_share"),
        Column("candi-\ndates", [row.candidates for row in rows], 1, detail=True),
        Column("dens-\nity", [row.mean("density") for row in rows], 1, percent=True),
        Column("ms per\nstep", [row.mean("ms_per_step") for row in rows], 1),
    ]


def measured_on(lines: Sequence[Line], device: str = "device") -> tuple[str, bool]:
    """Where results were measured, as `eager on cpu`, and whether in eager PyTorch, whose times are those of no kernel.

    Args:
        lines: The results.
        device: What names the device in their provenance, `device` or `device_name`.
    """
    pairs = ((line["provenance"].get("backend", "?"), line["provenance"].get(device, "?")) for line in lines)
    places = dict.fromkeys(f"{backend} on {name}" for backend, name in pairs)
    return ", ".join(places), any(place.startswith("eager") for place in places)


def work_note(lines: Sequence[Line]) -> str:
    """What `work_columns` mean."""
    places, eager = measured_on(lines)
    return (
        "exact to refresh: % of steps that took this path; candidates: keys scored in a reuse step; density: % of keys "
        f"attended; ms per step: {places}{', no measure of speed' * eager}."
    )


def bootstrap(
    lines: Sequence[Line], statistic: Callable[[Sequence[Line]], float], *, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of a statistic over documents drawn with replacement, the same each time.

    None for fewer than `FEWEST` documents, and where all that are drawn give the same: that is no certainty.
    """
    if len(lines) < FEWEST:
        return None
    generator = random.Random(0)
    drawn = sorted(statistic(generator.choices(lines, k=len(lines))) for _ in range(_RESAMPLES))
    tail = (1 - level) / 2
    low, high = drawn[round(tail * (_RESAMPLES - 1))], drawn[round((1 - tail) * (_RESAMPLES - 1))]
    return (low, high) if low < high else None
