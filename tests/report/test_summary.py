"""The summary's numbers follow from the lines of several tasks, and say whether they were measured or modelled."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsesel.eval.render.draw import frontier
from sparsesel.eval.summary import macro_score, step_cost, summary


def cells(section, heading):
    """Selector to value of the column of the first table whose heading begins so."""
    (table,) = [table for table in section.tables if table.title == "Quality and speed"]
    (column,) = [column for column in table.columns if column.heading.replace("\n", " ") == heading]
    return dict(zip(table.rows, column.values, strict=True))


def test_there_is_none_without_lines_of_its_tasks(lines):
    assert summary([]) == []
    assert summary([{**lines[0], "task": "sensitivity"}]) == []


def test_references_stand_first(lines):
    (section,) = summary(list(reversed(lines)))
    for table in section.tables:
        assert table.references == 2
        assert list(table.rows[:2]) == ["full", "exact_topk,topk=128"]


def test_perplexity_is_over_all_documents(lines):
    (section,) = summary(lines)
    own = [e["metrics"] for e in lines if (e["task"], e["context"], e["selector"]) == ("perplexity", 1024, "full")]
    assert len(own) == 2
    assert cells(section, "PPL 1K")["full"] == pytest.approx(math.exp(sum(m["nll"] for m in own) / 200))


def test_needles_are_a_mean_of_cells_and_not_of_lines(lines):
    (section,) = summary(lines)
    own = [e for e in lines if (e["task"], e["context"], e["selector"]) == ("niah", 2048, "quest,topk=128")]
    more = [copy.deepcopy(own[0]) for _ in range(5)]  # five more trials of one cell
    for number, line in enumerate(more):
        line["document"] = 1000 + number
        line["metrics"]["score"] = 0.0
    names = ("variant", "haystack")
    by_cell = {}
    for line in [*own, *more]:
        by_cell.setdefault(tuple(line["provenance"]["parameters"][n] for n in names), []).append(
            line["metrics"]["score"]
        )
    expected = sum(sum(scores) / len(scores) for scores in by_cell.values()) / len(by_cell)
    assert macro_score([*own, *more], names) == pytest.approx(expected)
    assert cells(section, "needles 2K")["quest,topk=128"] == pytest.approx(macro_score(own, names))


def test_the_modelled_speedup_is_that_of_the_paths_counted_in_perplexity(lines):
    own = [e for e in lines if (e["task"], e["context"]) == ("perplexity", 1024) and e["selector"].startswith("retopk")]
    costs = [line["provenance"]["cost"] for line in own]
    read = sum(cost["step_bytes"] for cost in costs) / 2
    assert costs[0]["step_bytes"] != costs[1]["step_bytes"]
    found = step_cost(own)
    assert found is not None
    assert found.bytes_read == pytest.approx(read)
    assert found.over_exact == pytest.approx(costs[0]["exact_bytes"] / read)
    assert found.over_full == pytest.approx(costs[0]["full_bytes"] / read)
    (section,) = summary(lines)  # with the lines of niah, whose documents took other paths
    assert cells(section, "×exact 1K modelled")["retopk,topk=128"] == pytest.approx(found.over_exact)
    assert cells(section, "×exact 1K modelled")["exact_topk,topk=128"] == pytest.approx(1)
    assert "nothing is timed" in " ".join(section.notes)
    (needles,) = summary([line for line in lines if line["task"] == "niah"])
    assert cells(needles, "×exact 1K modelled")["retopk,topk=128"] < found.over_exact


def test_full_is_compared_with_the_exact_row_there_is(lines):
    """One table: what exact Top-K is to full, full is to exact Top-K the other way round."""
    (section,) = summary(lines)
    exact, full = (
        step_cost([e for e in lines if (e["task"], e["context"], e["selector"]) == ("perplexity", 1024, name)])
        for name in ("exact_topk,topk=128", "full")
    )
    assert exact is not None
    assert full is not None
    assert cells(section, "×exact 1K modelled")["full"] == pytest.approx(exact.bytes_read / full.bytes_read)
    alone = [line for line in lines if not line["selector"].startswith("exact_topk")]
    (section,) = summary(alone)
    assert cells(section, "×exact 1K modelled")["full"] is None
    assert cells(section, "×exact 1K modelled")["retopk,topk=128"] is not None


def test_measured_speed_takes_the_place_of_modelled_speed_and_names_the_device(lines):
    times = {"full": 8.0, "exact_topk,topk=128": 6.0, "retopk,topk=128": 2.0}
    latency = [
        {**e, "task": "latency", "metrics": {"attention_ms": times[e["selector"]]}}
        for e in lines
        if e["selector"] in times and e["task"] == "perplexity" and e["document"] == 0 and e["context"] == 2048
    ]
    (section,) = summary([*lines, *latency])
    speedups = cells(section, "×exact 2K cpu")
    assert speedups["retopk,topk=128"] == pytest.approx(3.0)
    assert speedups["exact_topk,topk=128"] == pytest.approx(1.0)
    assert speedups["quest,topk=128"] is None
    assert cells(section, "×exact 1K modelled")["quest,topk=128"] is not None
    assert "measured by latency (eager on cpu; eager PyTorch, no measure of what kernels reach)" in " ".join(
        section.notes
    )


def test_lines_without_a_cost_have_no_modelled_columns(lines):
    made = copy.deepcopy(lines)
    for line in made:
        del line["provenance"]["cost"]
    (section,) = summary(made)
    assert [table.title for table in section.tables] == ["Quality and speed"]
    assert "modelled" not in str(section)


def test_a_cost_that_could_not_be_modelled_is_said(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["selector"].startswith("quest"):
            line["provenance"]["cost"] = {"error": "ValueError: no"}
    (section,) = summary(made)
    assert cells(section, "×exact 1K modelled")["quest,topk=128"] is None
    assert "The cost of quest,topk=128 is not known: ValueError: no." in section.notes


def test_quality_is_shown_against_cost(lines):
    (section,) = summary(lines)
    assert [figure.title for figure in section.figures] == [
        f"{what} against bytes read, context {context}"
        for context in (1024, 2048)
        for what in ("Perplexity", "Needles found")
    ]
    for figure in section.figures:
        assert figure.connect
        assert "modelled" in figure.x_label
        assert len(figure.groups) == (8 if "Perplexity" in figure.title else 4)
    assert dict(section.figures[0].groups)["full"][0][1] == 1.0  # full over full


marks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(marks, st.booleans())
def test_the_frontier_is_what_no_mark_beats(points, more):
    better = (lambda a, b: a >= b) if more else (lambda a, b: a <= b)

    def beats(one, other):
        return one != other and one[0] <= other[0] and better(one[1], other[1])

    expected = {point for point in points if not any(beats(other, point) for other in points)}
    found = frontier([(float(x), float(y)) for x, y in points], more_is_better=more)
    assert set(found) == expected
    assert found == sorted(found)
