"""Options of the benchmarks, and the summary at the end of a run."""

import json
from pathlib import Path

import pytest
import torch

from sparsesel.config import build
from sparsesel.errors import InputError
from sparsesel.eval import provenance
from sparsesel.eval.cost import CostConfig, strict_specs
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.ops import backend

ROWS = pytest.StashKey[list]()
"""What was measured so far, one record per test."""
MEASURED = pytest.StashKey[tuple]()
"""The geometry and the resolved selectors."""


def pytest_addoption(parser):
    group = parser.getgroup("decode", "one decode step of every selector")
    group.addoption("--heads", type=int, default=28, help="query heads [28]")
    group.addoption("--kv-heads", type=int, default=4, help="key-value heads [4]")
    group.addoption("--head-dim", type=int, default=128, help="channels of a head [128]")
    group.addoption("--contexts", default="4096,16384,65536", help="visible keys, comma-separated [4096,16384,65536]")
    group.addoption("--selectors", default="", help="specs separated by blanks [all, at the budget of comparisons]")
    group.addoption("--set", action="append", default=[], metavar="FIELD=VALUE", help="in every selector that has it")
    group.addoption("--dtype", default="float32", help="bfloat16, float16 or float32 [float32]")
    group.addoption("--device", default="cpu", help="cpu or cuda [cpu]")
    group.addoption("--backend", default="auto", help="what runs: auto, triton or eager [auto]")
    group.addoption("--rounds", type=int, default=20, help="decode steps timed [20]")
    group.addoption("--warmup-steps", type=int, default=40, help="decode steps before, which fill the states [40]")
    group.addoption(
        "--correlation", type=float, default=0.97, help="cosine of a query to the one before it, from 0 to 1 [0.97]"
    )
    group.addoption(
        "--jump", type=float, default=0.1, help="share of queries that have nothing to do with the one before [0.1]"
    )
    group.addoption("--summary", type=Path, default=Path(".benchmarks/decode.json"), help="file for the summary")


def pytest_configure(config):
    option = config.option
    try:
        values = {
            "heads": option.heads,
            "kv_heads": option.kv_heads,
            "head_dim": option.head_dim,
            "layers": 1,
            "contexts": [int(part) for part in option.contexts.split(",")],
            "dtype": option.dtype,
        }
        geometry = build(CostConfig, values, where="benchmark")
        selectors = resolve_selectors(option.selectors.split() or strict_specs(), option.set)
        option.backend = backend.resolve(option.backend, torch.device(option.device))
    except (InputError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    if option.rounds < 1 or option.warmup_steps < 0 or not (0 <= option.correlation <= 1 and 0 <= option.jump <= 1):
        raise pytest.UsageError("--rounds from 1, --warmup-steps from 0, --correlation and --jump from 0 to 1")
    least = option.rounds + option.warmup_steps + 1
    if min(geometry.contexts) < least:
        raise pytest.UsageError(f"--contexts: from {least}, so that a prompt precedes the steps")
    config.stash[MEASURED] = (geometry, selectors)
    config.stash[ROWS] = []


def pytest_generate_tests(metafunc):
    geometry, selectors = metafunc.config.stash[MEASURED]
    if "workload" in metafunc.fixturenames:
        metafunc.parametrize("workload", geometry.contexts, indirect=True, scope="module")
        metafunc.parametrize("spec", list(selectors))


@pytest.fixture
def config_of(request):
    """Spec to resolved configuration."""
    return request.config.stash[MEASURED][1]


@pytest.fixture
def record(request):
    """Keep one row of the summary."""
    return request.config.stash[ROWS].append


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """The summary, printed and written."""
    if not config.stash[ROWS]:
        return
    report = _summary(config)
    for line in _table(report):
        terminalreporter.write_line(line)
    path = config.option.summary
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"\nwritten to {path}")


def _summary(config):
    """What was measured, each time beside those of `full` and `exact_topk` at the same context."""
    geometry, _ = config.stash[MEASURED]
    rows = config.stash[ROWS]
    for row in rows:
        for reference in ("full", "exact_topk"):
            times = [
                other["ms"]
                for other in rows
                if other["context"] == row["context"] and other["config"].get("name") == reference
            ]
            known = len(times) == 1 and row["ms"] is not None
            row[f"speedup_{reference}"] = times[0] / row["ms"] if known else None
    option = config.option
    return {
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "dtype": geometry.dtype,
        "device": provenance.device_name(torch.device(option.device)),
        "backend": option.backend,
        "rounds": option.rounds,
        "warmup_steps": option.warmup_steps,
        "correlation": option.correlation,
        "jump": option.jump,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "time": provenance.now(),
        "rows": sorted(rows, key=lambda row: row["context"]),
    }


def _table(report):
    """Lines of the summary."""
    width = max(len("selector"), *(len(row["selector"]) for row in report["rows"]))
    yield ""
    yield (
        f"One decode step of one layer: {report['heads']} query heads over {report['kv_heads']} KV heads of "
        f"{report['head_dim']}, {report['dtype']}, {report['backend']} on {report['device']}; median ms of "
        f"{report['rounds']} steps, MB read by design, shares of (head, step)"
    )
    context = None
    for row in report["rows"]:
        if row["context"] != context:
            context = row["context"]
            yield f"\n{f'context {context}':<{width}} {'ms':>9} {'over full':>10} {'over exact':>11} {'MB':>8}  paths"
        time = f"{row['ms']:9.3f}" if row["ms"] is not None else f"{'-':>9}"
        full, exact = (
            f"{row[name]:.2f}x" if row[name] is not None else "-" for name in ("speedup_full", "speedup_exact_topk")
        )
        paths = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items() if share) or "-"
        yield (f"{row['selector']:<{width}} {time} {full:>10} {exact:>11} {row['bytes_read'] / 1e6:8.2f}  {paths}")
