"""The tables at the end of a run, computed from its result lines alone."""

import math
import os
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


def perplexity_report(lines: Sequence[Line], *, width: int = 80) -> list[Table | Text]:
    """What was measured, one table for each context (perplexity, ratios, path shares, cost), and what its columns say.

    Args:
        lines: Of one folder.
        width: Columns of the terminal; on a narrow one each table comes in two parts.
    """
    if not lines:
        return []
    parts: list[Table | Text] = [Text(_about(lines))]
    for context, rows in rows_by_context(lines).items():
        parts += _tables(context, rows, width)
    return [*parts, Text(_columns_explained(lines), "dim")]


_NARROW = 80  # columns that a table of usual numbers and names takes


def _tables(context: int, rows: Sequence[Row], width: int) -> list[Table]:
    exact, full = ([reference_of(row, rows, name) for row in rows] for name in ("exact_topk", "full"))
    documents = max(len(row.lines) for row in rows)
    scored = next(iter(rows[0].lines.values()))["metrics"]["tokens"]
    title = (
        f"Perplexity, context {context}: {documents} document{'s' * (documents > 1)}, "
        f"last {scored} tokens of each; shares in %"
    )
    quality = {
        "PPL": [_number(row.perplexity, 3) for row in rows],
        "÷exact": [_number(row.ratio(reference), 4) for row, reference in zip(rows, exact, strict=True)],
        "÷full": [_number(row.ratio(reference), 4) for row, reference in zip(rows, full, strict=True)],
    }
    if any(len(row.lines) != documents for row in rows):
        quality = {"docs": [str(len(row.lines)) for row in rows], **quality}
    paths = {
        "exact": [_percent(row.mean("exact_share")) for row in rows],
        "reuse": [_percent(row.mean("reuse_share")) for row in rows],
        "fall-\nback": [_percent(row.mean("fallback_share")) for row in rows],
        "re-\nfresh": [_percent(row.mean("refresh_share")) for row in rows],
        "candi-\ndates": [_number(row.candidates, 1) for row in rows],
    }
    work = {
        "dens-\nity": [_percent(row.mean("density")) for row in rows],
        "ms per\nstep": [_number(row.mean("ms_per_step"), 1) for row in rows],
    }
    if width < _NARROW:
        return [_table(rows, quality | work, title), _table(rows, paths, "")]
    return [_table(rows, quality | paths | work, title)]


def _table(rows: Sequence[Row], columns: Mapping[str, Sequence[str]], title: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("selector", overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (row, *cells) in enumerate(zip(rows, *columns.values(), strict=True)):
        if index and _rank(row) != _rank(rows[index - 1]):
            table.add_section()
        table.add_row(Text(_printable(row.selector)), *cells)
    return table


def _about(lines: Sequence[Line]) -> str:
    """Model, text and budget of the results."""
    models = dict.fromkeys(str(line["provenance"].get("model", "?")).rsplit("@", 1)[0] for line in lines)
    texts = dict.fromkeys(
        os.path.basename(str(line["provenance"].get("parameters", {}).get("text", "?"))) for line in lines
    )
    budgets = dict.fromkeys(str(budget) for line in lines if (budget := _budget(line["config"])) is not None)
    named = list(texts) if len(texts) <= 3 else [f"{len(texts)} files"]
    about = f"Model {', '.join(models)}; text {', '.join(named)}; topk {' and '.join(budgets) or 'not set'}"
    return _printable(about)


def _columns_explained(lines: Sequence[Line]) -> str:
    places = dict.fromkeys(
        f"{line['provenance'].get('backend', '?')} on {line['provenance'].get('device', '?')}" for line in lines
    )
    eager = any(place.startswith("eager") for place in places)
    return (
        "exact to refresh: % of steps that took this path; candidates: keys scored in a reuse step; density: % of keys "
        f"attended; ms per step: {', '.join(places)}{', no measure of speed' * eager}."
    )


def _printable(text: str) -> str:
    """`text` with what could drive a terminal written as its escape: files may have any name."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


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
