"""The table's numbers follow from the result lines."""

import io
import math
from collections import Counter

import pytest
from rich.console import Console
from rich.text import Text

from sparsesel.eval.answers import score_tables
from sparsesel.eval.report import reference_of, report, rows_by_context
from sparsesel.eval.tables import Column, Section, Table, renderables
from sparsesel.eval.tasks.perplexity import perplexity, ratio


def line(selector, document, nll, *, name=None, context=64, tokens=10, **metrics):
    name, _, topk = (name or selector).partition("/")
    config = {"name": name, **({"topk": int(topk)} if topk else {})}
    base = {"nll": nll, "tokens": tokens, "perplexity": math.exp(nll / tokens), "density": 0.5, "ms_per_step": 2.0}
    return {
        "task": "perplexity",
        "selector": selector,
        "context": context,
        "document": document,
        "metrics": {**base, **metrics},
        "config": config,
        "provenance": {},
    }


LINES = [
    line("mine", 0, 20.0, name="retopk/8", exact_share=0.5, reuse_share=0.5, candidates=100.0),
    line("mine", 1, 30.0, name="retopk/8", exact_share=0.9, reuse_share=0.1, candidates=200.0),
    line("exact", 0, 18.0, name="exact_topk/8", exact_share=1.0),
    line("full", 0, 16.0),
    line("full", 1, 22.0),
]


def rows(lines):
    return {row.selector: row for row in rows_by_context(lines)[64]}


def test_perplexity_is_over_all_tokens_of_all_documents():
    assert perplexity(rows(LINES)["mine"].lines.values()) == pytest.approx(math.exp(50 / 20))


def test_ratios_compare_the_documents_that_both_have():
    by_name = rows(LINES)
    assert ratio(by_name["mine"], by_name["exact"]) == pytest.approx(math.exp((20 - 18) / 10))
    assert ratio(by_name["mine"], by_name["full"]) == pytest.approx(math.exp((50 - 38) / 20))
    assert ratio(by_name["mine"], None) is None
    other = rows([line("full", 5, 1.0)])["full"]
    assert ratio(by_name["mine"], other) is None


def test_candidates_are_a_mean_over_reuse_steps():
    assert rows(LINES)["mine"].candidates == pytest.approx((100 * 0.5 + 200 * 0.1) / 0.6)
    assert rows(LINES)["full"].candidates is None


def test_references_come_first_and_the_budget_chooses_between_them():
    lines = [*LINES, line("exact9", 0, 17.0, name="exact_topk/9"), line("nine", 0, 17.0, name="retopk/9")]
    ordered = rows_by_context(lines)[64]
    assert [row.selector for row in ordered] == ["full", "exact", "exact9", "mine", "nine"]
    by_name = {row.selector: row for row in ordered}
    for spec, expected in (("mine", "exact"), ("nine", "exact9"), ("exact9", "exact9")):
        chosen = reference_of(by_name[spec], ordered, "exact_topk")
        assert chosen is by_name[expected]
    assert reference_of(by_name["full"], ordered, "exact_topk") is None  # either would do, so neither does
    only = rows_by_context(LINES)[64]
    chosen = reference_of(only[0], only, "exact_topk")
    assert chosen is not None
    assert chosen.selector == "exact"


def rendered(lines, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in renderables(report(lines), width=width):
        console.print(part)
    console.file.close()
    return console.export_text()


def test_the_table_shows_one_block_for_each_context():
    text = rendered([*LINES, line("full", 0, 10.0, context=128), line("[red]x[/red]", 0, 9.0, name="x", context=128)])
    first, second = text.split("context 128")
    second = second.partition("exact to refresh")[0]
    assert "2 documents, last 10 tokens of each" in first
    assert "12.182" in first  # exp(2.5)
    assert "docs" in first
    assert "docs" not in second
    assert max(map(len, rendered(LINES, width=80).splitlines())) <= 80
    assert "[red]x[/red]" in second


def test_the_report_says_what_was_measured_and_what_its_columns_mean():
    provenance = {"model": "org/name@abc", "parameters": {"text": "/home/me/book.txt"}, "backend": "eager"}
    text = rendered([{**each, "provenance": provenance | {"device": "cpu"}} for each in LINES])
    assert text.splitlines()[0] == "Model org/name; text book.txt; topk 8"
    explanation = " ".join(text.partition("exact to refresh")[2].split())
    for column in ("candidates: keys scored", "density: % of keys", "ms per step: eager on cpu, no measure of speed"):
        assert column in explanation
    others = [
        {**line("a", i, 9.0, name=f"retopk/{i + 1}"), "provenance": {**provenance, "parameters": {"text": f"{i}.txt"}}}
        for i in range(4)
    ]
    assert rendered(others).splitlines()[0] == "Model org/name; text 4 files; topk 1 and 2 and 3 and 4"
    fused = [{**others[0], "provenance": provenance | {"backend": "triton", "device": "cuda"}}]
    assert "ms per step: triton on cuda." in rendered(fused)


@pytest.mark.parametrize("width", [60, 79, 80, 120])
def test_selectors_and_numbers_can_be_read_at_any_width(width):
    names = {"full": "full", "exact_topk,topk=8": "exact_topk/8", "retopk:quality": "retopk/8"}
    shares = {"exact_share": 0.512, "reuse_share": 0.488, "fallback_share": 0.523, "candidates": 1234.5}
    lines = [line(spec, 0, 23.0, name=name, **shares) for spec, name in names.items()]
    text = rendered(lines, width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("full ", "retopk:quality ", " 9.974 1.0000 ", " 51.2  48.8  52.3 ", "1234.5", " 50.0 "):
        assert part in text
    assert text.count("retopk:quality") == (2 if width == 60 else 1)


def test_names_cannot_drive_the_terminal():
    provenance = {"model": "m\x1b[2J@1", "parameters": {"text": "t\u202e\udcff.txt"}}
    text = rendered([{**line("my\x1b[31m.toml", 0, 9.0, name="full"), "provenance": provenance}])
    assert not any(char in text for char in "\x1b\u202e\udcff")
    assert "m\\x1b[2J; text t\\u202e\\udcff.txt" in text


def test_no_lines_no_report():
    assert report([]) == []


def test_an_interval_over_documents_is_there_if_there_are_enough():
    few = [line("mine", document, 20.0 + document) for document in range(4)]
    text = rendered(few)
    assert "95% interval" not in text
    assert "Fewer than 5 documents are too few for an interval." in text
    text = rendered([*few, line("mine", 4, 24.0)])
    (row,) = [r for r in text.partition("95% interval")[2].splitlines() if r.startswith("mine")]
    low, high = map(float, row.split()[1:])
    assert math.exp(2.0) < low < math.exp(2.2) < high < math.exp(2.4)
    assert "too few" not in text
    assert text == rendered([*few, line("mine", 4, 24.0)])


def test_documents_that_all_agree_give_no_interval():
    """It would have no width, as if there were no doubt."""
    assert "95% interval" not in rendered([line("mine", document, 20.0) for document in range(9)])


@pytest.mark.parametrize(("trials", "low", "high"), [(4, "too few", "–"), (9, "–", "–"), (10, "0.700", "1.000")])
def test_scores_have_their_number_beside_them_and_no_interval_that_says_nothing(trials, low, high):
    scores = [0.0 if trial == 9 else 1.0 for trial in range(trials)]
    lines = [{**line("full", d, 1.0, score=score), "provenance": {"parameters": {}}} for d, score in enumerate(scores)]
    rows = rows_by_context(lines)[64]
    cells, overall = score_tables(rows, lambda _: ("all",), title="cells", overall="overall")
    found = {column.heading: column.cells[0] for column in overall.columns}
    assert (found["of"], found["from"], found["to"]) == (str(trials), low, high)
    assert cells.columns[0].ranked


def test_one_document_ranks_nothing():
    alone = [each for each in LINES if each["document"] == 0]
    for lines, ranked in ((alone, False), (LINES, False), ([e for e in LINES if e["selector"] != "exact"], True)):
        table = report(lines)[0].tables[0]
        assert [column.ranked for column in table.columns if column.better] == [ranked] * 3


def test_results_of_a_task_that_is_gone_are_said():
    text = rendered([*LINES, {**LINES[0], "task": "gone"}])
    assert "1 results of 'gone' are not shown" in " ".join(text.split())
    assert "Perplexity, context 64" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("details", [0, 3])
def test_no_table_is_cut_or_wider_than_the_terminal(width, details):
    """Whatever there is of it: every name and number is there as often as there are parts, whole."""
    names = ["retopk", "streaming_llm", "full"]
    columns = [
        Column(f"metric{i}\nnumber", [10**i + row for row in range(3)], 2, detail=i >= 9 - details) for i in range(9)
    ]
    table = Table("title", names, columns)
    tables = [part for part in renderables([Section("s", [table])], width=width) if not isinstance(part, Text)]
    console = Console(width=width, file=io.StringIO())
    for part in tables:
        console.print(part)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = Counter(" ".join(lines).split())
    assert all(words[cell] == 1 for column in columns for cell in column.cells)
    assert words["retopk"] == len(tables)
    assert (len(tables) == 1) == (width == 200)
