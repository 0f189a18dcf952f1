"""The decode benchmark runs, measures what it names, and its summary adds up. No word about time."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsesel import LayerSpec, make_selector
from sparsesel.registry import registry

ROOT = Path(__file__).parents[1]
GEOMETRY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64"]


def bench(*options, folder):
    command = [sys.executable, "-m", "pytest", "benchmarks/bench_decode.py", "-p", "no:cacheprovider"]
    # Among several workers pytest-benchmark measures nothing; the benchmark is a process of its own, not one of theirs.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [*command, *GEOMETRY, "--summary", str(folder / "deep" / "summary.json"), *map(str, options)],
        cwd=ROOT,
        env=outside | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Every selector at two small contexts."""
    folder = tmp_path_factory.mktemp("bench")
    result = bench("--contexts", "640,576", "--rounds", 2, "--warmup-steps", 3, folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads((folder / "deep" / "summary.json").read_text())


def test_every_registered_selector_is_measured_at_every_context(every):
    _, report = every
    assert report["heads"] == 4
    assert report["kv_heads"] == 2
    assert report["head_dim"] == 64
    found = [(row["context"], row["config"]["name"]) for row in report["rows"]]
    assert found == [(context, name) for context in (576, 640) for name in registry().selectors]
    assert all(row["ms"] > 0 for row in report["rows"])


def test_speedups_are_ratios_of_the_times_of_one_run(every):
    _, report = every
    times = {(row["context"], row["config"]["name"]): row["ms"] for row in report["rows"]}
    for row in report["rows"]:
        for reference in ("full", "exact_topk"):
            expected = times[row["context"], reference] / row["ms"]
            assert row[f"speedup_{reference}"] == pytest.approx(expected)


def test_bytes_are_those_that_the_selectors_state(every):
    _, report = every
    layer = LayerSpec(16, 4, 2, 64, torch.float32, torch.device("cpu"))
    for row in report["rows"]:
        assert row["bytes_read"] == make_selector(row["selector"]).cost(layer, row["context"]).bytes_read
        assert row["attended"] <= row["config"].get("topk", row["context"])


def test_the_table_and_pytests_own_are_grouped_by_context(every):
    output, report = every
    for context in (576, 640):
        assert f"benchmark 'context {context}': {len(registry().selectors)} tests" in output
        block = output.split(f"\ncontext {context} ")[1].split("\n\n")[0].splitlines()[1:]
        assert [line.split()[0] for line in block] == [
            row["selector"] for row in report["rows"] if row["context"] == context
        ]


def measured(tmp_path, *options):
    result = bench("--contexts", "256", "--rounds", 12, *options, folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads((tmp_path / "deep" / "summary.json").read_text())["rows"]


def test_without_jumps_every_timed_step_of_retopk_is_a_reuse_step(tmp_path):
    """From supports that it really had: candidates are more than one support and less than all that can be."""
    output, (row,) = measured(tmp_path, "--selectors", "retopk,topk=32", "--jump", "0")
    assert row["shares"]["reuse"] == 1
    assert 32 < row["candidates"] < 4 * 32 + 32
    assert row["attended"] == 32
    assert row["speedup_full"] is None
    assert re.search(r"^retopk,topk=32 .* - +- .*reuse 100\.0%$", output, re.MULTILINE)


def test_queries_that_break_off_fall_back(tmp_path):
    options = ["--set", "topk=32", "--selectors", "full retopk exact_topk", "--jump", "0.5", "--dtype", "bfloat16"]
    _, rows = measured(tmp_path, *options)
    assert [row["selector"] for row in rows] == ["full", "retopk", "exact_topk"]
    shares = rows[1]["shares"]
    assert 0.2 < shares["fallback"] < 0.8
    assert shares["reuse"] + shares["exact"] == pytest.approx(1)
    assert rows[0]["bytes_read"] == 2 * 2 * 256 * 64 * 2


def test_it_runs_on_the_backend_asked_for(tmp_path):
    options = ["--contexts", "64", "--rounds", "1", "--warmup-steps", "1", "--benchmark-disable"]
    run = {}
    for name in ("eager", "triton"):
        result = bench(*options, "--selectors", "full exact_topk,topk=8", "--backend", name, folder=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        run[name] = json.loads((tmp_path / "deep" / "summary.json").read_text())
        assert run[name]["backend"] == name
        assert f"float32, {name} on " in result.stdout
    assert [row["attended"] for row in run["triton"]["rows"]] == [row["attended"] for row in run["eager"]["rows"]]


def test_it_runs_without_timing(tmp_path):
    output, rows = measured(tmp_path, "--benchmark-disable", "--selectors", "full")
    assert rows[0]["ms"] is None
    assert rows[0]["speedup_full"] is None
    assert "full" in output


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--kv-heads", "3"], "a multiple of kv_heads=3"),
        (["--contexts", "60"], "from 61"),
        (["--contexts", "many"], "many"),
        (["--contexts", "0"], "benchmark.contexts"),
        (["--selectors", "nope"], "selector"),
        (["--set", "tokp=3"], "Did you mean 'topk'"),
        (["--jump", "2"], "--jump"),
        (["--rounds", "0"], "--rounds"),
        (["--dtype", "int8"], "benchmark.dtype"),
        (["--backend", "native"], "one of auto, triton, eager"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, part):
    spec = importlib.util.spec_from_file_location("bench_options", ROOT / "benchmarks" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    parser = argparse.ArgumentParser()
    conftest.pytest_addoption(SimpleNamespace(getgroup=lambda *_: SimpleNamespace(addoption=parser.add_argument)))
    with pytest.raises(pytest.UsageError, match=re.escape(part)):
        conftest.pytest_configure(SimpleNamespace(option=parser.parse_args(options), stash={}))
