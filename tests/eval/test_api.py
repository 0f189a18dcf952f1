"""Results in Python, as lines and as a data frame."""

import sys

import pytest

from sparsesel import InputError
from sparsesel.eval import run


@pytest.fixture(scope="module")
def results(model_folder, tmp_path_factory):
    text = tmp_path_factory.mktemp("texts") / "text.txt"
    text.write_text("Rain fell on the yard. " * 200)
    return run(
        "perplexity",
        str(model_folder),
        ["full", "exact_topk"],
        contexts=[40, 64],
        set={"topk": 8},
        texts=[text],
        suffix=4,
        backend="eager",
    )


@pytest.mark.extras
def test_a_data_frame_has_a_row_for_each_point(results):
    pandas = pytest.importorskip("pandas")
    frame = results.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns[:4]) == ["task", "selector", "context", "document"]
    assert len(frame) == len(results) == 4
    assert set(frame["parameters.suffix"]) == {4}
    means = frame.groupby("selector")["attended"].mean()
    assert means["exact_topk"] == 8
    for row, result in zip(frame.to_dict("records"), results, strict=True):
        assert (row["selector"], row["context"]) == (result.selector, result.context)
        assert row["perplexity"] == result.metrics["perplexity"]


def test_without_pandas_it_says_what_to_install(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        results.to_pandas()


def test_fields_of_several_tasks_stand_within_them(model_folder):
    with pytest.raises(InputError, match="within the mapping"):
        run({"perplexity": {}}, str(model_folder), ["full"], suffix=4)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("prplexity", "Did you mean 'perplexity'"),
        ({"perplexity": {"sufix": 4}}, "suffix"),
        ({"perplexity": {"suffix": "4 tokens"}}, "suffix"),
        ({}, "tasks"),
    ],
)
def test_a_task_or_field_that_is_not_there_is_refused(model_folder, task, problem):
    with pytest.raises(InputError, match=problem):
        run(task, str(model_folder), ["full"])


def test_one_selector_context_or_text_needs_no_list(model_folder, results, tmp_path):
    (tmp_path / "text.txt").write_text("Rain fell on the yard. " * 200)
    text = str(tmp_path / "text.txt")
    (one,) = run("perplexity", str(model_folder), "full", contexts=40, texts=text, suffix=4, backend="eager")
    assert (one.selector, one.context) == ("full", 40)
    assert one.metrics["nll"] == results.lines[0]["metrics"]["nll"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("selectors", value) for value in (None, [None], 3)),
        *(("contexts", value) for value in ("256", 1.5, None, True)),
        *(("texts", value) for value in (3, [None])),
    ],
)
def test_what_is_no_list_of_them_is_refused(model_folder, field, value):
    with pytest.raises(InputError, match=field):
        run("perplexity", str(model_folder), **{"selectors": ["full"], field: value})
