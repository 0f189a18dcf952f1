"""README: its Python runs, its table is fresh, its links and commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsesel.cli.app import app

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
