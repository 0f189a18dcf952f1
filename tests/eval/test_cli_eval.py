"""`sparsesel eval perplexity` as a user meets it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sparsesel.cli.app import app
from sparsesel.eval import runner
from sparsesel.eval.results import RESULTS, ResultStore, read_results


@pytest.fixture
def command(model_folder, text_file, tmp_path):
    """Arguments of a small run that writes to `tmp_path / "out"`."""
    options = {"--model": model_folder, "--context": 64, "--suffix": 16, "--text": text_file, "--out": tmp_path / "out"}
    fixed = ["--selector", "full", "--selector", "retopk:quality", "--set", "topk=8"]

    def make(*more, **changes):
        merged = {**options, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
        pairs = [str(part) for option in merged.items() if option[1] is not None for part in option]
        return ["eval", "perplexity", *fixed, *pairs, *more]

    return make


def invoke(arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "150"})


def test_it_ends_in_the_table(command, tmp_path, monkeypatch):
    result = invoke(command("--documents", "2"))
    assert result.exit_code == 0, result.output
    lines = read_results(tmp_path / "out")
    assert [(line["document"], line["selector"]) for line in lines] == [
        (0, "full"),
        (0, "retopk:quality"),
        (1, "full"),
        (1, "retopk:quality"),
    ]
    assert "context 64: 2 documents, last 16 tokens of each" in result.stdout
    assert result.stdout.startswith("Model tiny; text text.txt; topk 8\n")
    assert "[4/4] retopk:quality" in result.stderr
    # Again: the same table at once, without a model; also from the configuration alone.
    monkeypatch.setattr(runner, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    again = invoke(command("--documents", "2"))
    assert again.stdout == result.stdout
    config = tmp_path / "out" / "config.json"
    third = invoke(["eval", "perplexity", "--config", str(config), "--out", str(tmp_path / "out")])
    assert third.stdout == result.stdout
    assert len(read_results(tmp_path / "out")) == 4


def test_the_table_names_the_backend_that_ran(command):
    result = invoke(command(backend="triton", suffix=3))
    assert result.exit_code == 0, result.output
    assert "triton on cpu" in result.stdout


def test_options_win_over_the_file(command, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('selectors = ["exact_topk"]\nsuffix = 9\ndocuments = 2\n[set]\ntopk = 5\n', encoding="utf-8")
    result = invoke(command("--config", str(config)))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["selectors"] == ["full", "retopk:quality"]
    assert written["tasks"] == {"perplexity": {"suffix": 16, "documents": 2}}
    assert written["set"] == {"topk": 8}


@pytest.mark.parametrize("value", ["2020-01-01", "nan", "'5#'", "[1]", "{a = 1}", "10000000000"])
def test_what_a_file_sets_is_taken_as_it_stands_there(command, tmp_path, value):
    config = tmp_path / "run.toml"
    config.write_text(f"selectors = ['retopk']\n[set]\ntopk = {value}\n", encoding="utf-8")
    result = invoke(["eval", "perplexity", "--config", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert "error in retopk.topk" in result.stderr
    config.write_text(f"selectors = ['retopk']\n[set]\n'topk=3' = {value}\n", encoding="utf-8")
    result = invoke(["eval", "perplexity", "--config", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert "error in --set" in result.stderr


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "nowhere/to-be-found"}, "model"),
        ({"model": "../nowhere"}, "model"),
        ({"model": "gpt-17"}, "model"),
        ({"context": 300}, "context"),
        ({"context": 0}, "contexts"),
        ({"suffix": 62}, "suffix"),
        ({"suffix": 0}, "suffix"),
        ({"documents": 10_000}, "documents"),
        ({"documents": 10**30}, "documents"),
        ({"skip_chars": 10_000_000}, "skip_chars"),
        ({"skip_chars": -1}, "skip_chars"),
        ({"text": "/no/such/file.txt"}, "text"),
        ({"text": "/dev/null"}, "text"),
        ({"out": "/dev/null/x"}, "out"),
        ({"out": ""}, "--out"),
        ({"out": " "}, "--out"),
        ({"config": "/no/such.toml"}, "config"),
        ({"selector": "retopk2"}, "selector"),
        ({"selector": "retopk,cache_size=2,recall_size=3"}, "recall_size"),
        ({"selector": "full"}, "--selector"),
        ({"selector": "retopk,similarity_threshold=0.9"}, "--selector"),
        ({"set": "tokp=3"}, "--set"),
        ({"backend": "native"}, "backend"),
        ({"backend": "triton"}, "backend"),
    ],
)
def test_bad_input_is_refused_before_any_model_loads(command, monkeypatch, changes, field):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(runner, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    result = invoke(command(**changes))
    assert result.exit_code == 2, result.output
    assert field in result.stderr
    for label in ("expected", "got", "remedy"):
        assert label in result.stderr
    assert "Traceback" not in result.stderr


def test_one_text_under_two_names_is_refused(command, text_file, tmp_path):
    (tmp_path / "link.txt").symlink_to(text_file)
    for again in (text_file, tmp_path / "link.txt"):
        result = invoke(command("--text", str(again)))
        assert result.exit_code == 2, result.output
        assert "error in text" in result.stderr
        assert f"{text_file} and {again}" in result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "/no/such/file.txt"},
        {"text": "/dev/null"},
        {"skip_chars": 10_000_000},
        {"out": "/dev/null/x"},
        {"out": __file__},
        {"out": ""},
        {"model": "./nowhere"},
        {"selector": "retopk,similarity_threshold=0.9"},
    ],
    ids=str,
)
def test_what_can_be_refused_without_torch_is(command, changes):
    """Loading it takes seconds."""
    code = (
        f"import sys; sys.argv = ['sparsesel', *{command(**changes)!r}]\n"
        "import sparsesel.cli\n"
        "try: sparsesel.cli.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 False False\n", result.stderr


def test_a_folder_in_use_is_refused(command, tmp_path):
    with ResultStore(tmp_path / "out"):
        result = invoke(command())
    assert result.exit_code == 2
    assert "no other process" in result.stderr


# Sends itself a signal in the middle of its fourth point.
KILLED = """
import os
import signal
from sparsesel.cli import main
from sparsesel.eval.decode import Decoder

# What runs in the background is started with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
step, steps = Decoder.step, []

def until_killed(self, token):
    steps.append(1)
    if len(steps) == 3 * 16 + 5:
        os.kill(os.getpid(), {signal})
    return step(self, token)

Decoder.step = until_killed
main()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_goes_on_and_repeats_nothing(command, tmp_path, how):
    arguments = command("--documents", "12")
    path = tmp_path / "out" / RESULTS
    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(signal=int(how)), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    kept, newline = path.read_bytes(), b"\n"
    assert kept.count(newline) == 3
    if how == signal.SIGINT:
        assert killed.returncode == 130
        assert "3 of 24 points are kept" in killed.stderr
        assert "Traceback" not in killed.stderr
    else:
        assert killed.returncode == -signal.SIGKILL
    result = invoke(arguments)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(kept)
    lines = read_results(tmp_path / "out")
    assert len({(line["document"], line["selector"]) for line in lines}) == len(lines) == 24
