"""A report as one page that opens from disk: no network, nothing beside it, nothing in it that could run but its own.

Names come from anywhere, so everything is escaped, and the page's policy allows only the style sheet and the script
whose hashes it names.
"""

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sparsesel.eval.figures import Figure
from sparsesel.eval.render.columns import heading, marks
from sparsesel.eval.render.content import Content, Entry, Part, Shown, Source, spread
from sparsesel.eval.render.draw import Drawing
from sparsesel.eval.render.inline import Inliner
from sparsesel.eval.render.markdown import MARKED
from sparsesel.eval.results import RESULTS
from sparsesel.eval.tables import Column, Section, Table, Value, printable

_LONGEST = 240  # characters of a metric that is no number
_MANY = 6  # numbers in a list, beyond which its size stands for it


def page(content: Content, drawings: Mapping[str, Drawing]) -> str:
    """The page.

    Args:
        content: What to show.
        drawings: Of each of its figures, by name.
    """
    inliner = Inliner()
    titles: list[tuple[str, str]] = []
    body: list[str] = []
    for part in content.parts:
        for shown in part.shown:
            anchor = f"section-{len(titles) + 1}"
            titles.append((anchor, shown.section.title))
            last = shown is part.shown[-1]
            body.append(_section(anchor, shown, drawings, inliner) + (_provenance(part) if last else "") + "</section>")
    titles.append(("lines", "Every result"))
    body.append(_lines(content))
    style = _own("page.css") + inliner.rules
    script = _own("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    items = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in titles)
    folders = ", ".join(f"<code>{escape(str(folder))}</code>" for folder in content.folders)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(_title(content))}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{escape(_title(content))}</h1>
<p class="soft">{len(content.entries)} results in {folders}. A click on a heading sorts.</p>
{_warning("Not measured alike", content.differences)}
{_warning("Left out", content.problems)}
</header>
<nav aria-label="Sections"><ul>{items}</ul></nav>
<main>
{"".join(body)}
</main>
<footer class="soft"><p>Made by sparsesel from {RESULTS} alone; nothing was measured or computed anew.</p></footer>
<script>{script}</script>
</body>
</html>
"""


def escape(text: str) -> str:
    """Text that is shown as it is, in content and in attributes."""
    return html.escape(printable(text), quote=True)


def _own(name: str) -> str:
    return resources.files("sparsesel.eval.render").joinpath(name).read_text(encoding="utf-8")


def _title(content: Content) -> str:
    models = spread(content.entries, lambda line: str(line["provenance"].get("model", "")).rpartition("@")[0])
    return f"Selectors compared on {', '.join(models)}" if models else "Selectors compared"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _warning(title: str, notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="warning" role="note"><h2>{title}</h2><ul>{items}</ul></div>'


def _section(anchor: str, shown: Shown, drawings: Mapping[str, Drawing], inliner: Inliner) -> str:
    section = shown.section
    parts = [f'<section id="{anchor}"><h2>{escape(section.title)}</h2>']
    if section.about:
        parts.append(f'<p class="about">{escape(section.about)}</p>')
    parts += [_table(table) for table in section.tables]
    if _has_marks(section):
        parts.append(f'<p class="soft">{MARKED}</p>')
    parts += [f'<p class="note soft">{escape(note)}</p>' for note in section.notes]
    figures = [_figure(name, figure, drawings[name], inliner) for name, figure in shown.figures]
    # Narrow ones, such as heat maps of a few columns, stand closer together.
    for kind, group in itertools.groupby(figures, lambda figure: "wide" if 'class="wide"' in figure else "narrow"):
        parts.append(f'<div class="figures {kind}">{"".join(group)}</div>')
    return "\n".join(parts)


def _figure(name: str, figure: Figure, drawing: Drawing, inliner: Inliner) -> str:
    title, caption = escape(figure.title), f" {escape(figure.caption)}" if figure.caption else ""
    links = f'<a href="figures/{name}.svg">SVG</a> <a href="figures/{name}.png">PNG</a>'
    return (
        f'<figure><div class="plot" tabindex="0">{inliner.inline(drawing.svg, printable(figure.title))}</div>'
        f"<figcaption><b>{title}.</b>{caption} {links}</figcaption></figure>"
    )


def _has_marks(section: Section) -> bool:
    return any(mark for table in section.tables for column in table.columns for mark in marks(table, column))


def _table(table: Table) -> str:
    head = _heading(table.kind, "ascending") + "".join(
        _heading(heading(column, "\n"), "descending" if column.better == "more" else "ascending")
        for column in table.columns
    )
    columns = [_cells(table, column) for column in table.columns]
    rows = [
        f'<tr><th scope="row">{_breakable(name)}</th>{"".join(cells)}</tr>'
        for name, *cells in zip(table.rows, *columns, strict=True)
    ]
    apart, others = rows[: table.references], rows[table.references :]
    bodies = (f'<tbody class="references">{"".join(apart)}</tbody>' if apart else "") + (
        f"<tbody>{''.join(others)}</tbody>" if others else ""
    )
    return _framed(table.title, head, bodies)


def _framed(title: str, head: str, bodies: str) -> str:
    """A table in a frame of its own, which scrolls where the table is wider than the page."""
    return (
        f'<h3>{escape(title)}</h3><div class="table" role="region" aria-label="{escape(title)}" tabindex="0">'
        f'<table class="sortable" aria-label="{escape(title)}"><thead><tr>{head}</tr></thead>{bodies}</table></div>'
    )


def _lines_of(text: str) -> str:
    return "<br>".join(escape(line) for line in text.split("\n"))


def _breakable(name: str) -> str:
    """A name that may continue on another line where a field begins."""
    return escape(name).replace(",", ",<wbr>")


def _heading(text: str, first: str) -> str:
    return (
        f'<th scope="col" aria-sort="none" data-first="{first}"><button type="button">{_lines_of(text)}</button></th>'
    )


_WRAPS = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}


def _cells(table: Table, column: Column) -> list[str]:
    return [
        f"<td{_value(value)}>{_WRAPS[mark].format(escape(cell))}</td>"
        for value, cell, mark in zip(column.values, column.cells, marks(table, column), strict=True)
    ]


def _value(value: Value) -> str:
    """What a cell is sorted by, where that is not what it shows: a number is not rounded."""
    if isinstance(value, int | float):
        return f' data-value="{value if math.isfinite(value) else ""}"'
    return ""


def _provenance(part: Part) -> str:
    if not part.sources:
        return ""
    inner = "".join(_source(source) for source in part.sources)
    letters = ", ".join(source.letter for source in part.sources)
    return f"<details><summary>Where this comes from: {_count(part.entries)}, {letters}</summary>{inner}</details>"


def _source(source: Source) -> str:
    facts = list(source.facts)
    for name, values in (
        ("texts", spread(source.entries, lambda line: line["provenance"].get("parameters", {}).get("text"))),
        (
            "characters skipped",
            spread(source.entries, lambda line: line["provenance"].get("parameters", {}).get("skip_chars") or None),
        ),
        ("selectors", spread(source.entries, lambda line: line["selector"])),
    ):
        if values:
            facts.append((name, ", ".join(values)))
    times = sorted(
        str(entry.line["provenance"]["time"]) for entry in source.entries if "time" in entry.line["provenance"]
    )
    if times:
        facts.append(("measured", times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"))
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<h3>{source.letter}: {_count(source.entries)}</h3><dl>{pairs}</dl>"


def _count(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} line{'s' * (len(entries) != 1)}"


def _lines(content: Content) -> str:
    """Every line of every task, so that each number above can be followed to what was measured."""
    several = len(content.folders) > 1
    parts = [
        '<section id="lines"><h2>Every result</h2><p class="soft">A line is a line of '
        f"<code>{RESULTS}</code>, by its number there; its source is described in the section of its task.</p>"
    ]
    for part in content.parts:
        if part.task:
            summary = f"{escape(part.task)}: {_count(part.entries)}"
            parts.append(f"<details><summary>{summary}</summary>{_line_table(part, several)}</details>")
    return "".join(parts) + "</section>"


def _line_table(part: Part, several: bool) -> str:
    letters = {id(entry): source.letter for source in part.sources for entry in source.entries}
    metrics = list(dict.fromkeys(name for entry in part.entries for name in entry.line["metrics"]))
    fixed = ["line", *(["folder"] if several else []), "selector", "context", "document"]
    columns = [*fixed, *metrics, "parameters", "prompt", "source"]
    head = "".join(_heading(name, "ascending") for name in columns)
    rows = []
    for entry in part.entries:
        line, provenance = entry.line, entry.line["provenance"]
        cells = [f"<td>{entry.number}</td>", *([_text_cell(entry.folder)] if several else [])]
        cells.append(_text_cell(line["selector"]))
        cells += [f"<td>{line['context']}</td>", f"<td>{line['document']}</td>"]
        cells += [_metric(line["metrics"].get(name), entry) for name in metrics]
        cells.append(_text_cell(_short(provenance.get("parameters", {}))))
        cells.append(f"<td><code>{escape(str(provenance.get('prompt_sha256') or '–')[:12])}</code></td>")
        cells.append(f"<td>{letters[id(entry)]}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _framed(f"Lines of {part.task}", head, f"<tbody>{''.join(rows)}</tbody>")


def _text_cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>'


def _metric(value: Any, entry: Entry) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"<td{_value(value)}>{value:.6g}</td>" if isinstance(value, float) else f"<td>{value}</td>"
    if isinstance(value, str):
        return _text_cell(value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…")
    return _text_cell(_short(value))


def _short(value: Any) -> str:
    """A list or table as JSON; of a long list its size, since the line has it."""
    return _unquoted(json.dumps(_shrunk(value), ensure_ascii=False))


def _shrunk(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shrunk(one) for name, one in value.items()}
    if isinstance(value, list):
        sizes = []
        inner: Any = value
        while isinstance(inner, list) and inner:
            sizes.append(str(len(inner)))
            inner = inner[0]
        return f"{' × '.join(sizes)} values" if len(value) > _MANY or len(sizes) > 1 else value
    return value


_QUOTED = re.compile(r'"([\w ×.-]+)"')


def _unquoted(text: str) -> str:
    shown = _QUOTED.sub(r"\1", text.removeprefix("{").removesuffix("}"))
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
