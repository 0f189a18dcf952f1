"""LongBench: prompts are the harness's, what does not fit leaves the middle, the score follows from the answer."""

import json
import shutil
import types

import pytest
from transformers import AutoTokenizer

from sparsesel import InputError
from sparsesel.registry import registry

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from sparsesel.eval.tasks.longbench import SUBSETS, LongBench, LongBenchConfig, harness

pytestmark = pytest.mark.extras

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def record(number, **changes):
    text = " ".join(f"Passage {i} says that number {i * number} is blue." for i in range(60))
    return {
        "input": f"Which number is blue, of {number}?",
        "context": text,
        "answers": ["The Blue one!", "seven"],
        "length": 60,
        "dataset": "x",
        "language": "en",
        "all_classes": None,
        "_id": f"id{number}",
        **changes,
    }


@pytest.fixture
def folder(tmp_path):
    for subset, count in zip(SUBSETS, (3, 2, 1), strict=True):
        lines = [json.dumps(record(number)) for number in range(count)]
        (tmp_path / f"{subset}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture(params=["plain", "bos", "chat"])
def tokenizer(request, model_folder, other_model_folder):
    loaded = AutoTokenizer.from_pretrained(other_model_folder if request.param == "bos" else model_folder)
    if request.param == "chat":
        loaded.chat_template = TEMPLATE
    return loaded


def setting(tokenizer=None, *contexts, online=False):
    return types.SimpleNamespace(texts=[], contexts=contexts or (900,), seed=0, tokenizer=tokenizer, online=online)


def task(folder, **fields):
    return LongBench(LongBenchConfig(folder=str(folder), **fields))


def test_lengths_and_prompts_are_those_of_longbench():
    assert [harness(subset).new_tokens for subset in SUBSETS] == [32, 32, 64]
    assert harness("multifieldqa_en").before.startswith("Read the following text and answer briefly.")
    assert harness("hotpotqa").after.rstrip().endswith("Question: {{question}}\nAnswer:")


@pytest.mark.parametrize(
    ("text", "score"), [(" the blue, one", 1), ("Seven.", 1), ("a blue whale", 0.5), ("red", 0), ("", 0)]
)
def test_f1_of_the_best_reference_without_case_punctuation_and_articles(text, score):
    assert harness("hotpotqa").score(text, ["The Blue one!", "seven"]) == score


def test_every_question_of_every_subset_is_a_document(folder):
    given = setting(None, 900, 700)
    both = task(folder)
    documents = [document for context, document in both.points(given) if context == 900]
    assert documents == [0, 1, 2, 3, 4, 6]
    found = [both.parameters(given, 900, document) for document in documents]
    assert [(one["subset"], one["id"]) for one in found] == [
        ("2wikimqa", "id0"),
        ("hotpotqa", "id0"),
        ("multifieldqa_en", "id0"),
        ("2wikimqa", "id1"),
        ("hotpotqa", "id1"),
        ("2wikimqa", "id2"),
    ]
    assert both.parameters(given, 900, 5)["id"] is None  # an earlier run may have had more
    assert len(list(task(folder, questions=1).points(given))) == 6


@pytest.mark.parametrize("context", [700, 801])
def test_a_long_prompt_loses_its_middle(folder, tokenizer, context):
    case = task(folder).prepare(setting(tokenizer), context, 0)
    rules = harness("2wikimqa")
    assert context - rules.new_tokens - 12 < len(case.tokens) <= context - rules.new_tokens
    text = tokenizer.decode(case.tokens, skip_special_tokens=True)
    assert rules.before + "Passage 0 says" in text
    assert rules.after.replace("{{question}}", "Which number is blue, of 0?") in text
    assert case.truncation.endswith("tokens in the middle")
    whole = tokenizer(rules.before + record(0)["context"] + rules.after.replace("{{question}}", record(0)["input"]))
    left_out = int(case.truncation.split()[0])
    assert left_out == pytest.approx(len(whole["input_ids"]) - len(case.tokens), abs=40)
    if tokenizer.chat_template:
        assert text.startswith("user\n")
        assert text.endswith("assistant\n")


def test_a_short_prompt_is_whole(folder, tokenizer):
    case = task(folder).prepare(setting(tokenizer), 4000, 1)
    assert case.truncation == "none"
    text = tokenizer.decode(case.tokens, skip_special_tokens=True)
    assert record(0)["context"] in text


def test_a_context_that_a_question_does_not_fit_into_is_refused(folder, tokenizer):
    with pytest.raises(InputError, match="at least") as error:
        task(folder).prepare(setting(tokenizer), 200, 0)
    assert error.value.field == "context"


def test_without_files_or_network_it_is_refused(tmp_path):
    with pytest.raises(InputError, match="--online"):
        list(LongBench(LongBenchConfig()).points(setting()))
    with pytest.raises(InputError, match=r"folder with 2wikimqa\.jsonl"):
        list(task(tmp_path / "none").points(setting()))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2"),
        ("[]", "line 2: context, input, answers"),
        (json.dumps(record(1, answers=[])), "line 2: answers"),
        (json.dumps(record(1, answers=[3])), "line 2: answers"),
        (json.dumps(record(1, context=None)), "line 2: context"),
        (json.dumps({"context": "a", "answers": ["b"]}), "line 2: input"),
        ("[" * 100_000, "line 2"),
        ('{"a":' * 100_000, "line 2"),
        ("1" * 5000, "line 2"),
        *((json.dumps(record(1, **{name: "half \ud83d"})), f"line 2: {name}") for name in ("context", "input", "_id")),
        (json.dumps(record(1, answers=["a", "\udcff"])), "line 2: answers"),
    ],
)
def test_a_line_that_is_no_question_is_named(folder, line, problem):
    (folder / "2wikimqa.jsonl").write_text(json.dumps(record(0)) + "\n" + line + "\n")
    with pytest.raises(InputError, match=problem) as error:
        list(task(folder).points(setting()))
    assert str(folder / "2wikimqa.jsonl") in str(error.value)


def test_the_form_of_the_hub_is_read_too(folder):
    row = record(0)
    row["question"] = row.pop("input")
    (folder / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    assert len(list(task(folder, subsets=("hotpotqa",)).points(setting()))) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"subsets": ["qasper"]}, "subsets"), ({"subsets": []}, "subsets"), ({"questions": 0}, "questions")],
)
def test_fields_that_make_no_sense_are_refused(fields, problem):
    with pytest.raises(InputError, match=problem):
        registry().make_task("longbench", fields)


def test_more_questions_than_there_are_are_refused(folder):
    with pytest.raises(InputError, match="at most 1"):
        list(task(folder, questions=2).points(setting()))


def test_it_runs_and_resumes(folder, model_folder, tmp_path):
    from sparsesel.eval import run

    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    options = {"contexts": [700], "out": tmp_path / "out", "backend": "eager", "set": {"topk": 8}}
    fields = {"folder": str(folder), "subsets": ["2wikimqa", "hotpotqa"]}
    specs = ["full", "exact_topk"]
    results = run("longbench", str(model), specs, questions=1, **fields, **options)
    assert len(results) == 4
    for result in results:
        assert 0 <= result.metrics["score"] <= 1
        assert result.metrics["tokens"] == 32  # the model has no token that ends an answer
        assert result.provenance["truncation"].endswith("in the middle")
    assert results.lines[1]["metrics"]["attended"] == 8
    (section,) = results.report()
    assert [column.heading for column in section.tables[0].columns] == ["2wikimqa", "hotpotqa", "mean"]
    again = run("longbench", str(model), specs, questions=2, **fields, **options)
    assert again.lines[:4] == results.lines
    assert len(again) == 8
    (folder / "hotpotqa.jsonl").write_text(json.dumps(record(0, answers=["two"])) + "\n")
    with pytest.raises(InputError, match="longbench_sha256"):
        run("longbench", str(model), specs, questions=1, **fields, **options)


def test_online_it_is_read_from_where_the_harness_reads_it(monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []

    def load(path, name, split):
        asked.append((path, name, split))
        return [{"question": "Which?", "context": "A text.", "answers": ["this"], "_id": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    online = LongBench(LongBenchConfig())
    given = setting(online=True)
    assert len(list(online.points(given))) == 3
    assert asked == [harness(subset).dataset for subset in SUBSETS]
    assert online.parameters(given, 900, 0)["id"] == "x"


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"no route.*--folder"):
        list(LongBench(LongBenchConfig()).points(setting(online=True)))
