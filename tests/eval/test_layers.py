"""Selectors by layers, from a file, wherever a selector is named: `sparsify`, the evaluation, the command line."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sparsesel import InputError, make_config, sparsify
from sparsesel.cli.app import app
from sparsesel.config import LayeredConfig
from sparsesel.eval import runner
from sparsesel.eval.decode import Prefill
from sparsesel.eval.results import read_results
from sparsesel.eval.tasks.perplexity import score
from sparsesel.hf import models as hf_models

SUFFIX = 24


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 400, (96,), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def layered(tmp_path):
    path = tmp_path / "layered.toml"
    path.write_text('layers = {"0" = "full", "1-" = "exact_topk,topk=6"}\n', encoding="utf-8")
    return str(path)


def test_a_file_is_the_mapping_it_holds(model, layered):
    chosen = {0: "full", "1-": "exact_topk,topk=6"}
    for selector in (layered, LayeredConfig(layers={str(k): make_config(v) for k, v in chosen.items()}), chosen):
        with sparsify(model, selector) as session:
            assert [str(one.config) for one in session.selectors.values()] == ["full", "exact_topk,topk=6"]
    with sparsify(model, layered, topk=4) as session:
        assert session.selectors[1].config.topk == 4
    with pytest.raises(InputError, match="Did you mean 'topk'"):
        sparsify(model, layered, topkk=4)


def scores(model, tokens, *selectors):
    prefill = Prefill(model, tokens[: -SUFFIX - 1], dict(enumerate(selectors)))
    return [score(prefill, index, tokens[-SUFFIX - 1 :]) for index in range(len(selectors))]


def nll(model, tokens, selector):
    return scores(model, tokens, selector)[0]["nll"]


def test_selectors_by_layers_share_a_prefill_with_others(model, tokens):
    """Each decodes as it would alone, whichever layers it leaves dense."""
    selections = [
        {"0": "retopk,topk=8", "1": "exact_topk,topk=8"},
        "retopk,topk=6",
        {"1": "retopk,topk=6,similarity_threshold=0.2"},
        {"0-": "full"},
    ]
    together = scores(model, tokens, *selections)
    for selection, metrics in zip(selections, together, strict=True):
        assert metrics["nll"] == nll(model, tokens, selection)
    assert len({metrics["nll"] for metrics in together}) == 4


def test_the_layers_that_a_selector_serves_are_those_measured(model, tokens):
    dense = nll(model, tokens, "full")
    assert nll(model, tokens, {"0": "full"}) == pytest.approx(dense, rel=1e-6)
    (both,) = scores(model, tokens, {"0": "full", "1": "exact_topk,topk=6"})
    (one,) = scores(model, tokens, {"1": "exact_topk,topk=6"})
    assert both["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert abs(one["nll"] - dense) > 0.1
    assert one["attended"] == 6
    assert both["attended"] > 6


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "150"})


@pytest.fixture
def perplexity(model_folder, text_file, tmp_path):
    def run(*more):
        options = ["--model", model_folder, "--context", 64, "--suffix", 16, "--text", text_file]
        return invoke("eval", "perplexity", *options, "--out", tmp_path / "out", *more)

    return run


def test_perplexity_records_what_each_layer_had_and_resumes(perplexity, layered, tmp_path):
    options = ["--selector", "full", "--selector", "exact_topk", "--selector", layered, "--set", "topk=8"]
    result = perplexity(*options)
    assert result.exit_code == 0, result.output
    *_, line = read_results(tmp_path / "out")
    assert line["selector"] == layered
    assert line["config"] == {"layers": {"0": {"name": "full"}, "1-": {"name": "exact_topk", "topk": 8}}}
    assert line["provenance"]["selector_from"].startswith("sparsesel ")
    assert perplexity(*options).stdout == result.stdout
    # Other selectors under the same name are other work.
    changed = perplexity("--selector", layered)
    assert changed.exit_code == 2
    assert "results of config" in changed.stderr


def test_a_run_file_may_name_one(perplexity, layered, tmp_path):
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"selectors": [layered], "set": {"topk": 5}}))
    result = perplexity("--config", config)
    assert result.exit_code == 0, result.output
    assert read_results(tmp_path / "out")[0]["config"]["layers"]["1-"]["topk"] == 5


def test_generate_takes_one(model_folder, layered):
    result = invoke(
        "generate", "--model", model_folder, "--selector", layered, "--prompt", "The for", "--max-new-tokens", 4
    )
    assert result.exit_code == 0, result.output
    assert "4 tokens" in result.stdout


def test_layers_that_the_model_lacks_are_refused_before_it_loads(perplexity, layered, monkeypatch, model_folder):
    def never(*_, **__):
        pytest.fail("loaded the model")

    monkeypatch.setattr(runner, "load_model", never)
    monkeypatch.setattr(hf_models, "load_model", never)
    with open(layered, "w", encoding="utf-8") as file:
        file.write('layers = {"0-2" = "full"}\n')
    generate = invoke("generate", "--model", model_folder, "--selector", layered, "--prompt", "The")
    for result in (perplexity("--selector", layered), generate):
        assert result.exit_code == 2
        assert "layers among 0-1" in result.stderr


def test_show_explains_each_range(layered):
    shown = invoke("show", layered, "--set", "topk=9").stdout
    assert "layers 0\nfull:" in shown
    assert "layers 1-\nexact_topk:" in shown
    assert "topk = 9 *" in shown
    as_json = json.loads(invoke("show", layered, "--json").stdout)
    assert as_json["config"]["layers"]["1-"] == {"name": "exact_topk", "topk": 6}
    assert as_json["layers"]["0"]["fields"] == []


def test_cost_sums_what_each_layer_has(layered):
    geometry = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--layers", "4", "--context", "512", "--json"]
    specs = [part for spec in ("full", "exact_topk,topk=6", layered) for part in ("--selector", spec)]
    full, exact, mixed = json.loads(invoke("cost", *geometry, *specs).stdout)["rows"]
    assert mixed["bytes_read"] == pytest.approx(full["bytes_read"] / 4 + 3 * exact["bytes_read"] / 4)
    assert mixed["attended"] == pytest.approx((512 + 3 * 6) / 4)
    assert mixed["dense_layers"] == 1
    assert mixed["speedup_full"] == pytest.approx(full["bytes_read"] / mixed["bytes_read"])
    assert full["dense_layers"] == exact["dense_layers"] == 0
