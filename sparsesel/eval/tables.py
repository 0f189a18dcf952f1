"""Tables as data: what tasks report, to be shown on a terminal or on a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from sparsesel.eval.figures import Figure

_WIDTH = 80
_NAME = 14  # columns that a row's name has at least, if it is as long; longer ones are folded where there is no room

Value = float | int | str | None


@dataclass(frozen=True)
class Column:
    """One column of numbers.

    Attributes:
        heading: May break where it has a newline.
        values: One for each row; None where it does not apply.
        digits: After the decimal point.
        percent: Whether the values are fractions, to be shown in %.
        better: Which values are good ones, empty if none is.
        ranked: Whether the best of them may be marked; not where one document alone says which that is.
        detail: Whether a narrow terminal shows it in a second table.
    """

    heading: str
    values: Sequence[Value]
    digits: int = 3
    percent: bool = False
    better: Literal["", "less", "more"] = ""
    ranked: bool = field(default=True, kw_only=True)
    detail: bool = False

    @property
    def cells(self) -> list[str]:
        """The values as text."""
        return [self._cell(value) for value in self.values]

    def _cell(self, value: Value) -> str:
        if value is None:
            return "–"
        if isinstance(value, str):
            return printable(value)
        return f"{100 * value if self.percent else value:.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """One row for each selector.

    Attributes:
        title: What its numbers are.
        rows: Names of the selectors.
        columns: What is known of them.
        references: How many of the first rows are references, which stand apart.
        kind: Heading of the rows' names.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[Column]
    references: int = 0
    kind: str = "selector"


@dataclass(frozen=True)
class Section:
    """What one task has to show.

    Attributes:
        title: The task and its setting.
        tables: In order.
        about: A line before them: what was measured, on what.
        notes: Lines after them: what the columns mean.
        figures: After the tables; a terminal does not show them, `sparsesel report` draws them.
    """

    title: str
    tables: Sequence[Table]
    about: str = ""
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()


def renderables(sections: Sequence[Section], *, width: int = _WIDTH) -> list[RichTable | Text]:
    """Sections for a terminal of `width` columns; tables that are wider come in several parts, none of them cut."""
    parts: list[RichTable | Text] = []
    for section in sections:
        if section.about:
            parts.append(Text(printable(section.about)))
        for table in section.tables:
            if table.title:
                parts.append(Text(printable(table.title), "italic"))
            parts += [_rich(table, columns) for columns in _split(table, width)]
        parts += [Text(printable(note), "dim") for note in section.notes]
    return parts


def _split(table: Table, width: int) -> list[list[Column]]:
    """The columns in as few parts as fit beside the names of rows; details begin a part of their own if not all fit."""
    room = width - min(_NAME, max(map(cell_len, (table.kind, *map(printable, table.rows)))))
    wide = {
        id(column): 1 + max(map(cell_len, (*column.heading.split("\n"), *column.cells))) for column in table.columns
    }
    if sum(wide.values()) <= room:
        return [list(table.columns)]
    parts: list[list[Column]] = []
    for group in ([c for c in table.columns if not c.detail], [c for c in table.columns if c.detail]):
        left = 0
        for column in group:
            if column is group[0] or wide[id(column)] > left:
                parts.append([])
                left = room
            parts[-1].append(column)
            left -= wide[id(column)]
    return parts


def _rich(table: Table, columns: Sequence[Column]) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    rich.add_column(table.kind, overflow="fold")
    for column in columns:
        rich.add_column(column.heading, justify="right", no_wrap=True)
    for index, (name, *cells) in enumerate(zip(table.rows, *(column.cells for column in columns), strict=True)):
        if index and index == table.references:
            rich.add_section()
        rich.add_row(Text(printable(name)), *(Text(cell) for cell in cells))
    return rich


def printable(text: str) -> str:
    """`text` with what could drive a terminal written as its escape: files may have any name."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
