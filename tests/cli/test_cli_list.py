"""`sparsesel list`, `show` and `env`, and how refused input is told."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import sparsesel
from sparsesel.cli import environment, listing
from sparsesel.cli.app import app
from sparsesel.cli.console import safe
from sparsesel.registry import GROUP, Registry

HOSTILE = """
import sparsesel

@sparsesel.hookimpl
def sparsesel_selectors():
    return [sparsesel.SelectorPlugin(
        name="hostile", summary="wipes \\x1b[2J the screen \\u202e and [red]reddens[/red] :boom: [/]", paper="\\x9b31m",
        config="hostile:Config", factory="hostile:Made",
    )]

class Config(sparsesel.SelectorConfig):
    name: str = "hostile"
"""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*args):
        result = CliRunner().invoke(app, list(args))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "broken.py").write_text("raise RuntimeError('bad \\x1b]0;title\\x07 [bold]')")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [importlib.metadata.EntryPoint(name, name, GROUP) for name in ("hostile", "broken")]
    monkeypatch.setattr(listing, "registry", lambda: Registry(entries))
    yield
    sys.modules.pop("hostile", None)


def test_list_names_every_selector_with_its_origin(run):
    result = run("list")
    assert result.exit_code == 0
    for name in ("full", "exact_topk", "retopk", "2607.27692", f"sparsesel {sparsesel.__version__}"):
        assert name in result.stdout


def test_list_as_json(run):
    listed = json.loads(run("list", "--json").stdout)
    by_name = {row["name"]: row for row in listed["selectors"]}
    assert by_name["retopk"]["distribution"] == "sparsesel"
    assert by_name["retopk"]["version"] == sparsesel.__version__
    assert "2607.27692" in by_name["retopk"]["paper"]
    assert all(row["summary"] for row in by_name.values())
    assert listed["broken"] == []


def test_a_broken_plugin_is_listed_with_its_error_and_no_failure(run, hostile):
    result = run("list")
    assert result.exit_code == 0
    assert "broken: broken (from unknown unknown): RuntimeError: bad" in result.stdout
    (broken,) = json.loads(run("list", "--json").stdout)["broken"]
    assert broken["error"] == "RuntimeError: bad \x1b]0;title\x07 [bold]"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"config": "hostile:Gone"}, "expected `config` 'hostile:Gone' to import"),
        ({"config": "gone:Config"}, "No module named 'gone'"),
        ({"factory": "gone:Made"}, "expected `factory` 'gone:Made' to import"),
        ({"factory": "hostile.gone:Made"}, "expected `factory` 'hostile.gone:Made' to import"),
        ({"factory": ":"}, "expected `factory` ':' to import"),
        ({"calibrate": "gone:Learner"}, "expected `calibrate` 'gone:Learner' to import"),
        ({"presets": "gone"}, "No module named 'gone'"),
    ],
    ids=str,
)
def test_a_plugin_that_names_what_is_not_there_is_broken(run, hostile, monkeypatch, changes, error):
    registry = listing.registry()
    found = registry.selectors["hostile"]
    registry.selectors["hostile"] = dataclasses.replace(found, plugin=dataclasses.replace(found.plugin, **changes))
    monkeypatch.setattr(listing, "registry", lambda: registry)
    monkeypatch.setattr(environment, "registry", lambda: registry)
    listed = json.loads(run("list", "--json").stdout)
    assert listed["selectors"] == []
    assert [row["name"] for row in listed["broken"]] == ["broken", "hostile"]
    assert error in listed["broken"][1]["error"]
    assert "broken: hostile (from unknown unknown): expected" in run("list").stdout
    assert error in json.loads(run("env", "--json").stdout)["broken plugins"][1]


@pytest.mark.parametrize("args", [["list"], ["list", "--json"]])
def test_what_others_wrote_cannot_drive_the_terminal(run, hostile, args):
    output = run(*args).stdout
    assert not any(char in output for char in "\x1b\x07\x9b\u202e")
    assert "[red]reddens[/red] :boom: [/]" in output
    assert "[bold]" in output


def test_safe_keeps_text_and_escapes_what_drives_a_terminal():
    assert safe("naïve ✓ 日本 [x]\n\t") == "naïve ✓ 日本 [x]\n\t"
    assert safe("a\u200db") == "a\u200db"
    assert safe("\x1b[31m\r\x00\x7f\x9b\u202e\udcff") == "\\x1b[31m\\r\\x00\\x7f\\x9b\\u202e\\udcff"


# show


def test_show_explains_every_field_and_marks_what_was_changed(run):
    result = run("show", "retopk:quality", "--set", "topk=128")
    assert result.exit_code == 0
    assert "topk = 128 *  (default 512; int | str)" in result.stdout
    assert "similarity_threshold = 0.9 *  (default 0.85;" in result.stdout
    assert "cache_size = 32  (default 32; int, ≥ 1)" in result.stdout
    assert "retrieval = similarity  (default similarity; similarity | recent)" in result.stdout
    assert "preset retopk:quality sets similarity_threshold = 0.9" in result.stdout
    assert "2607.27692" in result.stdout


def test_show_without_changes_marks_nothing(run):
    assert "*" not in run("show", "retopk").stdout


def test_show_as_json_gives_a_config_that_reads_back(run, tmp_path):
    shown = json.loads(run("show", "retopk:quality,window_size=0", "--set", "topk=6.25%", "--json").stdout)
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["topk"]["value"] == "6.25%"
    assert {name for name, field in fields.items() if field["changed"]} == {
        "topk",
        "similarity_threshold",
        "window_size",
    }
    assert all(field["description"] for field in fields.values())
    assert set(shown["presets"]) >= {"paper", "quality", "group"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(shown["config"]))
    again = json.loads(run("show", str(path), "--json").stdout)
    assert again["config"] == shown["config"]


def test_show_of_a_selector_without_fields(run):
    assert "no fields" in run("show", "full").stdout


REFUSED = [
    (["show", "retopkk"], "selector", "Did you mean 'retopk'?"),
    (["show", "retopk:qualty"], "preset of retopk", "Did you mean 'quality'?"),
    (["show", "retopk", "--set", "topkk=3"], "--set", "Did you mean 'topk'?"),
    (["show", "retopk,topkk=3"], "retopk.topkk", "Did you mean 'topk'?"),
    (["show", "full", "--set", "topk=3"], "--set", "a selector with fields"),
    (["show", "retopk", "--set", "name=full"], "--set", "a field among"),
    (["show", "retopk", "--set", "topk=0"], "retopk.topk", "at least 1"),
    (["show", "retopk", "--set", "topk=-1"], "retopk.topk", "at least 1"),
    (["show", "retopk", "--set", "recall_size=33"], "retopk.recall_size", "cache_size"),
    (["show", "retopk", "--set", "window_size=-1"], "retopk.window_size", "greater than or equal to 0"),
    (["show", "retopk", "--set", "similarity_threshold=high"], "retopk.similarity_threshold", "number"),
    (["show", "retopk", "--set", "similarity_threshold=nan"], "retopk.similarity_threshold", "finite"),
    (["show", "retopk", "--set", "topk"], "--set", "field=value"),
    (["show", "retopk", "--set", "topk=1", "--set", "topk=2"], "--set", "twice"),
    (["show", "gone.toml"], "config", "no such file"),
    (["show", ""], "selector", "sparsesel list"),
]


@pytest.mark.parametrize(("args", "field", "part"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_bad_input_is_told_in_four_parts_with_exit_code_2(run, args, field, part):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first == f"error in {field}"
    assert [line.split()[0] for line in rest] == ["expected", "got", "remedy"]
    assert part in result.stderr


def test_brackets_and_escapes_in_input_are_shown_as_they_are(run):
    stderr = run("show", "[red]x[/red]:[/]\x1b[31m").stderr
    assert "[red]x[/red]:[/]\\x1b[31m" in stderr
    assert "\x1b" not in stderr


def test_unknown_commands_and_options_are_refused(run):
    for args in (["lst"], ["list", "--jsn"], ["show"], ["show", "full", "extra"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr


def test_ctrl_c_is_exit_code_130_with_a_word(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "registry", interrupt)
    result = run("list")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr


def test_version(run):
    assert run("--version").stdout == f"sparsesel {sparsesel.__version__}\n"


# env


def test_env_tells_versions_devices_backends_and_plugins(run):
    report = json.loads(run("env", "--json").stdout)
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["versions"]["sparsesel"] == sparsesel.__version__
    assert any(device.startswith("cpu") for device in report["devices"])
    assert ("eager", True) in [(b["name"], b["available"]) for b in report["backends"]]
    assert any(plugin.startswith("retopk from sparsesel") for plugin in report["plugins"])
    text = run("env").stdout
    for part in ("python ", "transformers ", "backend ", "eager: available", "retopk from sparsesel"):
        assert part in text


# The installed command


def command(*args, **environment):
    return subprocess.run(
        [sys.executable, "-c", "from sparsesel.cli import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_the_installed_command_points_at_main():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="sparsesel")
    assert script.value == "sparsesel.cli:main"
    assert script.load().__name__ == "main"


def test_refusal_in_a_process_of_its_own_has_no_traceback():
    result = command("show", "nope")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error in selector\n")
    assert "Traceback" not in result.stderr


def test_a_terminal_without_unicode_gets_escapes():
    result = command("show", "retopk", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0
    assert "int, \\u2265 1" in result.stdout
