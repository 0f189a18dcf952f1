"""Compilation for devices that are not there, and the record that is kept of what it gave."""

import dataclasses
import importlib
import itertools
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsesel import LayerSpec, make_selector
from sparsesel.errors import InputError
from sparsesel.explain import trace
from sparsesel.ops.compilation import SHARED_LIMITS, TARGETS, Resources, compile_launch

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tools():
    """The modules of `make kernels`, which are scripts beside each other."""
    sys.path.insert(0, str(TOOLS))
    try:
        import kernel_launches
        import kernel_sources
        import kernel_tables
        import kernels

        yield dataclasses.make_dataclass("Tools", ["launches", "sources", "tables", "main"])(
            kernel_launches, kernel_sources, kernel_tables, kernels
        )
    finally:
        sys.path.remove(str(TOOLS))


def steps(dim=64, dtype=torch.float32):
    layer = LayerSpec(0, 8, 2, dim, dtype, torch.device("meta"))
    return trace(make_selector("full"), layer, 1000).step.launches


def outside(code, cache):
    """What a process without Triton's interpreter prints."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_not_within_the_interpreter():
    with pytest.raises(InputError, match="Compile in a process without it"):
        compile_launch(steps()[0], "sm_90")


def test_every_target_is_compiled_for_and_measured(tmp_path):
    code = """
import dataclasses, json, torch
from sparsesel import LayerSpec, make_selector
from sparsesel.explain import trace
from sparsesel.ops.compilation import TARGETS, compile_launch
layer = LayerSpec(0, 8, 2, 64, torch.bfloat16, torch.device("meta"))
attention, combine = trace(make_selector("full"), layer, 1000).step.launches
took = {t: [dataclasses.astuple(compile_launch(one, t)) for one in (attention, combine)] for t in TARGETS}
print(json.dumps(took))
"""
    first = json.loads(outside(code, tmp_path))
    assert list(first) == list(TARGETS) == list(SHARED_LIMITS)
    for target, (attention, combine) in first.items():
        for registers, spilled, shared, instructions in (attention, combine):
            assert 8 <= registers <= (512 if target == "gfx942" else 255)
            assert spilled == 0
            assert 0 <= shared <= SHARED_LIMITS[target]
            assert instructions > 50
        assert attention[3] > combine[3]  # two products and a loop against a sum
        assert attention[2] >= 64 * 64 * 2  # a tile of values at least
    assert json.loads(outside(code, tmp_path)) == first  # from Triton's cache: the same


def test_what_spills_is_seen(tmp_path):
    code = """
import dataclasses, torch
from sparsesel import LayerSpec, make_selector
from sparsesel.explain import trace
from sparsesel.ops.compilation import compile_launch
layer = LayerSpec(0, 8, 2, 256, torch.float32, torch.device("meta"))
attention = trace(make_selector("full"), layer, 1000).step.launches[0]
constants = tuple({**dict(attention.constants), "BLOCK_N": 64}.items())
print(compile_launch(dataclasses.replace(attention, constants=constants, num_warps=1), "sm_80").spilled)
few = dataclasses.replace(attention, max_registers=32)
print(compile_launch(few, "sm_80").registers, compile_launch(few, "gfx942").registers)
"""
    spilled, registers, elsewhere = map(int, outside(code, tmp_path).split())
    assert spilled > 0
    assert registers <= 32
    assert elsewhere > 32  # there is no such limit there


def test_every_pair_occurs(tools):
    axes = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": (0, 1, 2, 3)}
    first = [{"a": 2, "b": "y", "c": False, "d": 3}]
    chosen = tools.launches.pairwise(axes, first)
    assert chosen[0] == first[0]
    for one, other in itertools.combinations(axes, 2):
        assert {(c[one], c[other]) for c in chosen} == set(itertools.product(axes[one], axes[other]))
    assert len(chosen) <= 16  # of 72
    assert chosen == tools.launches.pairwise(axes, first)


def test_everything_is_traced_and_in_the_record(tools):
    """Every kernel in the sources is launched by something, and every launch is recorded as it is now."""
    found = tools.launches.collect()
    assert found.failures == []
    assert {launch.kernel for launch in found.launches} == tools.launches.kernels()
    assert {launch.kernel for launch in found.sample} == tools.launches.kernels()
    assert len(found.sample) == len(tools.launches.kernels())
    sources = {kernel: tools.sources.fingerprint(kernel) for kernel in tools.launches.kernels()}
    record = tools.tables.Record.read()
    assert len(record.versions) >= 2  # the oldest version of Triton and the newest
    names = {key: label for key, (_, label) in record.labels.items()}
    for version, rows in record.versions.items():
        assert list(tools.main.stale(found.launches, sources, record, version)) == []
        assert list(tools.main.over_limits(rows, names)) == []


PROBE = """
import triton
import triton.language as tl
LEAST: tl.constexpr = tl.constexpr(1)
@triton.jit
def helper(x):
    return x + LEAST
@triton.jit
def some_kernel(p):
    tl.store(p, helper(2))
"""


def test_a_fingerprint_follows_what_a_kernel_calls_and_uses(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def fingerprint(old="", new=""):
        (tmp_path / "probe_of_kernels.py").write_text(PROBE.replace(old, new) if old else PROBE)
        sys.modules.pop("probe_of_kernels", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        return tools.sources.fingerprint("probe_of_kernels:some_kernel")

    first = fingerprint()
    assert fingerprint("def some_kernel(p):", 'def some_kernel(p):  # why\n    """What it does."""') == first
    assert fingerprint("import triton\n", "import triton\n\n\n") == first
    assert fingerprint("x + LEAST", "x - LEAST") != first
    assert fingerprint("constexpr(1)", "constexpr(2)") != first
    assert fingerprint("helper(2)", "helper(3)") != first
    assert fingerprint() == first


def test_kernels_are_found_in_sources_alone(tools):
    found = tools.launches.kernels()
    assert "sparsesel.ops.dense_attention:dense_attention_kernel" in found
    assert any(kernel.startswith("sparsesel_retopk.") for kernel in found)
    assert all(kernel.endswith("_kernel") for kernel in found)


def launches():
    return [launch for dim, dtype in ((64, torch.float32), (80, torch.bfloat16)) for launch in steps(dim, dtype)]


def some(registers=40, spilled=0, shared=1024, instructions=500):
    return dict.fromkeys(TARGETS, Resources(registers, spilled, shared, instructions))


def test_a_record_is_read_as_it_was_written(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(tools.tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tools.tables, "RECORD", tmp_path / "record.json")
    record = tools.tables.Record.read()
    assert record.versions == {}
    rows = {tools.tables.key_of(launch): some(registers=place) for place, launch in enumerate(launches())}
    sources = {launch.kernel: f"hash {place}" for place, launch in enumerate(launches())}
    record.renew(launches(), "3.10.0", rows, sources)
    record.renew(launches(), "3.9.1", dict(list(rows.items())[:1]), sources)
    record.write()
    again = tools.tables.Record.read()
    assert again == record
    assert (again.text(), again.tables()) == (record.text(), record.tables())
    page = (tmp_path / "sm_89.md").read_text()
    assert "Triton 3.10.0" in page  # the newest, not the last by letters
    assert page.count("\n| ") == 2 + len(rows)
    # Rows of a kernel that changed since are not current.
    assert again.current("3.10.0", sources) == rows
    changed = sources | {launches()[0].kernel: "another"}
    assert {record.labels[key][0] for key in again.current("3.10.0", changed)} == {launches()[1].kernel}
    assert again.current("3.8.0", sources) == {}
    # Of a configuration that no launch has any more, nothing is kept.
    again.renew(launches()[:1], "3.10.0", dict(list(rows.items())[:1]), sources)
    assert len(again.labels) == 1
    assert set(again.versions["3.9.1"]) <= set(again.labels)


def test_labels_tell_configurations_apart(tools):
    kernels, labels = tools.tables.described(launches())
    assert len(set(labels.values())) == len(labels) == 4
    texts = [label for kernel, label in labels.values() if kernel.endswith("dense_attention_kernel")]
    assert any("fp32" in text and "64" in text for text in texts)
    assert any("bf16" in text and "80" in text for text in texts)
    assert all("warps 4" in shared for shared in kernels.values())
    one = launches()[0]
    other = dataclasses.replace(one, aligned=())
    assert len(set(tools.tables.described([one, other])[1].values())) == 2
    assert list(tools.tables.described([one])[1].values()) == [(one.kernel, "the only one")]


@pytest.mark.parametrize("worse", ["registers", "spilled", "shared", "instructions"])
def test_what_got_worse_is_told_and_what_got_better_is_not(tools, worse):
    before, names = {"k": some()}, {"k": "kernel [label]"}
    row = before["k"]["sm_90"]
    after = {"k": before["k"] | {"sm_90": dataclasses.replace(row, **{worse: getattr(row, worse) + 1})}}
    (told,) = tools.main.worse(after, before, names)
    assert told.startswith("sm_90 kernel [label]")
    assert worse in told
    assert list(tools.main.worse(before, after, names)) == []
    assert list(tools.main.worse(after, {}, names)) == []


def test_limits(tools):
    names = {"k": "kernel"}
    assert list(tools.main.over_limits({"k": some(shared=64 << 10)}, names)) == []
    assert [t.split()[0] for t in tools.main.over_limits({"k": some(shared=99 << 10)}, names)] == ["gfx942"]
    told = list(tools.main.over_limits({"k": some(shared=(99 << 10) + 1)}, names))
    assert [text.split()[0] for text in told] == ["sm_89", "sm_120", "gfx942"]
    assert len(list(tools.main.over_limits({"k": some(spilled=4)}, names))) == len(TARGETS)


def test_an_error_of_the_compiler_is_told(tools, monkeypatch):
    broken = dataclasses.replace(steps()[0], kernel="sparsesel.ops.dense_attention:no_such_kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "no_such_kernel" in tools.main.compile_one(broken, "sm_90")


def test_what_the_record_lacks_is_told(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(tools.main, "FOLDER", tmp_path)
    own = launches()
    rows = {tools.tables.key_of(launch): some() for launch in own}
    sources = {launch.kernel: "hash" for launch in own}
    record = tools.tables.Record()
    record.renew(own, "3.9.0", rows, sources)
    for name, text in record.tables().items():
        (tmp_path / name).write_text(text)
    assert list(tools.main.stale(own, sources, record, "3.9.0")) == []
    (told,) = tools.main.stale(own, sources | {own[0].kernel: "another"}, record, "3.9.0")
    assert told.startswith(own[0].kernel)
    (told,) = tools.main.stale(own[:-1], sources, record, "3.9.0")
    assert told.startswith("0 configurations are not in the record, 1 are")
    (told,) = tools.main.stale([*own, dataclasses.replace(own[0], num_warps=2)], sources, record, "3.9.0")
    assert told.startswith("1 configurations are not in the record, 0 are")
    (tmp_path / "sm_90.md").write_text("old")
    (told,) = tools.main.stale(own, sources, record, "3.9.0")
    assert "sm_90.md is stale" in told
