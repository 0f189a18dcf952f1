"""`sparsesel report` as a user meets it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sparsesel.cli.app import app


def invoke(*arguments, columns=110):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": str(columns)})


@pytest.fixture
def results(tmp_path, lines):
    """Without needles: fewer figures to draw."""
    folder = tmp_path / "results"
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines if line["task"] == "perplexity")
    (folder / "results.jsonl").write_text(text)
    return folder


def test_it_writes_the_report_and_says_where(results):
    result = invoke(results)
    assert result.exit_code == 0, result.output
    out = results / "report"
    for path in (out / "report.html", out / "report.md", out / "figures"):
        assert str(path) in result.stdout.replace("\n", "")
        assert path.exists()
    assert "Quality and speed" in result.stdout
    assert "Not measured alike" not in result.stdout
    assert "32 results, 2 figures" in result.stdout
    figures = sorted(path.name for path in (out / "figures").iterdir() if not path.name.startswith("."))
    assert len(figures) == 4
    assert {name.rpartition(".")[2] for name in figures} == {"png", "svg"}
    for name in figures:
        assert name in (out / "report.html").read_text(encoding="utf-8")
    assert not [path for path in out.rglob("*") if path.name.startswith(".") and path.name != ".figures"]


def test_it_replaces_its_own_files_alone(results):
    out = results / "report"
    assert invoke(results).exit_code == 0
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    mine = out / "figures" / "mine.png"
    mine.write_text("mine")
    (out / "report.md").write_text("old")
    # The same without one context: one figure is no longer there.
    text = (results / "results.jsonl").read_text().splitlines(keepends=True)
    (results / "results.jsonl").write_text("".join(line for line in text if '"context": 1024' not in line))
    assert invoke(results).exit_code == 0
    assert mine.read_text() == "mine"
    assert len([path for path in (out / "figures").iterdir() if path.suffix == ".svg"]) == 1
    (results / "results.jsonl").write_text("".join(text))
    assert invoke(results).exit_code == 0
    mine.unlink()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first


@pytest.mark.parametrize("damage", [b"\xff\n", b"a\0b.png\n", b"caf\xe9.png\n", b"../../results.jsonl\n"])
def test_a_damaged_record_of_figures_is_made_anew_and_said(results, damage):
    out = results / "report"
    assert invoke(results).exit_code == 0
    record = out / "figures" / ".figures"
    whole = record.read_bytes()
    (out / "figures" / "gone.png").write_text("of the last report")
    record.write_bytes(damage + b"gone.png\n" + whole)
    result = invoke(results)
    assert result.exit_code == 0, result.output
    assert f"{record} was damaged" in result.stdout.replace("\n", "")
    assert record.read_bytes() == whole
    assert not (out / "figures" / "gone.png").exists()
    assert (results / "results.jsonl").exists()
    assert "was damaged" not in invoke(results).stdout


def test_it_goes_where_it_is_told(results, tmp_path):
    out = tmp_path / "deep" / "elsewhere"
    result = invoke(results, "--out", out)
    assert result.exit_code == 0, result.output
    assert (out / "report.html").is_file()
    assert not (results / "report").exists()


@pytest.mark.parametrize("what", ["no folder", "no results", "empty name", "out is a file", "empty out"])
def test_bad_input_is_refused(results, tmp_path, what):
    (tmp_path / "file").write_text("x")
    arguments = {
        "no folder": [tmp_path / "missing"],
        "no results": [tmp_path],
        "empty name": [""],
        "out is a file": [results, "--out", tmp_path / "file"],
        "empty out": [results, "--out", " "],
    }[what]
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "expected" in result.output
    assert (tmp_path / "file").read_text() == "x"
    assert ("which has no results.jsonl" in " ".join(result.output.split())) == (what == "no results")


def test_differences_are_marked_on_the_terminal(results):
    text = (results / "results.jsonl").read_text().replace('"commit": "cc', '"commit": "aa', 1)
    (results / "results.jsonl").write_text(text + '{"task": ')
    result = invoke(results)
    assert result.exit_code == 0, result.output
    assert "Not measured alike: Unequal commits" in result.stdout
    assert "last line" in result.stdout


def test_without_matplotlib_it_says_what_to_install(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke(results)
    assert result.exit_code == 2
    assert "sparsesel[report]" in result.output
    assert not (results / "report").exists()


def test_it_loads_no_torch(results):
    code = (
        "import sys; from sparsesel.cli.app import app; "
        "app(sys.argv[1:], standalone_mode=False); "
        "assert 'matplotlib' in sys.modules; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(results)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
