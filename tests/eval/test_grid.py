"""Several tasks by one file, and what is refused of it."""

import pytest
from typer.testing import CliRunner

from sparsesel.cli.app import app
from sparsesel.eval.results import read_results


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "150"})


@pytest.fixture
def grid(model_folder, text_file, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        f'model = "{model_folder}"\nselectors = ["full", "exact_topk"]\nset = {{topk = 8}}\ncontexts = [250]\n'
        f'texts = ["{text_file}"]\nbackend = "eager"\n[tasks.perplexity]\nsuffix = 4\n'
        '[tasks.niah]\nvariants = ["single"]\nhaystacks = ["noise"]\ntrials = 1\nmax_new_tokens = {single = 3}\n'
    )
    return path


def test_a_file_runs_its_tasks_into_one_folder(grid, tmp_path):
    result = invoke("eval", "--config", grid, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = read_results(tmp_path / "out")
    assert [(line["task"], line["selector"]) for line in lines] == [
        ("perplexity", "full"),
        ("perplexity", "exact_topk"),
        ("niah", "full"),
        ("niah", "exact_topk"),
    ]
    assert "Perplexity, context 250" in result.stdout
    assert "Needles, context 250" in result.stdout
    assert invoke("eval", "--config", tmp_path / "out" / "config.json", "--out", tmp_path / "out").exit_code == 0
    more = invoke("eval", "niah", "--config", grid, "--trials", 2, "--out", tmp_path / "out")
    assert more.exit_code == 0, more.output
    assert len(read_results(tmp_path / "out")) == 6


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["eval", "--config", "GRID"], "--out"),
        (["eval", "--out", "x"], "--config"),
        (["eval", "prplexity", "--out", "x"], "Did you mean 'perplexity'"),
        (["eval", "niah", "--config", "GRID", "--out", "x", "--variants", "singel"], "variants"),
        (["eval", "niah", "--config", "GRID", "--out", "x", "--context", "90"], "error in context"),
    ],
)
def test_what_makes_no_sense_is_refused(grid, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(grid if part == "GRID" else part for part in arguments))
    assert result.exit_code == 2, result.output
    assert problem in result.stderr


def test_the_demonstration_is_a_grid_of_every_selector_of_ours():
    """What `make demo` runs: nothing of it is refused."""
    from pathlib import Path

    from sparsesel.config import RunConfig, build, load_file
    from sparsesel.eval.selectors import resolve_selectors
    from sparsesel.registry import registry

    path = Path(__file__).parents[2] / "examples" / "demo.toml"
    config = build(RunConfig, load_file(path), where=str(path))
    named = {one.name for one in resolve_selectors(config.selectors, config.set).values()}
    assert named == {name for name, found in registry().selectors.items() if found.distribution == "sparsesel"}
    assert list(config.tasks) == ["perplexity", "niah"]
    for name, fields in config.tasks.items():
        registry().make_task(name, fields)
