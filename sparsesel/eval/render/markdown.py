"""A report as Markdown."""

import html
import re
from collections.abc import Sequence

from sparsesel.eval.render.columns import heading, marks
from sparsesel.eval.render.content import Content, Part, spread
from sparsesel.eval.results import RESULTS
from sparsesel.eval.tables import Table, printable

# Anywhere; an underscore that is not within a word; what begins an item of a list; a line that underlines or divides.
_SPECIAL = re.compile(r"[\\`*\[\]{}|#~$!]|(?<![^\W_])_|_(?![^\W_])|^[-+](?=\s|$)|^[-=](?=[-=\s]*$)")
_NUMBERED = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_WRAPS = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}

MARKED = "Bold: the best of its column; underlined: the second-best. Reference rows, above the line, take no part."


def markdown(content: Content) -> str:
    """The report; figures are those of the folder `figures` beside it."""
    parts = ["# Report", f"Results of {_listed([escape(str(folder)) for folder in content.folders])}."]
    for title, notes in (("Not measured alike", content.differences), ("Left out", content.problems)):
        if notes:
            parts.append("\n".join([f"> **{title}**", ">", *(f"> - {escape(note)}" for note in notes)]))
    parts += [part for one in content.parts for part in _part(one)]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that is shown as it is: no markup, no HTML, one line."""
    plain = printable(" ".join(text.split()))
    return _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", html.escape(plain, quote=False)))


def _part(part: Part) -> list[str]:
    blocks: list[str] = []
    for shown in part.shown:
        section = shown.section
        blocks.append(f"## {escape(section.title)}")
        if section.about:
            blocks.append(escape(section.about) + ".")
        for table in section.tables:
            blocks += [f"### {escape(table.title)}", _table(table)]
            if any(mark for column in table.columns for mark in marks(table, column)):
                blocks.append(f"*{MARKED}*")
        blocks += [escape(note) for note in section.notes]
        for name, figure in shown.figures:
            blocks.append(f"![{escape(figure.title)}](figures/{name}.svg)")
            blocks.append(f"*{escape(f'{figure.title}. {figure.caption}'.strip())}*")
    blocks.append(_sources(part))
    return blocks


def _table(table: Table) -> str:
    columns = [
        [_WRAPS[mark].format(escape(cell)) for cell, mark in zip(column.cells, marks(table, column), strict=True)]
        for column in table.columns
    ]
    rows = [[escape(name), *cells] for name, *cells in zip(table.rows, *columns, strict=True)]
    # A row of dashes sets the references apart: Markdown's tables have one rule.
    if 0 < table.references < len(rows):
        rows.insert(table.references, ["—"] * (len(table.columns) + 1))
    head = [escape(table.kind), *(escape(heading(column)) for column in table.columns)]
    rule = [":--", *("--:" for _ in table.columns)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def _sources(part: Part) -> str:
    lines = [f"Measured ({len(part.entries)} lines of `{RESULTS}`):", ""]
    for source in part.sources:
        facts = [f"{name} {escape(value)}" for name, value in source.facts]
        texts = spread(source.entries, lambda line: line["provenance"].get("parameters", {}).get("text"))
        if texts:
            facts.append(f"text {escape(_listed(texts))}")
        lines.append(f"- {source.letter}: {'; '.join(facts)}.")
    return "\n".join(lines)


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
