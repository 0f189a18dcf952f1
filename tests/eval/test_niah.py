"""Needles: the prompt is what it should be, to the token, and the score follows from the answer."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparsesel import InputError
from sparsesel.eval.results import read_results
from sparsesel.eval.tasks import niah
from sparsesel.eval.tasks.niah import DEPTHS, Niah, NiahConfig, depth_of, found_share, hide
from sparsesel.eval.texts import default_text

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers(model_folder, other_model_folder):
    plain, bos, chat = (AutoTokenizer.from_pretrained(f) for f in (model_folder, other_model_folder, model_folder))
    chat.chat_template = TEMPLATE
    return {"plain": plain, "bos": bos, "chat": chat}


def setting(tokenizer, *contexts):
    return types.SimpleNamespace(texts=[default_text()], contexts=contexts, seed=0, tokenizer=tokenizer)


@pytest.mark.parametrize("which", ["plain", "bos", "chat"])
@pytest.mark.parametrize("context", [600, 1001])
def test_prompt_and_answer_fill_the_context_exactly(tokenizers, which, context):
    tokenizer = tokenizers[which]
    task = Niah(NiahConfig(trials=2))
    given = setting(tokenizer, context)
    for document in range(12):
        case = task.prepare(given, context, document)
        assert len(case.tokens) + case.steps == context
        assert case == task.prepare(given, context, document)
        text = tokenizer.decode(case.tokens)
        parameters = task.parameters(given, context, document)
        hidden = hide(parameters["variant"], parameters["trial"], f"0 {parameters['haystack']}")
        for _, sentence in hidden.needles:
            assert text.count(f"\n{sentence}\n") == text.count(sentence.partition("#")[2]) == 1
        assert all(value in text for value in case.values)
        first = next(sentence for _, sentence in hidden.needles if case.values[0] in sentence)
        assert text.endswith("1. " + first.partition(case.values[0])[0])  # the answer begins as the needle does
        assert text.startswith({"plain": "Some locker", "bos": "<s>", "chat": "<s>user\n"}[which])


@pytest.mark.parametrize("trial", range(0, 20, 3))
def test_a_needle_lies_at_its_depth(tokenizers, trial):
    task = Niah(NiahConfig(variants=("single",), haystacks=("prose",)))
    given = setting(tokenizers["plain"], 2000)
    case = task.prepare(given, 2000, trial)
    text = tokenizers["plain"].decode(case.tokens)
    begin, end = len(niah._INTRO), text.index("\n\nWhat is")
    place = (text.index("Locker code:") - begin) / (end - begin)
    assert place == pytest.approx(task.parameters(given, 2000, trial)["depth"], abs=0.07)


def test_depths_are_spread_evenly():
    assert sorted(map(depth_of, range(20))) == list(range(0, DEPTHS, 2))
    assert sorted(map(depth_of, range(40))) == list(range(DEPTHS))


@given(variant=st.sampled_from(["single", "multikey", "multivalue"]), trial=st.integers(0, 100))
def test_what_is_hidden(variant, trial):
    hidden = hide(variant, trial, "0 noise")
    assert hidden == hide(variant, trial, "0 noise")
    assert len(hidden.needles) == (1 if variant == "single" else 4)
    assert len(hidden.values) == (4 if variant == "multivalue" else 1)
    assert all(len(value) == 7 and value.isdigit() for value in hidden.values)
    assert len({depth for depth, _ in hidden.needles}) == len(hidden.needles)
    asked = [sentence for _, sentence in hidden.needles if hidden.key in sentence]
    assert len(asked) == len(set(asked)) == len(hidden.values) == len(set(hidden.values))
    # Values in the order of the text, so that their ordinals are true.
    assert all(value in sentence for value, sentence in zip(hidden.values, asked, strict=True))
    assert hidden != hide(variant, trial + 1, "0 noise")


def test_a_score_is_the_share_found():
    assert found_share("it is 1234567.", ["1234567"]) == 1
    assert found_share("1234567, 89", ["1234567", "8900000"]) == 0.5
    assert found_share("AbC", ["aBc"]) == 1


def test_a_context_that_no_needle_fits_into_is_refused(tokenizers):
    task = Niah(NiahConfig())
    with pytest.raises(InputError, match="at least") as error:
        task.prepare(setting(tokenizers["plain"], 100), 100, 0)
    assert error.value.field == "context"


@pytest.mark.parametrize("which", ["plain", "bos", "chat"])
def test_the_least_context_holds_every_trial(tokenizers, which):
    task = Niah(NiahConfig(trials=10))
    with pytest.raises(InputError) as error:
        task.prepare(setting(tokenizers[which], 100), 100, 0)
    least = int(error.value.expected.split()[2])  # at least … tokens
    for document in range(60):
        case = task.prepare(setting(tokenizers[which], least), least, document)
        assert len(case.tokens) + case.steps == least


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"variants": ["singel"]}, "single"),
        ({"variants": ["single", "single"]}, "each once"),
        ({"haystacks": []}, "haystacks"),
        ({"trials": 0}, "trials"),
        ({"max_new_tokens": {"single": 0}}, "at least 1"),
        ({"max_new_tokens": {"other": 3}}, "max_new_tokens"),
    ],
)
def test_fields_that_make_no_sense_are_refused(values, problem):
    from sparsesel.registry import registry

    with pytest.raises(InputError, match=problem):
        registry().make_task("niah", values)


def test_answers_of_one_variant_can_be_given_room():
    assert NiahConfig(max_new_tokens={"single": 9}).max_new_tokens == {**niah._NEW_TOKENS, "single": 9}


def test_it_runs_from_python_and_resumes(model_folder, tmp_path):
    from sparsesel.eval import run

    options = {"contexts": [250], "out": tmp_path / "out", "backend": "eager", "set": {"topk": 8}}
    fields = {"haystacks": ["noise"], "variants": ["single"], "max_new_tokens": {"single": 4}}
    seen = []
    results = run(
        "niah", str(model_folder), ["full", "exact_topk"], trials=1, on_result=seen.append, **options, **fields
    )
    assert [(r.selector, r.task, r.metrics["score"]) for r in results] == [
        ("full", "niah", 0.0),
        ("exact_topk", "niah", 0.0),
    ]
    assert list(results) == seen
    assert seen[1].metrics["attended"] == 8
    assert seen[0].provenance["parameters"]["variant"] == "single"
    (section,) = results.report()
    assert section.tables[0].rows == ["full", "exact_topk"]
    again = run("niah", str(model_folder), ["full", "exact_topk"], trials=2, **options, **fields)
    assert len(again) == 4
    assert again.lines[:2] == results.lines
    assert list(again.lines) == read_results(tmp_path / "out")
    with pytest.raises(InputError, match="results of max_new_tokens"):
        run(
            "niah",
            str(model_folder),
            ["exact_topk"],
            trials=2,
            **{**fields, "max_new_tokens": {"single": 5}},
            **options,
        )


def line(selector, variant, trial, context, score):
    parameters = {
        "variant": variant,
        "haystack": "noise",
        "trial": trial,
        "depth": round(depth_of(trial) / (DEPTHS - 1), 4),
    }
    return {
        "task": "niah",
        "selector": selector,
        "context": context,
        "document": trial,
        "metrics": {"score": score, "density": 1.0, "ms_per_step": 1.0},
        "config": {"name": selector},
        "provenance": {"parameters": parameters, "model": "m@0", "backend": "eager", "device": "cpu"},
    }


def test_a_heat_map_shows_each_depth_of_each_context():
    lines = [line("full", "single", trial, context, 1.0) for trial in range(40) for context in (2048, 1024)]
    lines += [line("quest", "single", trial, 1024, float(depth_of(trial) < 8)) for trial in range(20)]
    (section,) = Niah.report(lines)
    full, quest = section.figures
    assert [figure.title for figure in section.figures] == ["full: single", "quest: single"]
    assert full.x == ["1024", "2048"]
    assert full.values == [[1.0, 1.0]] * 10
    assert quest.y[0] == "0–10"
    assert [row[0] for row in quest.values] == [1.0, 1.0] + [0.0] * 8
    assert (quest.low, quest.high) == (0.0, 1.0)


def test_a_place_without_trials_is_empty():
    (section,) = Niah.report([line("full", "multikey", 0, 1024, 0.5)])
    assert [row[0] for row in section.figures[0].values] == [0.5] + [None] * 9
    assert section.tables[0].columns[0].heading == "multikey\nnoise"
