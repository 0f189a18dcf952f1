"""Figures are drawn the same each time, whatever is in them, and become part of a page without leaving a trace."""

import io
import math
import re
import xml.etree.ElementTree as ET

import pytest

from sparsesel.eval.figures import Bars, Curves, HeatMap, Marks, Series
from sparsesel.eval.render.inline import Inliner

pytest.importorskip("matplotlib")

from sparsesel.eval.render.draw import draw

HOSTILE = '<script>alert("1")</script> $x^2$ & \x1b[2J'
SVG = "{http://www.w3.org/2000/svg}"
CURVES = Curves(
    "Curves",
    "step",
    HOSTILE,
    [
        Series(HOSTILE, [0, 1, 2], [1.0, None, math.inf]),
        Series("b", [0, 1, 2], [3, 2, 1], low=[2, 1, 0], high=[4, 3, 2]),
    ],
)
FIGURES = {
    "curves": CURVES,
    "one curve": Curves("c", "x", "y", [Series("a", [1], [1])]),
    "no curve": Curves("c", "x", "y", []),
    "curves by logarithm": Curves("c", "x", "y", [Series("a", [0, 1, 9], [1, 10, 0])], log_x=True, log_y=True),
    "curves of nothing": Curves("c", "x", "y", [Series("a", [1, 2], [None, None])], log_y=True),
    "bars": Bars("Bars", "ms", ["full", HOSTILE], [("QK", [1, 2]), (HOSTILE, [0.5, math.nan])]),
    "no bars": Bars("b", "ms", [], []),
    "heat map": HeatMap("h", "head", "layer", ["0", HOSTILE], ["0", "1"], [[0.1, None], [1, math.nan]]),
    "heat map of one value": HeatMap("h", "head", "layer", ["0"], ["0"], [[0.5]]),
    "heat map of nothing": HeatMap("h", "head", "layer", ["0"], ["0"], [[None]], low=0, high=1),
    "large heat map": HeatMap("h", "x", "y", [*map(str, range(60))], [*map(str, range(60))], [[0.0] * 60] * 60),
    "marks": Marks("m", "x", "y", [(HOSTILE, [(1, 2)]), ("b", [(3, 1), (4, 4)])], connect=True, log_x=True),
    "no marks": Marks("m", "x", "y", [("a", [])], connect=True),
    "dots": Marks("d", "x", "y", [("a", [(i, i % 7) for i in range(2000)])], dots=True),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_the_same_each_time(name):
    drawing = draw(FIGURES[name])
    assert drawing == draw(FIGURES[name])
    assert drawing.png.startswith(b"\x89PNG")
    root = ET.fromstring(drawing.svg)
    assert root.tag == f"{SVG}svg"
    assert not list(root.iter(f"{SVG}script"))


def texts(svg):
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_text_is_text_and_shown_as_it_is():
    shown = texts(draw(CURVES).svg)
    assert any(text.startswith('<script>alert("1")') for text in shown)  # the legend's, which is cut
    assert '<script>alert("1")</script> $x^2$ & \\x1b[2J' in " ".join(shown)  # the label's, which is wrapped
    assert "b" in shown


def test_a_few_cells_have_their_numbers_in_them():
    shown = texts(draw(FIGURES["heat map"]).svg)
    assert shown.count("–") == 2
    assert "0.10" in shown
    assert "1.00" in shown


def test_each_mark_has_its_name_beside_it():
    figure = Marks("m", "x", "y", [(name, [(i, i % 2)]) for i, name in enumerate("abcdefgh")])
    assert set("abcdefgh") <= set(texts(draw(figure).svg))


def test_selectors_look_the_same_in_every_figure():
    def colour(names, name):
        figure = Curves("c", "x", "y", [Series(one, [0, 1], [0, 1]) for one in names])
        canvas = draw(figure, ["full", "retopk", "quest"]).svg
        lines = [e for e in ET.fromstring(canvas).iter(f"{SVG}path") if "stroke-width: 1.6" in e.get("style", "")]
        found = [re.search(r"stroke: (#\w+)", line.get("style", ""))[1] for line in lines]
        return found[names.index(name)]

    assert colour(["full", "retopk", "quest"], "quest") == colour(["quest", "full"], "quest")
    assert colour(["full", "retopk"], "full") != colour(["full", "retopk"], "retopk")


def test_logarithmic_axes_have_plain_numbers():
    wide = Curves("c", "context", "ms", [Series("a", [1024, 131072], [0.1, 10000.0])], log_x=True, log_y=True)
    shown = texts(draw(wide).svg)
    assert {"1024", "131072"} <= set(shown)
    assert {"1", "100", "10000"} <= set(shown)
    assert not [text for text in shown if "$" in text]
    narrow = Marks("m", "MB", "y", [(str(x), [(x, 1)]) for x in (30, 41, 52, 63)], log_x=True)
    assert {"40", "50", "60"} & set(texts(draw(narrow).svg))


def test_what_is_modelled_is_dashed_in_its_selectors_colour():
    names = ["full", "quest", "quest (modelled)"]
    svg = draw(Curves("c", "x", "y", [Series(name, [0, 1], [0, 1]) for name in names]), ["full", "quest"]).svg
    styles = [
        e.get("style", "") for e in ET.fromstring(svg).iter(f"{SVG}path") if "stroke-width: 1.6" in e.get("style", "")
    ]
    colours = [re.search(r"stroke: (#\w+)", style)[1] for style in styles[:3]]
    assert colours[1] == colours[2] != colours[0]
    assert ["stroke-dasharray" in style for style in styles[:3]] == [False, False, True]


@pytest.mark.parametrize("name", ["curves", "bars", "heat map", "large heat map", "dots"])
def test_a_drawing_in_a_page_has_no_style_of_its_own_and_no_name_twice(name):
    inliner = Inliner()
    svg = draw(FIGURES[name]).svg
    first, second = inliner.inline(svg, "a"), inliner.inline(svg, 'b"<')
    assert "style" not in first
    assert "var(--ink)" in inliner.rules
    assert "url(" not in inliner.rules
    assert not re.findall(r'"#(?:17181c|ffffff)"', first)
    ids = [re.findall(r'\bid="([^"]+)"', one) for one in (first, second)]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    for own, text in zip(ids, (first, second), strict=True):
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
        assert used
        assert used <= set(own)
    assert ET.parse(io.StringIO(second)).getroot().get("aria-label") == 'b"<'
    assert "<script" not in first
