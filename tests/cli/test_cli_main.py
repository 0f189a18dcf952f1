"""The command as a process: how it is started, what it prints where nothing can be printed, and its help."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparsesel
from sparsesel.cli.app import app

ROOT = Path(__file__).parents[2]
COST = ["cost", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--layers", "1", "--context", "9"]
PRINTING = {
    "list": ["list"],
    "list --json": ["list", "--json"],
    "show": ["show", "retopk"],
    "env": ["env"],
    "cost": [*COST, "--selector", "full"],
    "version": ["--version"],
    "help": ["eval", "perplexity", "--help"],
}


def start(*args, stdout=subprocess.PIPE, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "sparsesel", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def test_python_m_is_the_command():
    process = start("--version")
    assert process.communicate(timeout=60) == (f"sparsesel {sparsesel.__version__}\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_do_not_spin_unless_told_to(given, expected):
    """Set before torch is loaded, which reads it."""
    code = (
        "import os, sys, sparsesel.cli\n"
        "sys.argv = ['sparsesel', '--version']\n"
        "try: sparsesel.cli.main()\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.splitlines()[-1] == f"{expected} False"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_nor_do_those_of_make():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [
        "make",
        "-s",
        "-C",
        str(ROOT),
        "--no-print-directory",
        "--eval",
        "told: ; @echo $$OMP_WAIT_POLICY",
        "told",
    ]
    for given, expected in (({}, "passive\n"), ({"OMP_WAIT_POLICY": "active"}, "active\n")):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment | given)
        assert result.stdout == expected, result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("what", PRINTING)
def test_output_that_cannot_be_written_is_a_short_error(what, unbuffered):
    with open("/dev/full", "w") as full:
        process = start(*PRINTING[what], stdout=full, PYTHONUNBUFFERED=unbuffered)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("what", PRINTING)
def test_a_reader_that_has_gone_is_no_word(what):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*PRINTING[what], stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


# Help


def commands():
    return [[], ["list"], ["show"], ["env"], ["generate"], ["cost"], ["calibrate"], ["eval"], ["eval", "perplexity"]]


def help_of(*command, option="--help"):
    result = CliRunner().invoke(app, [*command, option], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_h_is_help(command):
    assert help_of(*command, option="-h") == help_of(*command)


@pytest.mark.parametrize(
    ("command", "option", "mark"),
    [
        ("eval perplexity", "--out", "[required]"),
        ("eval perplexity", "--selector", "[required, here or in --config]"),
        ("eval perplexity", "--model", "[default: smollm2-135m]"),
        ("eval perplexity", "--context", "[default: 2048]"),
        ("eval perplexity", "--suffix", "[default: 512]"),
        ("eval perplexity", "--text", "[default: Python's language reference]"),
        ("eval perplexity", "--skip-chars", "[default: 0]"),
        ("eval perplexity", "--documents", "[default: one of each text]"),
        ("calibrate", "--context", "[default: 2048, or its limit]"),
        ("cost", "--selector", "[default: all installed, the preset 'strict' of those that have one]"),
        ("generate", "--max-new-tokens", "[default: 128]"),
    ],
)
def test_help_says_what_is_required_and_what_is_taken_otherwise(command, option, mark):
    text = help_of(*command.split())
    # From the option to the next one, without the frame around it.
    ours = re.search(rf"{option}\b(.*?)(?=\n│ \*?\s+--|\n╰)", text, re.DOTALL)
    assert ours is not None
    assert mark in " ".join(ours[1].replace("│", " ").split())
