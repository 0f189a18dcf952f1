"""The check for CUDA machines runs here in Triton's interpreter, tells what it did, and finds what is wrong."""

import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsesel.registry import registry

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
NO_DEVICE = "not run: no CUDA device"
OURS = [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]


def command(output, *options):
    return [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--output", str(output), *options]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Everything that runs without a GPU, in its smallest sizes."""
    path = tmp_path_factory.mktemp("check") / "deep" / "check.json"
    result = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(path.read_text())


@pytest.fixture
def modules(monkeypatch):
    """Importing from the folder of benchmarks and that of tools, as the script does."""
    for folder in ("tools", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def test_every_section_says_what_became_of_it(tiny):
    output, report = tiny
    statuses = {name: section["status"] for name, section in report["sections"].items()}
    device = dict.fromkeys(("graphs", "latency"), "not run")
    passed = dict.fromkeys(("environment", "operations", "selectors", "conformance", "kernels"), "passed")
    assert statuses == passed | device
    assert report["status"] == "passed"
    assert output.count(NO_DEVICE) == 3
    for name in device:
        assert report["sections"][name]["reason"] == NO_DEVICE


def test_the_environment_is_named_and_what_needs_a_device_is_not_invented(tiny):
    found = tiny[1]["sections"]["environment"]["found"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["triton"]
    assert found["gpu"] == found["bandwidth"] == NO_DEVICE


def test_every_kernel_is_launched(tiny, modules):
    from kernel_launches import kernels

    section = tiny[1]["sections"]["kernels"]
    assert section["not_launched"] == []
    assert set(section["configurations"]) == kernels()


def test_every_selector_and_level_is_checked(tiny):
    checks = tiny[1]["sections"]["selectors"]["checks"]
    assert {check["name"].split(",")[0] for check in checks} == set(OURS)
    assert all(check["found"]["counters"]["steps"] for check in checks)
    assert {f"L{level}" for level in (1, 2, 3, 5)} <= {check["name"].split()[1].rstrip(",") for check in checks}


def test_conformance_runs_the_suite(tiny):
    section = tiny[1]["sections"]["conformance"]
    assert section["passed"] == 2
    assert section["failed"] == section["not reached"] == 0


def test_interrupted_it_keeps_what_there_is(tmp_path):
    path = tmp_path / "check.json"
    with subprocess.Popen(command(path), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while "operations" not in (process.stdout.readline() or "operations"):
            pass
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(60) == 130
    report = json.loads(path.read_text())
    assert report["interrupted"]
    assert report["status"] == "incomplete"
    assert report["sections"]["environment"]["status"] == "passed"
    assert report["sections"]["operations"]["not_reached"]
    assert report["sections"]["latency"]["reason"] == "not reached"
    assert "not reached" in output


def test_time_that_runs_out_is_told(tmp_path):
    path = tmp_path / "check.json"
    options = ("--minutes", "0.001", "--sections", "operations")
    result = subprocess.run(command(path, *options), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 3, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert report["sections"]["operations"]["status"] == "incomplete"
    assert len(report["sections"]["operations"]["not_reached"]) == 4


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--sections", "nope"], "unknown sections: nope; there are environment, operations, selectors, graphs"),
        (["--tiny", "--device", "cpu", "--only", "nosuch"], "no check's name contains 'nosuch'"),
        (["--device", "cpu"], "--tiny"),
        (["--minutes", "0"], "positive"),
    ],
)
def test_bad_options_are_refused(options, part):
    result = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert part in result.stderr


def test_where_nothing_is_named_so_nothing_has_passed(modules, tmp_path, monkeypatch, capsys):
    """Names of tests are known to pytest alone, so that it takes a run to see that there are none."""
    import gpu.check
    import gpu_check
    from gpu.conformance import _summary
    from gpu.pool import Job

    path, lines = tmp_path / "check.json", tmp_path / "lines"
    lines.write_text('{"total": 0}\n')
    share = SimpleNamespace(lines=lines, was_stopped=False, is_running=False)
    monkeypatch.setattr(
        gpu.check.conformance, "run", lambda *args, on_progress, **kwargs: on_progress(_summary([share]))
    )
    monkeypatch.setattr(gpu.check.plan, "selectors", lambda *args, **kwargs: [Job("quest, dense", "os:getpid")])
    monkeypatch.setattr(gpu.check.Check, "_environment", lambda self, section: None)
    words = ["gpu_check", "--sections", "selectors,conformance", "--only", "nosuch", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(path)])
    options = gpu_check.parsed()
    assert gpu.check.offers(options)
    assert gpu.check.Check(options).run() == 2
    reason = "no check's name contains 'nosuch'"
    assert capsys.readouterr().err == reason + "\n"
    for name in ("selectors", "conformance"):
        section = json.loads(path.read_text())["sections"][name]
        assert (section["status"], section["reason"]) == ("not run", reason)


def test_the_help_names_every_exit_code_and_section(modules):
    import gpu_check
    from gpu.check import EXIT, NOTHING_THERE

    told = gpu_check.__doc__.partition("Exit code: ")[2]
    assert all(f"{code} " in told for code in (*EXIT.values(), NOTHING_THERE, 130))
    assert "`kernels`" in gpu_check.__doc__


def test_the_sources_are_those_that_run_wherever_they_lie(modules, tmp_path):
    from gpu.environment import package_folders, sources

    import sparsesel

    folders = package_folders()
    assert folders[0] == Path(sparsesel.__file__).parent
    assert {folder.name for folder in folders[1:]} == {f"sparsesel_{name}" for name in OURS}
    copies = [tmp_path / folder.name for folder in folders]
    for folder, copy in zip(folders, copies, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert sources(copies) == sources(folders)
    (copies[-1] / "config.py").write_text("")
    assert sources(copies) != sources(folders)


def test_a_copy_that_is_no_checkout_is_told_from_a_commit_that_git_does_not_tell(modules):
    from gpu.report import table

    def heading(commit, in_checkout):
        found = {"device": "x", "commit": commit, "in_checkout": in_checkout, "sources": "abc", "folders": ["/there"]}
        found |= {"versions": {}, "gpu": NO_DEVICE, "bandwidth": NO_DEVICE}
        return list(table({"status": "passed", "sections": {"environment": {"status": "passed", "found": found}}}))[1]

    assert heading("12ab", True) == "x · commit 12ab · sources abc in /there"
    assert heading(None, False) == "x · not a checkout · sources abc in /there"
    assert heading(None, True) == "x · commit unknown · sources abc in /there"


# What a run without a GPU leaves out


def test_what_a_device_is_given_to_do_can_be_done(modules):
    """Jobs have names of their own, functions that are there and take their arguments, and selectors that exist."""
    from gpu import plan
    from gpu.selectors import build

    jobs = {
        "operations": list(plan.operations("cuda", tiny=False)),
        "selectors": list(plan.selectors("cuda", tiny=False)),
        "graphs": list(plan.graphs("cuda")),
        "latency": list(plan.latency("cuda", 1e12)),
    }
    for name, section in jobs.items():
        assert len({job.name for job in section}) == len(section)
        for job in section:
            module, function = job.function.split(":")
            inspect.signature(getattr(importlib.import_module(module), function)).bind(**job.arguments)
        specs = {(job.arguments["spec"], job.arguments["level"]) for job in section if "spec" in job.arguments}
        names = {build(*one).config.name for one in specs}
        assert names == ({*OURS} if name != "operations" else set())
    geometries = [job.arguments["geometry"] for job in jobs["operations"] if "geometry" in job.arguments]
    for axis, values in plan.AXES.items():
        assert {getattr(one, axis) for one in geometries} == set(values)
    assert {job.arguments["level"] for job in jobs["latency"] if "level" in job.arguments} == {None, 1, 2, 3, 4, 5}


def plain(step, device):
    """In the place of a graph: the step itself."""
    return step


@pytest.mark.parametrize(("name", "paged"), [*((name, at % 2 == 0) for at, name in enumerate(OURS)), ("retopk", False)])
def test_steps_on_lengths_of_the_device_are_those_of_a_graph(modules, name, paged):
    from gpu.graphs import check_graph
    from gpu.inputs import Geometry
    from gpu.plan import TINY

    spec = ",".join(part for part in (name, TINY[name][-1]) if part)
    geometry = Geometry("float32", 16, 2, "dense", 60, kv_heads=1)
    check_graph(spec, None, geometry, 2, paged, "cpu", plain)


def test_a_graph_that_replays_something_else_is_found(modules):
    from gpu.graphs import check_graph
    from gpu.inputs import Geometry

    def stale(step, device):
        outputs = step()
        return lambda: outputs

    with pytest.raises(AssertionError, match="output of replay 2 differ"):
        check_graph("full", None, Geometry("float32", 16, 2, "dense", 60), 3, False, "cpu", stale)


@pytest.mark.parametrize("scenario", ["reuse", "mixed"])
@pytest.mark.parametrize(("spec", "level"), [("full", None), ("retopk,topk=8,refresh_interval=0", 4)])
def test_latencies_are_of_the_paths_they_name(modules, spec, level, scenario):
    from gpu.latency import HostTimer, Sizes, time_selector

    sizes = Sizes(heads=2, kv_heads=1, head_dim=64, dtype="float32", settling=1, warmup=2, rounds=3)
    row = time_selector(spec, level, 120, scenario, 1e9, "cpu", sizes, HostTimer, plain)
    assert row["launched_ms"] > 0
    assert row["roofline_share"] == pytest.approx(row["bytes"] / 1e6 / row["graph_ms"])
    if scenario == "reuse" and level:
        assert row["shares"]["reuse"] == 1
        assert row["shares"]["attended"] == 8
    if not level:
        assert row["bytes"] == 2 * 120 * 64 * 4


def test_a_step_that_cannot_be_captured_is_told_beside_its_time(modules):
    from gpu.latency import HostTimer, Sizes, time_selector

    def refuses(step, device):
        raise RuntimeError("it waits for the device")

    sizes = Sizes(heads=2, kv_heads=1, head_dim=16, dtype="float32", settling=0, warmup=2, rounds=2)
    row = time_selector("full", None, 60, "reuse", None, "cpu", sizes, HostTimer, refuses)
    assert row["launched_ms"] > 0
    assert "waits for the device" in row["error"]
    assert row["roofline_share"] is None


def test_torchs_own_attention_is_timed_or_missing(modules):
    from gpu.latency import SDPA, HostTimer, Sizes, time_sdpa

    sizes = Sizes(heads=2, kv_heads=1, head_dim=16, dtype="float32", settling=0, warmup=2, rounds=2)
    for name in SDPA:
        row = time_sdpa(name, 60, None, "cpu", sizes, HostTimer, plain)
        assert row.get("launched_ms", 0) > 0 or row["missing"]


# It finds what is wrong


def test_a_wrong_operation_fails_its_check(modules, monkeypatch):
    import gpu.operations
    from gpu.inputs import Geometry

    right = gpu.operations.ops.dense_attention
    wrong = lambda *args, **kwargs: right(*args, **kwargs) * 1.01  # noqa: E731
    monkeypatch.setattr(gpu.operations.ops, "dense_attention", wrong)
    with pytest.raises(AssertionError, match=r"dense_attention: .* out of bounds"):
        gpu.operations.check_attention(Geometry("float32", 16, 1, "dense", 20, kv_heads=1), "cpu", 4)


def test_a_lost_index_fails_its_check(modules, monkeypatch):
    import gpu.operations

    right = gpu.operations.ops.topk_indices
    monkeypatch.setattr(gpu.operations.ops, "topk_indices", lambda *a, **k: right(*a, **k).roll(1, dims=-1))
    with pytest.raises(AssertionError, match="the 3 largest of 40: random of one length"):
        gpu.operations.check_topk(["random"], 1, 40, 3, "cpu")


def test_another_support_than_eagers_fails_its_check(modules, monkeypatch):
    import gpu.selectors
    from gpu.inputs import Geometry

    by_head = gpu.selectors._by_head
    turn = iter(range(100))
    monkeypatch.setattr(gpu.selectors, "_by_head", lambda *args: by_head(*args).roll(next(turn) % 2, dims=-1))
    spec = "streaming_llm,topk=6,sink_size=2"
    with pytest.raises(AssertionError, match="differ from eager's"):
        gpu.selectors.check_selector(spec, None, Geometry("float32", 16, 1, "dense", 30), 1, "cpu")


def test_float64_in_parts_is_float64_as_a_whole(modules):
    from gpu.inputs import Geometry, expected_in_parts, make_case

    from sparsesel.testing.tolerances import expected_attention

    for group in (1, 3, 4, 7):
        case = make_case(Geometry("float32", 8, group, "dense", 9), "cpu", seed=1)
        query, key, value = case.query, case.stream.key, case.stream.value
        mask = torch.rand(2, 2 * group, 9, generator=torch.Generator().manual_seed(0)) < 0.7
        whole = expected_attention(query, key, value, mask, scale=0.3)
        parts = expected_in_parts(query, key, value, mask, scale=0.3)
        torch.testing.assert_close(parts.output, whole.output, rtol=1e-12, atol=1e-12)
        assert bool((parts.bound <= whole.bound * (1 + 1e-9)).all())


# Processes


def test_a_crash_and_a_hang_cost_no_other_job(modules):
    from gpu.pool import Job, Pool

    jobs = [
        Job("crash", "os:abort"),
        Job("hang", "signal:pause", seconds=0.2),
        Job("wrong", "os:strerror", {"code": "x"}),
        Job("right", "os:getpid"),
    ]
    outcomes, pool = [], Pool()
    try:
        left = pool.run(jobs, workers=1, deadline=time.monotonic() + 300, on_outcome=outcomes.append)
    finally:
        pool.close()
    assert left == []
    assert [(one.name, one.passed) for one in outcomes] == [
        ("crash", False),
        ("hang", False),
        ("wrong", False),
        ("right", True),
    ]
    assert f"ended with {-signal.SIGABRT}" in outcomes[0].error
    assert "too long" in outcomes[1].error
    assert "TypeError" in outcomes[2].error
    assert outcomes[3].found != os.getpid()


def test_launches_are_noted_and_run(modules):
    from gpu.inputs import Geometry
    from gpu.pool import Job, perform

    arguments = {"geometry": Geometry("float32", 16, 1, "dense", 20, kv_heads=1), "device": "cpu", "topk": 4}
    outcome = perform(Job("operations", "gpu.operations:check_attention", arguments))
    assert outcome.passed, outcome.error
    assert {kernel.split(":")[1] for kernel, _ in outcome.launches} >= {"dense_attention_kernel", "qk_scores_kernel"}


def test_tests_of_a_process_that_ended_are_told_apart(modules, tmp_path):
    from gpu.conformance import read

    path = tmp_path / "lines"
    assert read(path) == ({}, 0)
    lines = [{"total": 3}, {"test": "a"}, {"test": "a", "outcome": "passed"}, {"test": "b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "c", "out')
    assert read(path) == ({"a": {"outcome": "passed"}, "b": {}}, 3)


def test_the_table_tells_failures_what_was_not_reached_and_speedups(modules):
    from gpu.report import table

    times = {"launched_ms": 0.2, "bytes": 3e6, "roofline_share": 0.5, "context": 16384, "scenario": "reuse"}
    rows = [
        {**times, "selector": "full", "graph_ms": 0.1},
        {**times, "selector": "retopk L4", "graph_ms": 0.05, "shares": {"reuse": 1.0, "attended": 512.0}},
        {"context": 16384, "scenario": "reuse", "selector": "sdpa flash", "missing": "no kernel"},
    ]
    sections = {
        "operations": {
            "status": "failed",
            "failures": [{"name": "topk", "error": "lost an index"}],
            "not_reached": ["dense"],
        },
        "latency": {"status": "incomplete", "rows": rows},
        "conformance": {"status": "failed", "failures": [{"name": f"test {at}", "error": "no"} for at in range(20)]},
    }
    text = "\n".join(table({"status": "failed", "sections": sections}))
    assert "FAILED topk: lost an index" in text
    assert "not reached (1): dense" in text
    assert [line.split() for line in text.splitlines() if line.startswith("retopk")] == [
        ["retopk", "L4", "reuse", "0.0500", "0.2000", "2.00", "-", "3.0", "50%", "reuse", "100%"]
    ]
    assert "not there: no kernel" in text
    assert "and 8 more, in the file" in text
