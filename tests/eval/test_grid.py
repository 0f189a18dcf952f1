"""Several tasks by one file, and what is refused of it."""

import contextlib
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsesel import InputError
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


@pytest.mark.parametrize(
    ("tables", "field", "expected"),
    [
        ("[tasks]\nperplexity = 3", "eval.tasks.perplexity", "a table "),
        ("tasks = 3", "eval.tasks", "a table "),
        ("", "tasks of", "Add [tasks.perplexity]"),
        ("[tasks.perplexity]\nsuffix = 300\n[tasks.niah]", "suffix of task perplexity", "at most 247"),
        ("[tasks.perplexity]\nsuffix = 4\n[tasks.niah]\ntrials = 0", "niah.trials", "greater than"),
        ("[tasks.perplexity]\nsuffix = 4\n[tasks.sensitivity.values]\ntopk = 0", "", "at least 1"),
        (
            "[tasks.sensitivity.values]\ntopk = [8, [1]]",
            "sensitivity.values.topk.1",
            "a boolean, an integer, a number or text (",
        ),
        ("[tasks.latency]\npath_mix = ''", "latency.path_mix", "a path ("),
        ("[tasks.perplexity]\nsuffix = 4\n[names]\nful = 'x'", "names", "Did you mean 'full'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_task_and_the_file(grid, tmp_path, tables, field, expected):
    grid.write_text(grid.read_text().partition("[tasks")[0] + tables)
    result = invoke("eval", "--config", grid, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert field in result.stderr.splitlines()[0]
    assert result.stderr.splitlines()[0].endswith(f"of {grid}")
    assert expected in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_folder_is_no_fault_of_the_file(grid):
    result = invoke("eval", "--config", grid, "--out", grid)
    assert result.exit_code == 2
    assert result.stderr.startswith("error in out\n")


def test_every_number_of_a_task_has_an_upper_bound():
    """Beyond it something else would fail, or a run not end."""
    import annotated_types
    from pydantic import TypeAdapter, ValidationError

    from sparsesel.registry import registry

    ours = [name for name, found in registry().tasks.items() if found.distribution == "sparsesel"]
    assert len(ours) == 11
    for name in ours:
        for key, field in registry().task_config_class(name).model_fields.items():
            kind: Any = field.annotation
            with contextlib.suppress(ValidationError):
                TypeAdapter(kind).validate_python(1.5, strict=True)
                continue  # a share or a speed
            with contextlib.suppress(ValidationError):
                TypeAdapter(kind).validate_python(7, strict=True)
                assert any(isinstance(one, annotated_types.Le) for one in field.metadata), (name, key)
                with pytest.raises(InputError, match="less than or equal"):
                    registry().make_task_config(name, {key: 2**63})


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
