"""Draws `sparsesel.eval.figures` with matplotlib, the same each time, as PNG and as SVG whose text is text.

The first colours are Okabe and Ito's, which colour-blind people tell apart; markers and dashes tell the same, so that
a figure can be read in print without colours.
"""

import contextlib
import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsesel.errors import InputError
from sparsesel.eval.figures import Bars, Curves, Figure, HeatMap, Marks
from sparsesel.eval.tables import printable

INK = "#17181c"
"""Text, axes and the first series; a page puts its own colour in its place, as for the next three."""
PAPER = "#ffffff"
GRID = "#d9d9dd"
GAP = "#dcdce0"

_COLOURS = (INK, "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a4fa3", "#8c5a2b", "#8f9a00")
_PARTS = (*_COLOURS[1:8], "#8a8f99")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
_DASHES = ("-", "--", "-.", ":")
_HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")
_ON_DARK, _ON_LIGHT = "#fdfdfd", "#101010"  # numbers in the cells of a heat map, whatever the page's colours

_SIZE = (6.2, 3.9)  # inches
_MOST_NUMBERS = 160  # cells of a heat map that has numbers in them
_MOST_VECTORS = 1500  # marks or cells that are drawn one by one; more become an image within the axes
_MOST_TICKS = 16
_FEW = 7  # places on a logarithmic axis that are named themselves
_MODELLED = " (modelled)"  # at the end of a series' name
_LONGEST = 38  # characters of a name in a legend

_STYLE: Mapping[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.edgecolor": "none",
    "legend.facecolor": "none",
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 200,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsesel",
    "text.color": INK,
    "text.parse_math": False,  # a name may have dollars in it
    "text.usetex": False,
    "xtick.color": INK,
    "xtick.labelcolor": INK,
    "ytick.color": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Drawing:
    """A figure as files hold it."""

    png: bytes
    svg: str


def check_matplotlib() -> None:
    """Refuse to go on without it.

    Raises:
        InputError: It is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "report", expected="the package matplotlib", got="none", remedy='Run `pip install "sparsesel[report]"`.'
        ) from None


def draw(figure: Figure, selectors: Sequence[str] = ()) -> Drawing:
    """Draw a figure.

    Args:
        figure: What to show.
        selectors: Names that look the same in every figure of a report.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    style: Any = dict(_STYLE)
    with matplotlib.rc_context(style), _quiet():
        canvas = Canvas(figsize=_SIZE, layout="constrained")
        match figure:
            case Curves():
                _curves(canvas, figure, selectors)
            case Bars():
                _bars(canvas, figure)
            case HeatMap():
                _heat_map(canvas, figure)
            case Marks():
                _marks(canvas, figure, selectors)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once for both
        svg, png = io.BytesIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        canvas.savefig(png, format="png", metadata={"Software": None})
    return Drawing(png.getvalue(), svg.getvalue().decode())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Names may have letters that the font lacks, which another then shows in the SVG, and any length."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+", category=UserWarning)
        # Of names that leave no room for the axes; what there is is drawn all the same.
        warnings.filterwarnings("ignore", message="constrained_layout not applied", category=UserWarning)
        yield


def _curves(canvas: Any, figure: Curves, selectors: Sequence[str]) -> None:
    axes = _axes(canvas, figure.x_label, figure.y_label)
    looks = _looks([series.name for series in figure.series], selectors)
    for series, look in zip(figure.series, looks, strict=True):
        x, y = _numbers(series.x), _numbers(series.y)
        few = len(x) <= 40
        axes.plot(
            x,
            y,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker if few else "",
            markeredgecolor=PAPER,
            markeredgewidth=0.6,
            label=_name(series.name),
            zorder=3,
        )
        if series.low and series.high:
            axes.fill_between(
                x, _numbers(series.low), _numbers(series.high), color=look.colour, alpha=0.14, linewidth=0
            )
    every = [value for series in figure.series for value in (*series.y, *series.low, *series.high)]
    _scale(axes, "x", figure.log_x, [place for series in figure.series for place in series.x])
    _scale(axes, "y", figure.log_y, every)
    _legend(canvas, axes, len(figure.series))


def _bars(canvas: Any, figure: Bars) -> None:
    """Bars lie, so that their names can be read; the first one is on top."""
    canvas.set_size_inches(_SIZE[0], min(9.0, max(2.4, 1.5 + 0.36 * len(figure.names))))
    axes = _axes(canvas, figure.y_label, "")
    places = range(len(figure.names))
    ends = [0.0] * len(figure.names)
    for index, (name, values) in enumerate(figure.parts):
        widths = [0.0 if math.isnan(value) else value for value in _numbers(values)]
        axes.barh(
            places,
            widths,
            left=ends,
            height=0.68,
            color=_PARTS[index % len(_PARTS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor=PAPER,
            linewidth=0.5,
            label=_name(name),
            zorder=3,
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in zip(places, ends, strict=True):
        axes.annotate(
            f"{end:.3g}", (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    axes.set_yticks(places, [_name(name) for name in figure.names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    _legend(canvas, axes, len(figure.parts), even_one=True)


def _heat_map(canvas: Any, figure: HeatMap) -> None:
    rows, columns = len(figure.y), len(figure.x)
    numbers = rows * columns <= _MOST_NUMBERS and columns <= _MOST_TICKS
    width = min(7.5, max(3.4, 1.9 + (0.46 if numbers else 0.3) * columns))
    canvas.set_size_inches(width, min(9.0, max(2.3, 1.2 + 0.26 * rows)))
    axes = _axes(canvas, figure.x_label, figure.y_label)
    axes.grid(visible=False)
    axes.set_facecolor(GAP)
    values = [_numbers(row) for row in figure.values]
    known = [value for row in values for value in row if not math.isnan(value)]
    low = min(known, default=0.0) if figure.low is None else figure.low
    high = max(known, default=1.0) if figure.high is None else figure.high
    if not low < high:
        low, high = low - 0.5, low + 0.5
    mesh = axes.pcolormesh(
        range(columns + 1),
        range(rows + 1),
        values,
        cmap="cividis",
        vmin=low,
        vmax=high,
        edgecolors="none" if rows * columns > _MOST_NUMBERS else PAPER,
        linewidth=0 if rows * columns > _MOST_NUMBERS else 0.5,
        rasterized=rows * columns > _MOST_VECTORS,
    )
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    for axis, names in ((axes.xaxis, figure.x), (axes.yaxis, figure.y)):
        every = -(-len(names) // _MOST_TICKS)
        chosen = list(range(0, len(names), max(1, every)))
        axis.set_ticks([place + 0.5 for place in chosen], [_name(names[place], 24) for place in chosen])
    axes.tick_params(length=0)
    if columns > 1 and max(len(name) for name in figure.x) * columns > 60:
        axes.tick_params(axis="x", labelrotation=40)
    bar = canvas.colorbar(mesh, ax=axes, pad=0.02, aspect=24)
    bar.outline.set_visible(False)
    if numbers:
        digits = 0 if high >= 100 else 1 if high >= 10 else 2
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                text = "–" if math.isnan(value) else f"{value:.{digits}f}"
                light = math.isnan(value) or (value - low) / (high - low) > 0.55
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=_ON_LIGHT if light else _ON_DARK,
                )


def _marks(canvas: Any, figure: Marks, selectors: Sequence[str]) -> None:
    axes = _axes(canvas, figure.x_label, figure.y_label)
    names = [name for name, _ in figure.groups]
    total = sum(len(marks) for _, marks in figure.groups)
    for (name, marks), look in zip(figure.groups, _looks(names, selectors), strict=True):
        places = _finite(marks)
        axes.scatter(
            [x for x, _ in places],
            [y for _, y in places],
            s=(2.0 if total > _MOST_VECTORS else 7.0) if figure.dots else 42,
            c=look.colour,
            marker="s" if figure.dots else look.marker,
            edgecolors="none" if figure.dots else PAPER,
            linewidths=0 if figure.dots else 0.6,
            label=_name(name),
            rasterized=total > _MOST_VECTORS,
            zorder=4,
        )
    every = _finite([mark for _, marks in figure.groups for mark in marks])
    _scale(axes, "x", figure.log_x, [x for x, _ in every], few=False)
    best = frontier(every, more_is_better=figure.more_is_better) if figure.connect else []
    if best:
        axes.plot([x for x, _ in best], [y for _, y in best], color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=2)
    if figure.dots:
        axes.margins(0.01)
        _legend(canvas, axes, len(names), larger=2 if total <= _MOST_VECTORS else 5)
    else:
        axes.margins(0.12)
        _label_marks(canvas, axes, figure, every, best)


def frontier(marks: Sequence[tuple[float, float]], *, more_is_better: bool) -> list[tuple[float, float]]:
    """The marks that no other beats in both ways, by x: less x, and less y, or more y where that is better."""
    sign = -1 if more_is_better else 1
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(marks), key=lambda mark: (mark[0], sign * mark[1])):
        if not best or sign * y < sign * best[-1][1]:
            best.append((x, y))
    return best


def _label_marks(
    canvas: Any, axes: Any, figure: Marks, every: Sequence[tuple[float, float]], line: Sequence[tuple[float, float]]
) -> None:
    """Put each group's name beside its marks, where it covers no mark, line or other name if that can be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas.draw_without_rendering()  # only then is the place of the axes known
    canvas.set_layout_engine("none")
    renderer = FigureCanvasAgg(canvas).get_renderer()
    inside = axes.get_window_extent(renderer)
    points = axes.transData.transform(every) if every else []
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]
    corners = axes.transData.transform(line) if line else []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        pieces = max(1, int(math.hypot(x1 - x0, y1 - y0) / 4))
        for piece in range(pieces):
            x, y = x0 + (x1 - x0) * piece / pieces, y0 + (y1 - y0) * piece / pieces
            taken.append(Bbox.from_bounds(x - 1, y - 1, 2, 2))
    for name, marks in figure.groups:
        for mark in _finite(marks):
            options: list[tuple[float, int, Any]] = []
            for number, (dx, dy, ha, va) in enumerate(_SIDES):
                text = axes.annotate(
                    _name(name),
                    mark,
                    xytext=(dx, dy),
                    textcoords="offset points",
                    ha=ha,
                    va=va,
                    fontsize=8,
                    color=INK,
                    zorder=5,
                )
                box = text.get_window_extent(renderer)
                covered = sum(_shared(box, other) for other in taken)
                outside = box.width * box.height - _shared(box, inside)
                options.append((covered + 2 * outside, number, text))
            best = min(options, key=lambda option: option[:2])
            for option in options:
                if option is not best:
                    option[2].remove()
            taken.append(best[2].get_window_extent(renderer))


_SIDES = [
    (dx * far, dy * far, {1: "left", 0: "center", -1: "right"}[dx], {1: "bottom", 0: "center", -1: "top"}[dy])
    for far in (6, 14)
    for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
]


def _shared(one: Any, other: Any) -> float:
    """Area that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0.0, width) * max(0.0, height)


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    dashes: str


def _looks(names: Sequence[str], selectors: Sequence[str]) -> list[_Look]:
    """Selectors look the same everywhere, dashed where they are modelled.

    In a figure of anything else, series go by their order.
    """
    whose = [name.removesuffix(_MODELLED) for name in names]
    known = set(whose) <= set(selectors)
    looks: list[_Look] = []
    for order, (name, one) in enumerate(zip(names, whose, strict=True)):
        place = selectors.index(one) if known else order
        dashes = place // len(_COLOURS) if name == one or not known else 1
        looks.append(
            _Look(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)], _DASHES[dashes % len(_DASHES)])
        )
    return looks


def _axes(canvas: Any, x_label: str, y_label: str) -> Any:
    axes = canvas.add_subplot()
    width, height = canvas.get_size_inches()
    axes.set_xlabel(_wrapped(x_label, round(11 * width)))
    axes.set_ylabel(_wrapped(y_label, round(9 * height)))
    return axes


def _wrapped(label: str, width: int) -> str:
    """In two lines at most."""
    return "\n".join(textwrap.wrap(printable(label), width, max_lines=2, placeholder=" …"))


def _scale(axes: Any, axis: str, log: bool, values: Sequence[float | None], *, few: bool = True) -> None:
    """Spread values by their logarithm; from zero on, where there is a zero, in the way that allows for it."""
    known = [value for value in _numbers(values) if not math.isnan(value)]
    if not log or not known:
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    least = min((value for value in known if value > 0), default=1.0)
    scale: dict[str, Any] = {"value": "log"} if min(known) > 0 else {"value": "symlog", "linthresh": least}
    getattr(axes, f"set_{axis}scale")(**scale)
    chosen = getattr(axes, f"{axis}axis")
    if axis == "x" and few and len(set(known)) <= _FEW:
        chosen.set_major_locator(FixedLocator(sorted(set(known))))
        chosen.set_minor_locator(FixedLocator([]))
    elif min(known) > 0 and max(known) < 30 * least:  # powers of ten alone would leave an axis with one number
        chosen.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if max(known) > 4 * least else MaxNLocator(6))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    chosen.set_minor_formatter(NullFormatter())


def _legend(canvas: Any, axes: Any, entries: int, *, even_one: bool = False, larger: float = 1) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if entries > 1 or (even_one and entries):
        longest = max(map(len, labels))
        columns = min(len(labels), 4 if longest < 14 else 3 if longest < 22 else 2)
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6, markerscale=larger)


def _name(name: str, longest: int = _LONGEST) -> str:
    shown = printable(name)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _numbers(values: Sequence[float | None]) -> list[float]:
    """As floats; NaN where there is no finite value."""
    return [math.nan if value is None or not math.isfinite(value) else float(value) for value in values]


def _finite(marks: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in marks if math.isfinite(x) and math.isfinite(y)]
