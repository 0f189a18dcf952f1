"""The table's numbers follow from the result lines."""

import math

import pytest
from rich.console import Console

from sparsesel.eval.report import perplexity_tables, reference_of, rows_by_context


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
    assert rows(LINES)["mine"].perplexity == pytest.approx(math.exp(50 / 20))


def test_ratios_compare_the_documents_that_both_have():
    by_name = rows(LINES)
    assert by_name["mine"].ratio(by_name["exact"]) == pytest.approx(math.exp((20 - 18) / 10))
    assert by_name["mine"].ratio(by_name["full"]) == pytest.approx(math.exp((50 - 38) / 20))
    assert by_name["mine"].ratio(None) is None
    other = rows([line("full", 5, 1.0)])["full"]
    assert by_name["mine"].ratio(other) is None


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
    for table in perplexity_tables(lines):
        console.print(table)
    console.file.close()
    return console.export_text()


def test_the_table_shows_one_block_for_each_context():
    text = rendered([*LINES, line("full", 0, 10.0, context=128), line("[red]x[/red]", 0, 9.0, name="x", context=128)])
    first, second = text.split("context 128")
    assert "2 documents, last 10 tokens of each" in first
    assert "12.182" in first  # exp(2.5)
    assert "docs" in first
    assert "docs" not in second
    assert max(map(len, rendered(LINES, width=80).splitlines())) <= 80
    assert "[red]x[/red]" in second


def test_no_lines_no_table():
    assert perplexity_tables([]) == []
