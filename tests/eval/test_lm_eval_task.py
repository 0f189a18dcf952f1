"""lm-evaluation-harness: its generation tasks run over a sparsified model; what would measure nothing is refused."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsesel import InputError
from sparsesel.eval import run
from sparsesel.eval.decode import MeasurementError
from sparsesel.registry import registry
from sparsesel_full.selector import FullSelector

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from sparsesel.eval.tasks import lm_eval as task

pytestmark = pytest.mark.extras

WORDS = ["river and stone", "lamp", "bell"]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: {kind}
doc_to_text: "Say {{{{word}}}}:"
doc_to_target: "{{{{word}}}}"
generation_kwargs: {{until: ["#"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("harness")
    (path / "words.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in WORDS))
    (path / "tasks").mkdir()
    for name, kind, metric, data in (
        ("say", "generate_until", "exact_match", path / "words.jsonl"),
        ("likely", "loglikelihood", "perplexity", path / "words.jsonl"),
        ("lost", "generate_until", "exact_match", path / "none.jsonl"),
        ("wrong", "guess", "exact_match", path / "words.jsonl"),
    ):
        values = {"name": name, "kind": kind, "metric": metric, "data": data, "cache": path / "cache"}
        (path / "tasks" / f"{name}.yaml").write_text(YAML.format(**values))
    return path


@pytest.fixture(scope="module")
def model(model_folder, tmp_path_factory):
    """With a token that ends texts, which the harness asks for."""
    path = tmp_path_factory.mktemp("models") / "ends"
    shutil.copytree(model_folder, path)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<s>"}))
    return path


def evaluate(model, folder, specs=("full",), **options):
    fields = {"tasks": ["say"], "include_path": str(folder / "tasks"), "contexts": [60], "backend": "eager"}
    return run("lm-eval", str(model), specs, **{**fields, **options})


def test_answers_are_those_of_the_model(model, folder, tmp_path):
    specs = ["full", "exact_topk,topk=4"]
    results = evaluate(model, folder, specs, out=tmp_path / "out", limit=2)
    full, exact = (result.metrics for result in results)
    assert full["tokens"] == exact["tokens"] == 12
    assert full["density"] == 1
    assert exact["attended"] == 4
    assert full["exact_match,none"] == 0.0
    assert "exact_match" in full["table"]
    parameters = results.lines[0]["provenance"]["parameters"]
    assert (parameters["harness_task"], parameters["limit"], parameters["prompts"]) == ("say", 2, 2)
    assert results.lines[0]["provenance"]["truncation"] == "none"
    (section,) = results.report()
    assert [column.heading for column in section.tables[0].columns[:2]] == [
        "exact_match\nnone",
        "exact_match_stderr\nnone",
    ]
    assert section.tables[0].columns[0].better == "more"
    assert evaluate(model, folder, specs, out=tmp_path / "out", limit=2).lines == results.lines
    with pytest.raises(InputError, match="results of limit"):
        evaluate(model, folder, specs, out=tmp_path / "out", limit=1)


def test_a_right_answer_scores(model, folder, tmp_path):
    """What the model says to the first prompt is made the answer that is asked for."""
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    tokens = tokenizer(f"Say {WORDS[0]}:", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        made = loaded.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
    answer = tokenizer.decode(made).split("#")[0]
    (tmp_path / "tasks").mkdir()
    text = (folder / "tasks" / "say.yaml").read_text().replace('doc_to_target: "{{word}}"', "doc_to_target: answer")
    text = text.replace(str(folder / "words.jsonl"), str(tmp_path / "words.jsonl"))
    (tmp_path / "tasks" / "say.yaml").write_text(text.replace(str(folder / "cache"), str(tmp_path / "cache")))
    (tmp_path / "words.jsonl").write_text(json.dumps({"word": WORDS[0], "answer": answer}) + "\n")
    assert evaluate(model, tmp_path).lines[0]["metrics"]["exact_match,none"] == 1.0


def test_what_does_not_fit_is_said(model, folder):
    results = evaluate(model, folder, contexts=[16], limit=2)
    assert results.lines[0]["provenance"]["truncation"] == "the beginning of 1 of 2 prompts"
    assert results.lines[0]["metrics"]["tokens"] == 12


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tasks": ["likely"]}, "likely, which is of the kind loglikelihood"),
        ({"tasks": ["sya"]}, "sya, no task of it"),
        ({"tasks": ["lost"]}, "task lost that can be loaded.*add --online"),
        ({"tasks": ["wrong"]}, "task wrong that can be loaded"),
        ({"tasks": []}, "tasks of lm-evaluation-harness"),
        ({"tasks": ["say", "say"]}, "each once"),
        ({"include_path": "/nowhere"}, "a folder with YAML"),
        ({"contexts": [7]}, "tokens of an answer of say"),
        ({"chat": True}, "a chat template"),
        ({"limit": 0}, "limit"),
    ],
)
def test_what_cannot_work_is_refused_before_any_model_is_loaded(model, folder, monkeypatch, options, problem):
    monkeypatch.setattr("sparsesel.eval.runner.load_model", None)
    local = task._manager
    monkeypatch.setattr(task, "_manager", lambda path, **_: local(path, defaults=False))  # all others take seconds
    with pytest.raises(InputError, match=problem):
        evaluate(model, folder, **options)


def test_a_tokenizer_without_an_end_is_refused(model_folder, folder):
    with pytest.raises(InputError, match="a token that ends a text"):
        evaluate(model_folder, folder)


def attend_unseen(self, query, kv, state, *, scale):
    """Never says that the selector acted."""
    return query


def test_a_selector_that_never_acted_is_refused(model, folder, monkeypatch):
    monkeypatch.setattr(FullSelector, "attend", attend_unseen)
    with pytest.raises(MeasurementError, match="acted in 0 of"):
        evaluate(model, folder)


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setattr(task.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"sparsesel\[lm-eval\]"):
        registry().make_task("lm-eval", {"tasks": ["gsm8k"]}).points(None)
