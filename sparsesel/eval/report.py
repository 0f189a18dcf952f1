"""The table at the end of a run, computed from its result lines alone."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

REFERENCES = ("full", "exact_topk")
"""Selectors that others are compared with; their rows stand apart."""

Line = Mapping[str, Any]

# Narrow, so that a usual table fits into 80 columns.
_HEADINGS = [
    "PPL",
    "÷exact",
    "÷full",
    "exact",
    "reuse",
    "fall-\nback",
    "re-\nfresh",
    "candi-\ndates",
    "dens-\nity",
    "ms per\nstep",
]


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
    def perplexity(self) -> float:
        """`exp(total NLL / tokens)` over its documents."""
        return _perplexity(self.lines.values())

    def ratio(self, reference: "Row | None") -> float | None:
        """Perplexity over a reference's, on the documents that both have; None without any."""
        common = self.lines.keys() & reference.lines.keys() if reference is not None else ()
        if reference is None or not common:
            return None
        return _perplexity(self.lines[d] for d in common) / _perplexity(reference.lines[d] for d in common)

    def mean(self, metric: str) -> float | None:
        """Mean of a metric over documents, None where it does not apply to this selector."""
        values = [line["metrics"].get(metric) for line in self.lines.values()]
        known = [value for value in values if value is not None]
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

    def order(row: Row) -> tuple[int, bool]:
        return _rank(row), row.config.get("name") == "exact_topk"

    return {context: sorted(contexts[context].values(), key=order) for context in sorted(contexts)}


def reference_of(row: Row, rows: Iterable[Row], name: str) -> Row | None:
    """The reference `name` that a row is compared with: of the row's own budget, or the only one there is."""
    candidates = [other for other in rows if other.config.get("name") == name]
    same = [other for other in candidates if _budget(other.config) == _budget(row.config)]
    fitting = same or candidates
    return fitting[0] if len(fitting) == 1 else None


def perplexity_tables(lines: Sequence[Line]) -> list[Table]:
    """One table for each context: perplexity, ratios, path shares, cost."""
    return [_table(context, rows) for context, rows in rows_by_context(lines).items()]


def _table(context: int, rows: Sequence[Row]) -> Table:
    documents = max(len(row.lines) for row in rows)
    scored = next(iter(rows[0].lines.values()))["metrics"]["tokens"]
    table = Table(
        title=f"Perplexity, context {context}: {documents} document{'s' * (documents > 1)}, "
        f"last {scored} tokens of each; shares in %",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("selector", overflow="fold")
    uneven = any(len(row.lines) != documents for row in rows)
    for heading in (["docs"] if uneven else []) + _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index and _rank(row) != _rank(rows[index - 1]):
            table.add_section()
        cells = [
            _number(row.perplexity, 3),
            _number(row.ratio(reference_of(row, rows, "exact_topk")), 4),
            _number(row.ratio(reference_of(row, rows, "full")), 4),
            *(_percent(row.mean(f"{path}_share")) for path in ("exact", "reuse", "fallback", "refresh")),
            _number(row.candidates, 1),
            _percent(row.mean("density")),
            _number(row.mean("ms_per_step"), 1),
        ]
        table.add_row(Text(row.selector), *([str(len(row.lines))] if uneven else []), *cells)
    return table


def _rank(row: Row) -> int:
    return 0 if row.config.get("name") in REFERENCES else 1


def _budget(config: Mapping[str, Any]) -> int | str | None:
    """The budget of a configuration; of one by layers, that of all its layers that have one."""
    budgets = {one.get("topk") for one in config.get("layers", {"": config}).values()} - {None}
    return budgets.pop() if len(budgets) == 1 else None


def _perplexity(lines: Iterable[Line]) -> float:
    metrics = [line["metrics"] for line in lines]
    return math.exp(math.fsum(m["nll"] for m in metrics) / sum(m["tokens"] for m in metrics))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
