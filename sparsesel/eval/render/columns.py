"""What Markdown and the page show of tables alike: headings, and marks of the best and second-best in a column."""

from typing import Literal

from sparsesel.eval.tables import Column, Table

Mark = Literal["", "best", "second"]


def marks(table: Table, column: Column) -> list[Mark]:
    """A mark for each row. References take no part; cells that show the same number are marked the same.

    Where fewer than two different numbers are shown, none is better than another, and none is marked; nor
    where one document alone says which is.
    """
    shown = {
        cell: value
        for cell, value in list(zip(column.cells, column.values, strict=True))[table.references :]
        if isinstance(value, int | float) and value == value
    }
    if not column.better or not column.ranked or len(shown) < 2:
        return [""] * len(table.rows)
    best, second = sorted(shown, key=lambda cell: shown[cell], reverse=column.better == "more")[:2]
    ranked: dict[str, Mark] = {best: "best", second: "second"}
    return ["" if row < table.references else ranked.get(cell, "") for row, cell in enumerate(column.cells)]


def heading(column: Column, newline: str = " ") -> str:
    """A column's heading with its unit, its lines joined by `newline`."""
    text = newline.join(column.heading.replace("-\n", "").split("\n"))
    return f"{text} (%)" if column.percent and "%" not in text else text
