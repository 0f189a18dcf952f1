"""`sparsesel explain`: what runs and why, for people and as JSON."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from sparsesel import LayerSpec, make_selector
from sparsesel.cli.app import app

GEOMETRY = {"--heads": 8, "--kv-heads": 2, "--head-dim": 64}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(selector, *more, **changes):
        options = {**GEOMETRY, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
        pairs = [str(part) for option in options.items() if option[1] is not None for part in option]
        result = CliRunner().invoke(app, ["explain", selector, *pairs, *more])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


@pytest.fixture
def report(run):
    def read(selector, *more, **changes):
        result = run(selector, "--json", *more, **changes)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return read


def test_kernels_of_a_device_that_is_not_there(report):
    found = report("exact_topk,topk=100", device="cuda", context=4096, dtype="float16")
    assert (found["backend"], found["device"], found["target"]) == ("triton", "cuda", None)
    assert found["config"]["topk"] == 100
    (context,) = found["contexts"]
    cost = make_selector("exact_topk,topk=100").cost(LayerSpec(0, 8, 2, 64, torch.float16, torch.device("cpu")), 4096)
    assert context["bytes_read"] == cost.bytes_read
    assert context["attended"] == 100
    assert context["refused"] is None
    assert list(context["kernels"]) == list(context["torch_ops"]) == list(context["workspace_bytes"])
    assert context["workspace_bytes"]["later steps"] >= 8 * 4096 * 4  # scores
    assert context["torch_ops"]["later steps"] == context["torch_ops"]["prefill"] == 0
    step = context["kernels"]["later steps"]
    assert [one["kernel"] for one in step][-1] == "combine_kernel"
    for one in step:
        assert len(one["grid"]) in (1, 2, 3)
        assert one["num_warps"] in (1, 2, 4, 8, 16)
        assert one["compiled"] is None
        assert all(name.isupper() for name in one["constants"])


def test_text_says_the_same(run):
    result = run("retopk", device="cuda", context=4096)
    assert result.exit_code == 0
    for part in ("retopk, layer 0", "8 query heads over 2 KV heads of 64", "backend triton", "Context 4096", "BLOCK_"):
        assert part in result.stdout
    # The first step differs from later ones: supports of the prompt's queries are built.
    lines = [
        line for line in result.stdout.splitlines() if line.startswith(("prefill: ", "first step: ", "later steps: "))
    ]
    assert lines[0].startswith("prefill: no kernels, ")
    assert "no PyTorch operations" not in lines[0] + lines[1]
    assert lines[2].startswith("later steps: 5 kernels, no PyTorch operations, ")
    assert all(line.endswith("B allocated") for line in lines)
    assert "later steps: the same kernels, no PyTorch operations, " in run("full", device="cuda").stdout


@pytest.mark.parametrize("columns", [80, 30])
def test_no_name_and_no_number_is_broken(run, report, monkeypatch, columns):
    (context,) = report("retopk", device="cuda", heads=28, kv_heads=4, head_dim=128)["contexts"]
    monkeypatch.setenv("COLUMNS", str(columns))
    output = run("retopk", device="cuda", heads=28, kv_heads=4, head_dim=128).stdout
    words = {word.rstrip(",") for word in output.split()}
    for one in [*context["kernels"]["first step"], *context["kernels"]["later steps"]]:
        assert one["kernel"].removesuffix("_kernel") in words
        assert "×".join(map(str, one["grid"])) in words
        assert {f"{name}={value}" for name, value in one["constants"].items()} <= words
    constants = [line for line in output.splitlines() if "=" in line and "backend" not in line]
    assert all(len(line) <= columns for line in constants)


def test_without_a_device_the_backend_is_eager_and_says_why(run, report):
    found = report("quest", device="cpu")
    assert found["backend"] == "eager"
    (context,) = found["contexts"]
    assert context["kernels"] is None
    assert context["context"] == 131072
    assert "no kernels" in run("quest", device="cpu").stdout
    assert "needs" in run("full", device="cpu").stdout or "need a CUDA" in run("full", device="cpu").stdout


def test_the_first_layer_that_is_not_dense_is_explained(report):
    assert report("quest", device="cpu")["layer"] == 2
    assert report("quest", device="cpu", layer=0)["contexts"][0]["attended"] == 131072
    assert report("quest:strict", device="cpu")["layer"] == 0
    assert report("full", device="cpu")["layer"] == 0


def test_a_file_by_layers_needs_the_layer(run, report, tmp_path):
    path = tmp_path / "layered.toml"
    path.write_text('[layers]\n"2-" = "exact_topk"\n')
    result = run(str(path), device="cpu")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, "error in --layer")
    assert report(str(path), device="cpu", layer=5)["config"]["name"] == "exact_topk"
    assert report(str(path), device="cpu", layer=1)["config"]["name"] == "full"


def test_contexts_pages_and_set(report):
    found = report("quest", "--context", "2048", "--set", "topk=64", device="cuda", context=1024, page_size=16, batch=2)
    assert [one["context"] for one in found["contexts"]] == [1024, 2048]
    assert {one["attended"] for one in found["contexts"]} == {64}
    first = found["contexts"][0]["kernels"]["later steps"][0]
    assert first["constants"]["PAGE"] == 16


def test_where_no_kernel_applies_the_reason_is_told(run, report):
    (context,) = report("full", device="cuda", heads=40, kv_heads=2)["contexts"]
    assert "at most 16 query heads" in context["refused"]
    assert context["kernels"] is context["torch_ops"] is context["workspace_bytes"] is None
    _, second, third, *_ = run("full", device="cuda", heads=40, kv_heads=2).stdout.splitlines()
    assert second.startswith("refused: group size: expected at most 16 query heads")
    assert third.startswith("backend triton")
    assert third.endswith("but it refuses this layer")
    assert "at most 512 channels" in report("full", device="cuda", head_dim=600)["contexts"][0]["refused"]


@pytest.mark.parametrize(
    ("selector", "more", "changes", "field"),
    [
        ("nope", [], {}, "selector"),
        ("full", [], {"kv_heads": 3}, "explain.heads"),
        ("full", [], {"heads": 0}, "explain.heads"),
        ("full", [], {"head_dim": 0}, "explain.head_dim"),
        ("full", [], {"dtype": "int4"}, "explain.dtype"),
        ("full", [], {"batch": 0}, "explain.batch"),
        ("full", [], {"page_size": -1}, "explain.page_size"),
        ("full", [], {"layer": -1}, "explain.layer"),
        ("full", [], {"context": 0}, "explain.contexts"),
        ("full", ["--context", "9"], {"context": 9}, "explain.contexts"),
        ("full", [], {"context": 2, "device": "cpu"}, "contexts"),
        ("full", [], {"context": 2**31}, "explain.contexts"),
        ("full", [], {"device": "sm_70"}, "--device"),
        ("full", [], {"device": "cuda:0"}, "--device"),
        ("full", [], {"backend": "cublas"}, "backend"),
        ("full", ["--set", "topk=3"], {}, "--set"),
        ("sparq,rank=65", [], {}, "sparq.rank"),
    ],
)
def test_bad_input_is_refused(run, selector, more, changes, field):
    result = run(selector, *more, **changes)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first == f"error in {field}"
    assert [line.split()[0] for line in rest if not line.startswith("   " * 4)] == ["expected", "got", "remedy"]


def test_compiling_needs_a_process_without_the_interpreter(run):
    result = run("full", device="sm_89")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, "error in TRITON_INTERPRET")


def test_a_target_is_compiled_for(tmp_path):
    geometry = [str(part) for option in GEOMETRY.items() for part in option]
    words = ["explain", "full", *geometry, "--context", "4096", "--device", "sm_89", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "sparsesel", *words],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["target"] == "sm_89"
    for one in found["contexts"][0]["kernels"]["later steps"]:
        assert one["compiled"]["registers"] > 0
        assert one["compiled"]["spilled"] == 0
        assert one["compiled"]["shared"] <= 99 << 10
