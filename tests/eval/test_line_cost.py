"""Every result says what a step of its selector costs by design, over the layers that the model has."""

import pytest
from typer.testing import CliRunner

from sparsesel import make_config
from sparsesel.cli.app import app
from sparsesel.config import LayeredConfig
from sparsesel.eval import runner
from sparsesel.eval.cost import CostConfig, cost_rows, model_cost
from sparsesel.eval.results import read_results
from sparsesel.hf.models import load_model, resolve

GEOMETRY = CostConfig(heads=4, kv_heads=2, head_dim=8, layers=2, contexts=(64,), dtype="float32")
FIELDS = ("attended", "bytes_read", "state_bytes")


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(resolve(str(model_folder)), device="cpu")


@pytest.mark.parametrize(
    "spec", ["full", "exact_topk,topk=8", "retopk,topk=8", "quest,topk=8,page_size=4,dense_layers=1", "layers"]
)
def test_it_is_the_cost_of_the_models_geometry(model, spec):
    layered = LayeredConfig(layers={"1": make_config("retopk,topk=8")})
    config = layered if spec == "layers" else make_config(spec)
    (row,) = cost_rows(GEOMETRY, {"it": config})
    cost = model_cost(model, config, 64, {})
    assert [cost[name] for name in FIELDS] == pytest.approx([getattr(row, name) for name in FIELDS])
    assert cost["layers"] == 2
    assert cost["dense_layers"] == {"full": 2, "layers": 1}.get(spec, row.dense_layers)
    assert cost["step_bytes"] == pytest.approx(cost["bytes_read"])  # nothing was counted
    assert cost["full_bytes"] / cost["bytes_read"] == pytest.approx(row.speedup_full)
    assert cost["exact_bytes"] / cost["bytes_read"] == pytest.approx(row.speedup_exact)


def evaluate(model_folder, text_file, out, *more):
    arguments = ["eval", "perplexity", "--model", model_folder, "--text", text_file, "--context", 64, "--suffix", 4]
    arguments += ["--out", out, *more]
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "150"})


def test_every_line_has_it_and_unequal_budgets_are_marked(model, model_folder, text_file, tmp_path):
    specs = ["--selector", "full", "--selector", "exact_topk,topk=8", "--selector", "retopk,topk=16"]
    result = evaluate(model_folder, text_file, tmp_path / "out", *specs)
    assert result.exit_code == 0, result.output
    for line in read_results(tmp_path / "out"):
        assert line["provenance"]["cost"] == model_cost(model, make_config(line["selector"]), 64, line["metrics"])
    marked = " ".join(result.stdout.split())
    assert "Unequal budgets in perplexity at 64: topk 8 for exact_topk,topk=8; topk 16 for retopk,topk=16." in marked
    assert "Unequal budgets" not in evaluate(model_folder, text_file, tmp_path / "alike", *specs[:4]).stdout


def test_paths_that_were_counted_change_what_a_step_reads(model):
    config = make_config("retopk,topk=4")
    always, never = {"exact_share": 0.0, "reuse_share": 1.0}, {"exact_share": 1.0, "reuse_share": 0.0}
    costs = [model_cost(model, config, 64, counted) for counted in (always, never)]
    assert costs[0]["step_bytes"] == pytest.approx(costs[0]["bytes_read"])
    assert costs[1]["step_bytes"] >= costs[1]["exact_bytes"]


def test_an_account_that_fails_loses_no_result(model_folder, text_file, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("none")

    monkeypatch.setattr(runner, "model_cost", fail)
    result = evaluate(model_folder, text_file, tmp_path / "out", "--selector", "full")
    assert result.exit_code == 0, result.output
    (line,) = read_results(tmp_path / "out")
    assert line["provenance"]["cost"] == {"error": "ZeroDivisionError: none"}
