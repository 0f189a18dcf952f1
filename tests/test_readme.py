"""README: its Python runs, its table is fresh, its links and commands exist."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsesel import make_config
from sparsesel.cli.app import app
from sparsesel.hf.models import OFFLINE_MODELS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_selectors_is_fresh():
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.model
def test_the_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    output = capsys.readouterr().out
    assert "It is a truth universally acknowledged" in output
    assert "density" in output


def test_its_file_names_a_selector(tmp_path):
    (code,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.toml").write_text(code, encoding="utf-8")
    config = make_config(f"{tmp_path / 'mine.toml'},topk=128")
    assert config == make_config("retopk:quality", topk=128, window_size=64)


def test_installing_without_make_names_what_there_is():
    """The extras, and the offline model as the program asks for it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (told,) = re.findall(r"^Extras: (.*?)\. ", README, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", told)) == set(extras)
    assert OFFLINE_MODELS["smollm2-135m"].install in README


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`sparsesel ([a-z ]+?)(?: retopk\S*)?`", README))))
def test_commands_exist(command):
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output


def test_make_targets_exist():
    targets = set(re.findall(r"make ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets <= defined
