"""What is read from results folders, and what Markdown and the page make of it."""

import base64
import copy
import dataclasses
import hashlib
import html
import html.parser
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sparsesel import InputError
from sparsesel.eval.figures import Curves, HeatMap, Series
from sparsesel.eval.render.columns import heading, marks
from sparsesel.eval.render.content import Content, Part, Shown, gather
from sparsesel.eval.render.draw import draw
from sparsesel.eval.render.markdown import escape, markdown
from sparsesel.eval.render.page import page
from sparsesel.eval.render.write import write
from sparsesel.eval.tables import Column, Section, Table

HOSTILE = "<script>alert(1)</script>\"' onload=x **b** | `c` \x1b[2J"


def write_results(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (folder / "results.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("better", "values", "expected"),
    [
        ("less", [1.0, 3.0, 2.0, None, 4.0], ["", "second", "best", "", ""]),
        ("more", [9.0, 3.0, 2.0, None, 4.0], ["", "second", "", "", "best"]),
        ("", [9.0, 3.0, 2.0, None, 4.0], ["", "", "", "", ""]),
        ("less", [9.0, 3.001, 3.002, 5.0, 6.0], ["", "best", "best", "second", ""]),  # alike as far as one sees
        ("less", [9.0, 3.0, 3.0, None, "–"], ["", "", "", "", ""]),  # nothing is better than anything
        ("more", [0.5, float("nan"), 1.0, 0.0, None], ["", "", "best", "second", ""]),
    ],
)
def test_the_best_and_second_best_are_marked_references_apart(better, values, expected):
    column = Column("PPL", values, 1, better=better)
    table = Table("t", list("abcde"), [column], references=1)
    assert marks(table, column) == expected
    assert marks(table, dataclasses.replace(column, ranked=False)) == [""] * 5


def test_headings_have_their_unit():
    assert heading(Column("fall-\nback", [], percent=True)) == "fallback (%)"
    assert heading(Column("ms per\nstep", [])) == "ms per step"
    assert heading(Column("ms per\nstep", []), "\n") == "ms per\nstep"


def test_a_torn_last_line_is_left_out_and_said(tmp_path, lines):
    folder = write_results(tmp_path / "a", lines, '{"task": "perpl')
    before = (folder / "results.jsonl").read_bytes()
    content = gather([folder])
    assert len(content.entries) == len(lines)
    (problem,) = content.problems
    assert "last line" in problem
    assert (folder / "results.jsonl").read_bytes() == before


def test_a_line_that_is_no_result_is_left_out_and_said(tmp_path, lines):
    folder = write_results(tmp_path / "a", [lines[0], {"task": 3}, lines[1]])
    content = gather([folder])
    assert [entry.number for entry in content.entries] == [1, 3]
    assert "Line 2 of" in content.problems[0]


def test_results_that_were_not_merged_or_were_set_aside_are_said(results):
    (results / "results.rank1.jsonl").write_text("x")
    (results / "results.jsonl.torn").write_text("x")
    problems = "\n".join(gather([results]).problems)
    assert "results.rank1.jsonl" in problems
    assert "set aside" in problems


@pytest.mark.parametrize("what", ["missing", "file", "empty", "no results", "torn only", "one point twice", "twice"])
def test_what_is_no_results_folder_is_refused(tmp_path, results, lines, what):
    folder, folders = tmp_path / "other", [tmp_path / "other"]
    if what == "file":
        folder.write_text("x")
    elif what != "missing":
        folder.mkdir()
    if what == "no results":
        (folder / "results.jsonl").write_text("")
    elif what == "torn only":
        (folder / "results.jsonl").write_text('{"task"')
    elif what == "one point twice":
        write_results(folder, [lines[0], lines[1], lines[0]])
    elif what == "twice":
        folders = [results, results / ".." / "results"]
    with pytest.raises(InputError) as error:
        gather(folders)
    assert error.value.field == "DIR"
    if what == "one point twice":
        assert "lines 1 and 3" in error.value.got


def test_several_folders_are_shown_together(tmp_path, lines):
    perplexity = [line for line in lines if line["task"] == "perplexity"]
    niah = [line for line in lines if line["task"] == "niah"]
    one = write_results(tmp_path / "one", perplexity)
    two = write_results(tmp_path / "two", [*niah, *perplexity[:3]])  # three of them copied
    content = gather([one, two])
    assert len(content.entries) == len(lines)
    assert {entry.folder for entry in content.entries} == {"one", "two"}
    assert content.differences == []


def test_different_results_of_one_point_are_told_apart_by_their_folders(tmp_path, lines):
    other = copy.deepcopy([line for line in lines if line["selector"] == "quest,topk=128"])
    for line in other:
        line["provenance"]["commit"] = "e" * 40
    content = gather([write_results(tmp_path / "x" / "old", lines), write_results(tmp_path / "x" / "new", other)])
    names = {entry.line["selector"] for entry in content.entries}
    assert {"quest,topk=128 [old]", "quest,topk=128 [new]", "full"} <= names
    assert "quest,topk=128" not in names
    assert len(content.entries) == len(lines) + len(other)
    assert any(note.startswith("Unequal commits") for note in content.differences)


def test_folders_of_one_name_are_told_apart_by_what_is_above(tmp_path, lines):
    folders = [write_results(tmp_path / name / "results", lines[i : i + 1]) for i, name in enumerate("ab")]
    assert {entry.folder for entry in gather(folders).entries} == {"a/results", "b/results"}


def test_a_task_that_is_not_installed_is_said(tmp_path, lines):
    folder = write_results(tmp_path / "a", [*lines, {**lines[0], "task": "gone"}])
    content = gather([folder])
    assert len(content.entries) == len(lines) + 1
    for text in (markdown(content), page(content, drawings(content))):
        assert "are not shown" in text
        assert "gone" in text


def test_lines_that_a_report_cannot_use_do_not_hide_the_others(tmp_path, lines):
    broken = [{**line, "metrics": {}} for line in lines if line["task"] == "niah"]
    content = gather([write_results(tmp_path / "a", [*[x for x in lines if x["task"] == "perplexity"], *broken])])
    (part,) = [part for part in content.parts if part.task == "niah"]
    (note,) = part.shown[0].section.notes
    assert re.fullmatch(r"\d+ results are not shown in niah \(the first is full at .*failed with KeyError.*", note)
    summary, said = [shown.section for shown in content.parts[0].shown]
    assert [column.heading.split()[0] for column in summary.tables[0].columns].count("PPL") == 2
    assert "not shown in the summary" in said.notes[0]


def test_one_line_that_a_report_cannot_use_hides_no_other(tmp_path, lines):
    own = [line for line in lines if line["task"] == "niah"]
    broken = copy.deepcopy(own)
    del broken[3]["metrics"]["score"]
    expected, got = (gather([write_results(tmp_path / name, each)]) for name, each in (("a", own), ("b", broken)))
    (shown, said) = got.parts[-1].shown
    assert [table.title for table in shown.section.tables] == [
        table.title for table in expected.parts[-1].shown[0].section.tables
    ]
    place = f"the first is {own[3]['selector']} at context {own[3]['context']}, document {own[3]['document']}"
    assert f"1 results are not shown in niah ({place})" in said.section.notes[0]


@pytest.mark.parametrize("value", [[1, 2], {"a": None}, [], True, "x", 10**30, None], ids=str)
def test_what_others_write_into_a_line_is_shown_whatever_it_is(tmp_path, lines, value):
    """Their parameters, seeds and budgets may be of any kind."""
    made = copy.deepcopy([line for line in lines if line["task"] == "perplexity"])
    for line in made[::2]:
        line["config"] = {**line["config"], "topk": value}
        line["metrics"]["mine"] = value
        line["provenance"] |= {"seed": value, "data_sha256": value, "task_from": value, "mine": value}
        line["provenance"]["parameters"] |= {"text": value, "skip_chars": value, "mine": value}
    content = gather([write_results(tmp_path / "a", made)])
    assert content.problems == []
    assert len(content.entries) == len(made)
    assert "Perplexity, context 1024" in markdown(content)
    assert "Perplexity, context 1024" in page(content.without(dict.fromkeys(dict(content.figures), "")), {})


def test_a_figure_that_cannot_be_drawn_is_said_and_takes_nothing_else_along(tmp_path, lines, monkeypatch):
    content = gather([write_results(tmp_path / "a", [line for line in lines if line["task"] == "perplexity"])])
    bad = Curves("Of <nothing>", "x", "y", [Series("s", [1, 2], [1.0])])
    shown = content.parts[-1].shown[0]
    parts = [dataclasses.replace(content.parts[-1], shown=[Shown(shown.section, [("bad", bad), *shown.figures])])]
    written = write(dataclasses.replace(content, parts=[content.parts[0], *parts]), tmp_path / "out")
    (problem,) = written.problems
    assert "'Of <nothing>' cannot be drawn (ValueError" in problem
    assert written.count == len(list((tmp_path / "out" / "figures").glob("*.png"))) == len(content.figures)
    for path in (written.markdown, written.page):
        text = path.read_text(encoding="utf-8")
        assert "nothing" in text.partition("Left out")[2].partition("Summary")[0]
        assert "figures/bad" not in text


DRAWN = {}


def drawings(content):
    """Each once for all tests: that they are the same each time is tested elsewhere."""
    for _, figure in content.figures:
        if repr(figure) not in DRAWN:
            DRAWN[repr(figure)] = draw(figure, content.selectors)
    return {name: DRAWN[repr(figure)] for name, figure in content.figures}


def hostile_content():
    """A report whose every text comes from elsewhere."""
    table = Table(
        HOSTILE,
        [HOSTILE, "full", "b", "c"],
        [Column(HOSTILE, [1.25, 2.0, 3.0, None], 1, better="less"), Column("text", [HOSTILE, "a", "b", "c"])],
        references=1,
        kind=HOSTILE,
    )
    figures = [
        Curves(HOSTILE, HOSTILE, HOSTILE, [Series(HOSTILE, [1, 2], [1, 2])], caption=HOSTILE),
        HeatMap(HOSTILE, HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [[1.0]], caption=HOSTILE),
    ]
    section = Section(HOSTILE, [table], HOSTILE, [HOSTILE], figures)
    names = [("a", figures[0]), ("b", figures[1])]
    return Content((), [HOSTILE], [HOSTILE], [Part("", [Shown(section, names)], (), ())], ["full"])


class Seen(html.parser.HTMLParser):
    """Elements and attributes of a page, and the text of each kind of element."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.texts, self.stack = [], [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.stack.append(tag)

    def handle_data(self, data):
        self.texts.setdefault(self.stack[-1] if self.stack else "", []).append(data)


def test_nothing_hostile_comes_into_the_page():
    content = hostile_content()
    text = page(content, drawings(content))
    seen = Seen(text)
    assert seen.elements.count("script") == 1
    assert not [one for one in seen.attributes if one[1].startswith("on") or one[1] in ("style", "src", "action")]
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_nothing_hostile_comes_into_markdown():
    text = markdown(hostile_content())
    assert "<script" not in text
    assert "**b**" not in text
    assert "\x1b" not in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {4}


@pytest.mark.parametrize(
    "text", ["- a", "+ a", "1. a", "1) a", "# a", "> a", "a\n# b", "[a](b)", "![a](b)", "_a_", "~~a~~"]
)
def test_markdown_of_others_is_text(text):
    assert escape(text)[0] in "\\&1a"
    assert "\n" not in escape(text)
    assert re.sub(r"\\(.)", r"\1", escape(text)).replace("&gt;", ">") == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in ("0.77", "1.0000", "-1.5", "+3", "12", "x86_64", "sink_size=2", "a-b", "1.a")),
        ("7.", r"7\."),  # an empty item
        ("7. item", r"7\. item"),
        ("2026) item", r"2026\) item"),
        ("- item", r"\- item"),
        ("---", r"\---"),
        ("_private", r"\_private"),
        ("__init__", r"\_\_init\_\_"),
        ("a_", r"a\_"),
    ],
)
def test_only_what_markdown_would_read_is_escaped(text, expected):
    assert escape(text) == expected


@given(text=st.text(st.sampled_from("ab1 0_*-+.)(=#[]!`|~<>&\\{}$"), max_size=12))
def test_markdown_shows_any_text_as_it_is(text):
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for wrap in ("{}", "**{}**", "# {}"):
        shown = reader.render(wrap.format(escape(text)) + "\n")
        assert html.unescape(re.sub(r"<[^>]*>", "", shown)).strip() == " ".join(text.split())


def test_the_page_allows_only_its_own_style_and_script(results):
    content = gather([results])
    text = page(content, drawings(content))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for element, directive in (("style", "style-src"), ("script", "script-src")):
        (inner,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    addresses = [value for _, name, value in Seen(text).attributes if name in ("href", "src", "xlink:href")]
    assert addresses
    assert all(one.startswith(("#", "figures/", "data:")) for one in addresses)


def test_every_line_and_its_numbers_are_in_the_page(results, lines):
    content = gather([results])
    text = page(content, drawings(content))
    rows = text.partition('id="lines"')[2].count("<tr>") - 2  # two headings
    assert rows == len(lines)
    for line in lines[:3]:
        assert f'data-value="{line["metrics"]["nll"]}"' in text
    assert "&lt;b&gt;1234567&lt;/b&gt;" in text
    for fact in ("x86_64, 2 threads", "torch 2.13.0", "c" * 40, "d" * 64, "book.txt", "eager"):
        assert fact in text


def test_long_lists_are_named_by_their_size(tmp_path, lines):
    line = {
        **lines[0],
        "metrics": {**lines[0]["metrics"], "map": [[0.5] * 9] * 30, "stages": {"qk": 1.5, "few": [1, 2]}},
    }
    content = gather([write_results(tmp_path / "a", [line])])
    text = page(content, drawings(content))
    assert "30 × 9 values" in text
    assert "qk: 1.5, few: [1, 2]" in text


def test_differences_are_at_the_top(tmp_path, lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["selector"] == "full":
            line["provenance"]["commit"] = "e" * 40
    content = gather([write_results(tmp_path / "a", made)])
    for text in (markdown(content), page(content, drawings(content))):
        assert -1 < text.index("Unequal commits") < text.index("Quality and speed")


def test_reports_are_the_same_each_time(results):
    first, second = gather([results]), gather([results])
    assert markdown(first) == markdown(second)
    assert page(first, drawings(first)) == page(second, drawings(second))


def test_figures_have_names_of_their_own(results):
    names = [name for name, _ in gather([results]).figures]
    assert len(set(names)) == len(names) > 0
    assert all(re.fullmatch(r"[a-z0-9-]{1,70}", name) for name in names)
