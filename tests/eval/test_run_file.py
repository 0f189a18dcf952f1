"""`config.json` gives a run back from anywhere, and keeps what earlier runs of the folder were."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from sparsesel import InputError
from sparsesel.cli.app import app
from sparsesel.config import RunConfig, build, load_file
from sparsesel.eval import run, run_file, runner
from sparsesel.eval.results import RESULTS, ResultStore, read_results
from sparsesel.eval.selectors import absolute_spec, resolve_selectors


def invoke(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def here(tmp_path, model_folder, text_file, monkeypatch):
    """A folder to run in, with everything that a run may name."""
    folder = tmp_path / "here"
    shutil.copytree(model_folder, folder / "tiny")
    shutil.copy(text_file, folder / "text.txt")
    (folder / "layered.toml").write_text('layers = {"0" = "full", "1" = "exact_topk"}\n')
    monkeypatch.chdir(folder)
    return folder


COMMON = ("--model", "./tiny", "--context", 96, "--text", "text.txt", "--backend", "eager", "--out", "out")


def test_relative_paths_hold_from_elsewhere(here, tmp_path, monkeypatch):
    invoke("calibrate", "loki", "--model", "./tiny", "--text", "text.txt", "--max-tokens", 300, "--out", "components")
    selectors = ["full", "layered.toml", "retopk", "loki,rank=4,calibration=components"]
    named = [part for spec in selectors for part in ("--selector", spec)]
    invoke("eval", "perplexity", *named, "--set", "topk=8", "--suffix", 6, *COMMON)
    mixed = ("--set", "topk=8", "--path-mix", "out", "--steps", 2, "--repeats", 1)
    invoke("eval", "latency", "--selector", "retopk", "--selector", "layered.toml", *mixed, *COMMON[:-1], "timed")
    before = {name: (here / name / RESULTS).read_bytes() for name in ("out", "timed")}
    assert [line["selector"] for line in read_results(here / "out")] == selectors
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(runner, "load_model", lambda *_, **__: pytest.fail("measured again"))
    for name, kept in before.items():
        invoke("eval", "--config", here / name / "config.json", "--out", here / name)
        assert (here / name / RESULTS).read_bytes() == kept
    timed = load_file(here / "timed" / "config.json")
    assert timed["tasks"]["latency"]["path_mix"] == str(here / "out")
    # One of its selectors, by its name there.
    invoke("eval", "perplexity", "--config", here / "out/config.json", "--selector", "retopk", "--out", here / "out")


def test_the_files_of_tasks_are_absolute(here):
    from sparsesel.registry import registry

    for task, field in (("longbench", "folder"), ("lm-eval", "include_path"), ("latency", "path_mix")):
        for given, kept in (("data/../x", here / "x"), ("~/x", os.path.expanduser("~/x"))):
            assert getattr(registry().make_task_config(task, {field: given}), field) == str(kept)
        for bad in ("", " ", "a\0b"):
            with pytest.raises(InputError, match=f"{task}.{field}: expected a path"):
                registry().make_task_config(task, {field: bad})
    assert registry().make_task_config("latency", {"path_mix": "1/0/0"}).model_dump()["path_mix"] == "1/0/0"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("retopk:quality,topk=128", None),
        (" layered.toml , topk = 8", "HERE/layered.toml, topk = 8"),
        ("../x.YAML", "UP/x.YAML"),
        ("loki,calibration=layered.toml,rank=4", "loki,calibration=HERE/layered.toml,rank=4"),
        ("loki,calibration='layered.toml'", "loki,calibration=HERE/layered.toml"),
        ("loki,calibration=none", None),
    ],
)
def test_specs_with_absolute_paths(here, spec, expected):
    wanted = spec if expected is None else expected.replace("HERE", str(here)).replace("UP", str(here.parent))
    assert absolute_spec(spec) == wanted
    assert absolute_spec(wanted) == wanted


def test_selectors_may_be_called_something_else(model_folder, text_file):
    names = {"retopk,topk=8": "mine"}
    assert list(resolve_selectors(["full", "retopk,topk=8"], names=names)) == ["full", "mine"]
    for bad, expected in (
        ({"retopk,topk=9": "mine"}, "Did you mean"),
        ({"retopk,topk=8": "full"}, "a name for each"),
        ({"retopk,topk=8": " "}, "a name for each"),
    ):
        with pytest.raises(InputError, match=expected):
            resolve_selectors(["full", "retopk,topk=8"], names=bad)


def test_a_path_mix_is_compared_by_what_it_says(model_folder, text_file, tmp_path):
    common = {"set": {"topk": 8}, "texts": [text_file], "backend": "eager"}
    for name, suffix in (("a", 8), ("b", 9)):
        run("perplexity", str(model_folder), ["retopk"], contexts=[64], suffix=suffix, out=tmp_path / name, **common)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")

    def timed(name):
        return run(
            "latency", str(model_folder), ["retopk"], contexts=[96], path_mix=str(tmp_path / name), steps=2, repeats=1,
            out=tmp_path / "out", set={"topk": 8}, backend="eager",
        )  # fmt: skip

    (line,) = timed("a").lines
    assert line["provenance"]["parameters"]["path_mix_folder"] == str(tmp_path / "a")
    before = (tmp_path / "out" / RESULTS).read_bytes()
    timed("moved")
    with pytest.raises(InputError, match="results of path_mix"):
        timed("b")
    assert (tmp_path / "out" / RESULTS).read_bytes() == before
    with (tmp_path / "moved" / RESULTS).open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"path_mix: .*Line 2 of .* is left out: task is missing"):
        timed("moved")


def test_a_path_mix_need_not_be_writable(model_folder, text_file, tmp_path, monkeypatch):
    out = tmp_path / "mix"
    run("perplexity", str(model_folder), ["retopk,topk=8"], texts=[text_file], contexts=[64], suffix=8, out=out)
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: "mix" not in str(path) and access(path, mode))
    fields = {"path_mix": str(out), "steps": 2, "repeats": 1}
    assert len(run("latency", str(model_folder), ["retopk,topk=8"], contexts=[96], **fields)) == 1


def config(tasks=("a",), selectors=("full",), contexts=(64,), **more):
    fields = tasks if isinstance(tasks, dict) else {name: {} for name in tasks}
    values = {"model": "m", "tasks": fields, "selectors": selectors, "contexts": contexts, **more}
    return build(RunConfig, values, where="run")


def written(folder, *configs):
    with ResultStore(folder) as store:
        for one in configs:
            run_file.write(store, one)
    return {path.name: build(RunConfig, json.loads(path.read_text()), where="f") for path in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        ({}, {}, {}),
        ({"tasks": "a"}, {"tasks": "b"}, {"tasks": "ab"}),
        ({"selectors": ("full", "x")}, {"selectors": ("y", "x")}, {"selectors": ("full", "x", "y")}),
        ({"contexts": (64,)}, {"contexts": (96,)}, {"contexts": (64, 96)}),
        ({}, {"tasks": "ab", "contexts": (64, 96)}, {"tasks": "ab", "contexts": (64, 96)}),
        # A run of both would measure more, or something else, than the two did.
        ({"tasks": "a", "contexts": (64,)}, {"tasks": "b", "contexts": (96,)}, None),
        ({"set": {"topk": 8}}, {"set": {"topk": 9}, "selectors": ("y",)}, None),
        ({"tasks": {"a": {"values": 1}}}, {"tasks": {"a": {"values": 2}}}, None),
        ({"texts": ("/a",)}, {"texts": ("/b",)}, None),
        ({"names": {"full": "mine"}}, {}, None),
        (
            {"names": {"full": "mine"}},
            {"selectors": ("y",), "names": {"y": "other"}},
            {"selectors": ("full", "y"), "names": {"full": "mine", "y": "other"}},
        ),
    ],
)
def test_what_an_earlier_run_was_is_kept(tmp_path, old, new, both):
    files = written(tmp_path, config(**old), config(**new), config(**new))
    if both is None:
        assert files == {"config.json": config(**new), "config.1.json": config(**old)}
    else:
        assert files == {"config.json": config(**both)}


def test_earlier_runs_are_kept_once_each_and_whatever_they_are(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"old": "\xff"}')
    one, two = config(set={"topk": 8}), config(set={"topk": 9})
    with ResultStore(tmp_path) as store:
        for each in (one, two, one, two):
            run_file.write(store, each)
    assert (tmp_path / "config.1.json").read_bytes() == b'{"old": "\xff"}'
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "config.1.json",
        "config.2.json",
        "config.3.json",
        "config.json",
    ]


def test_adding_a_task_keeps_the_others(here):
    invoke("eval", "perplexity", "--selector", "full", "--suffix", 6, *COMMON)
    invoke("eval", "e2e", "--selector", "full", "--steps", 2, *COMMON)
    assert load_file("out/config.json")["tasks"].keys() == {"perplexity", "e2e"}
    invoke("eval", "--config", "out/config.json", "--out", "out")
    assert len(read_results(here / "out")) == 2
