"""Figures as data: what tasks show beside tables. `sparsesel report` draws them; tasks know nothing of drawing."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: In the legend, mostly a selector.
        x: Places, ascending.
        y: Values, None where there is none.
        low: Lower ends of the values' intervals, empty if there are none.
        high: Upper ends.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Curves:
    """Values against something that varies.

    Attributes:
        title: What is shown; unique within its section.
        x_label: What varies, with its unit.
        y_label: What was measured, with its unit.
        series: The curves.
        log_x: Whether the places are spread by their logarithm.
        log_y: Whether the values are.
        caption: What was measured, on what, and what was modelled.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Parts of wholes, stacked: for example stages of a step.

    Attributes:
        title: What is shown; unique within its section.
        y_label: What was measured, with its unit.
        names: One bar each.
        parts: From the part's name to its value in each bar.
        caption: What was measured, on what, and what was modelled.
    """

    title: str
    y_label: str
    names: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float]]]
    caption: str = ""


@dataclass(frozen=True)
class HeatMap:
    """Values over two things that vary, such as layers and heads.

    Attributes:
        title: What is shown; unique within its section.
        x_label: What the columns are.
        y_label: What the rows are.
        x: Names of the columns.
        y: Names of the rows, the first one on top.
        values: One sequence for each row, None where there is no value.
        low: Value of the scale's lower end; None: the least there is.
        high: Value of its upper end; None: the greatest there is.
        caption: What was measured, on what, and what was modelled.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[str]
    y: Sequence[str]
    values: Sequence[Sequence[float | None]]
    low: float | None = None
    high: float | None = None
    caption: str = ""


@dataclass(frozen=True)
class Marks:
    """Marks at places of a plane: for example the positions that each step attended.

    Attributes:
        title: What is shown; unique within its section.
        x_label: What x is, with its unit.
        y_label: What y is, with its unit.
        groups: Name and (x, y) of each mark of it.
        connect: Draw a frontier through the groups' marks that no other beats in both ways: less x, and less y, or
            more y where `more_is_better`.
        more_is_better: Whether more y is better, for the frontier.
        dots: Whether marks are many and small rather than few, each with its group's name beside it.
        log_x: Whether x is spread by its logarithm.
        caption: What was measured, on what, and what was modelled.
    """

    title: str
    x_label: str
    y_label: str
    groups: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    connect: bool = False
    more_is_better: bool = False
    dots: bool = False
    log_x: bool = False
    caption: str = ""


Figure = Curves | Bars | HeatMap | Marks
