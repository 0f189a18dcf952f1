"""What was not measured alike is marked, and what was is not."""

import copy

import pytest

from sparsesel.eval.differences import differences


def changed(lines, select, **provenance):
    """The lines with other provenance where `select` says so."""
    made = copy.deepcopy(lines)
    for line in made:
        if select(line):
            line["provenance"].update(provenance)
    return made


def test_lines_measured_alike_have_no_marks(lines):
    assert differences(lines) == []
    assert differences([]) == []


def test_an_unequal_budget_is_marked_with_who_has_which(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["selector"].startswith("quest"):
            line["config"] = {**line["config"], "topk": 256}
    notes = differences(made)
    assert [note.partition(": ")[0] for note in notes] == [
        "Unequal budgets in perplexity at 1024 and perplexity at 2048",
        "Unequal budgets in niah at 1024 and niah at 2048",
    ]
    for note in notes:
        assert "topk 256 for quest,topk=128" in note
        assert "full" not in note  # it has no budget


def test_a_selector_that_attends_to_more_than_its_budget_is_marked(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["selector"].startswith("quest") and line["context"] == 2048:
            line["metrics"]["attended"] = 256.4
    assert differences(made) == ["More tokens attended than topk: quest,topk=128 up to 2.0 times."]


def test_stability_compares_budgets_where_they_are_what_it_varies(lines):
    for field, marked in (("topk", False), ("refresh_interval", True), (None, True)):
        made = [{**line, "task": "stability"} for line in lines if line["task"] == "perplexity"]
        made = [{**line, "metrics": {**line["metrics"], "field": field}} for line in made]
        made[0] = {**made[0], "config": {"name": "full", "topk": 7}}
        assert any("budgets" in note for note in differences(made)) == marked


def test_a_task_may_compare_budgets(lines):
    made = [{**line, "task": "sensitivity"} for line in lines if line["task"] == "perplexity"]
    made[0] = {**made[0], "config": {"name": "full", "topk": 7}}
    assert not [note for note in differences(made) if "budgets" in note]


@pytest.mark.parametrize(
    ("what", "key", "value"),
    [
        ("models", "model", "other@sha256:" + "f" * 64),
        ("texts", "data_sha256", "e" * 64),
        ("devices", "device", "cuda"),
        ("machines", "device_name", "NVIDIA L20"),
        ("backends", "backend", "triton"),
        ("types of numbers", "dtype", "bfloat16"),
        ("seeds", "seed", 7),
        ("commits", "commit", "a" * 40),
        ("commits", "commit", None),
        ("versions of torch", "versions", {"sparsesel": "0.1.0", "python": "3.11.2", "torch": "2.14.0"}),
    ],
)
def test_an_unequal_run_is_marked(lines, what, key, value):
    by_selector = differences(changed(lines, lambda line: line["selector"] == "full", **{key: value}))
    assert len(by_selector) == 1
    assert by_selector[0].startswith(f"Unequal {what}: ")
    assert "perplexity of full" in by_selector[0]
    (by_task,) = differences(changed(lines, lambda line: line["task"] == "niah", **{key: value}))
    assert by_task.startswith(f"Unequal {what}: ")
    assert "in perplexity;" in by_task  # all of a task's lines: the task alone is named
    assert "in niah." in by_task


def test_long_values_are_told_apart_by_their_beginning(lines):
    note = differences(changed(lines, lambda line: line["task"] == "niah", model="other@sha256:" + "f" * 64))[0]
    assert "tiny@0123456789ab in perplexity; other@ffffffffffff in niah" in note


def test_a_prompt_that_differs_between_selectors_is_marked(lines):
    made = changed(
        lines,
        lambda line: (line["task"], line["selector"], line["context"], line["document"]) == ("niah", "full", 2048, 3),
        prompt_sha256="0" * 64,
    )
    (note,) = differences(made)
    assert note.startswith("Unequal prompts in niah at 2048: in 1 of 12 documents, one for full; one for exact_topk")


def test_documents_that_a_selector_lacks_are_marked(lines):
    made = [line for line in lines if (line["selector"], line["document"]) != ("full", 1)]
    notes = differences(made)
    assert "Unequal documents in perplexity at 1024 and perplexity at 2048: of 2, full has 1." in notes
    assert "Unequal documents in niah at 1024 and niah at 2048: of 12, full has 11." in notes


def test_a_parameter_of_the_task_that_differs_is_marked(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["task"] == "perplexity" and line["selector"] == "full" and line["context"] == 1024:
            line["provenance"]["parameters"]["suffix"] = 50
    (note,) = differences(made)
    assert note.startswith("Unequal suffix in perplexity at 1024: 50 for full; 100 for exact_topk,topk=128, ")


def test_one_name_for_two_configurations_is_marked(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["task"] == "niah" and line["selector"].startswith("retopk"):
            line["config"] = {**line["config"], "window_size": 7}
    assert differences(made) == ["Unequal configurations under the name retopk,topk=128: they differ in window_size."]


def test_code_that_was_not_committed_is_marked(lines):
    (note,) = differences(changed(lines, lambda _: True, commit="c" * 40 + "-dirty"))
    assert note == "Measured with changes that were not committed (cccccccccccc-dirty): which code ran is not known."


def test_lines_that_say_little_are_no_error():
    line = {"task": "t", "selector": "s", "context": 1, "document": 0, "metrics": {}, "config": {}, "provenance": {}}
    assert differences([line]) == []


def test_a_task_without_a_text_has_no_other_one(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["task"] == "niah":
            del line["provenance"]["parameters"]["text"]
            line["provenance"]["data_sha256"] = "e" * 64
    assert differences(made) == []


def test_a_line_made_of_no_text_has_no_other_one(lines):
    made = copy.deepcopy(lines)
    for line in made:
        if line["task"] == "niah":
            line["provenance"]["data_sha256"] = None
            line["provenance"]["parameters"]["text"] = "random tokens"
    assert differences(made) == []
