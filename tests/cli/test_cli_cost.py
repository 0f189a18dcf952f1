"""`sparsesel cost`: the selectors' own accounts, summed over layers and held against a bandwidth."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sparsesel import LayerSpec, StepCost, make_selector
from sparsesel.cli.app import app
from sparsesel.eval import cost as model
from sparsesel.registry import registry

GEOMETRY = {"--heads": 8, "--kv-heads": 2, "--head-dim": 64, "--layers": 3, "--context": 1024}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*more, **changes):
        options = {**GEOMETRY, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
        pairs = [str(part) for option in options.items() if option[1] is not None for part in option]
        result = CliRunner().invoke(app, ["cost", *pairs, *more])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


@pytest.fixture
def rows(run):
    def read(*more, **changes):
        result = run("--json", *more, **changes)
        assert result.exit_code == 0, result.output
        return {(row["selector"], row["context"]): row for row in json.loads(result.stdout)["rows"]}

    return read


def test_every_selector_is_there_at_the_budget_of_comparisons(rows):
    found = rows()
    for name in registry().selectors:
        spec = f"{name}:strict" if "strict" in registry().presets(name) else name
        row = found.pop((spec, 1024))
        assert row["attended"] == (1024 if name == "full" else 512)
        assert row["config"].get("topk", 512) == 512
    assert not found


def test_full_reads_the_whole_cache_once(rows):
    row = rows("--selector", "full")["full", 1024]
    cache = 3 * 2 * 1024 * 64 * 2  # layers, key-value heads, tokens, channels, bytes
    assert (row["key_bytes"], row["value_bytes"], row["bytes_read"]) == (cache, cache, 2 * cache)
    assert row["flops"] == 3 * 4 * 8 * 1024 * 64
    assert row["milliseconds"] == pytest.approx(2 * cache / 864e9 * 1e3)
    assert (row["speedup_full"], row["state_bytes"]) == (1, 0)
    assert rows("--selector", "full", dtype="float32")["full", 1024]["key_bytes"] == 2 * cache


@pytest.mark.parametrize("spec", ["exact_topk,topk=100", "retopk,topk=64", "retopk,topk=6.25%"])
def test_a_row_is_the_selectors_own_account_times_layers(rows, spec):
    row = rows("--selector", spec)[spec, 1024]
    selector = make_selector(spec)
    cost = selector.cost(LayerSpec(0, 8, 2, 64, torch.bfloat16, torch.device("cpu")), 1024)
    for name in ("key_bytes", "value_bytes", "metadata_bytes", "score_bytes", "bytes_read", "flops", "state_bytes"):
        assert row[name] == pytest.approx(3 * getattr(cost, name))
    assert row["attended"] == cost.attended
    exact = rows("--selector", f"exact_topk,topk={selector.config.model_dump()['topk']}")
    (reference,) = exact.values()
    assert row["speedup_exact"] == pytest.approx(reference["bytes_read"] / row["bytes_read"])
    assert reference["speedup_exact"] == 1
    full = rows("--selector", "full")["full", 1024]
    assert row["speedup_full"] == pytest.approx(full["bytes_read"] / row["bytes_read"])


@pytest.mark.parametrize(("bandwidth", "number"), [("h100", 3350), ("H100", 3350), ("864", 864), ("0.5", 0.5)])
def test_bandwidth_by_name_or_number_sets_the_time_alone(rows, bandwidth, number):
    row = rows("--selector", "retopk", bandwidth=bandwidth)["retopk", 1024]
    assert row["milliseconds"] == pytest.approx(row["bytes_read"] / number / 1e6)
    assert row["speedup_full"] == rows("--selector", "retopk")["retopk", 1024]["speedup_full"]


def test_contexts_and_set(rows):
    found = rows("--context", "64", "--set", "topk=32", "--selector", "full", "--selector", "exact_topk")
    assert list(found) == [("full", 1024), ("exact_topk", 1024), ("full", 64), ("exact_topk", 64)]
    assert found["exact_topk", 64]["attended"] == 32
    assert found["full", 64]["bytes_read"] * 16 == found["full", 1024]["bytes_read"]


def test_dense_layers_are_told(monkeypatch, run):
    """A selector that leaves its first two layers dense, as some do."""

    class Late:
        def cost(self, layer, length):
            attended = length if layer.layer_idx < 2 else 16
            return StepCost(attended, attended, 0, 0, 0, 0, attended)

    make = registry().make_selector
    monkeypatch.setattr(
        type(model.registry()),
        "make_selector",
        lambda self, config, overrides=None: (
            Late() if getattr(config, "name", "") == "retopk" else make(config, overrides)
        ),
    )
    result = run("--selector", "retopk")
    assert "retopk: 2 of 3 layers are dense." in result.stdout
    row = json.loads(run("--selector", "retopk", "--json").stdout)["rows"][0]
    assert row["attended"] == pytest.approx((1024 + 1024 + 16) / 3)
    assert row["dense_layers"] == 2


def test_the_table_says_what_was_modelled(run):
    result = run("--context", "2048", "--selector", "full", "--selector", "retopk,topk=64", bandwidth="h200")
    assert result.exit_code == 0
    for part in ("context 1024", "context 2048", "8 query heads over 2 KV heads of 64, bfloat16", "4800 GB/s"):
        assert part in result.stdout
    named = [line.split()[0] for line in result.stdout.splitlines() if line.startswith(("full", "retopk"))]
    assert named == (["full", "retopk,topk=64"] * 2 + ["retopk,topk=64:"]) * 2  # two tables and a note, twice


@pytest.mark.parametrize("columns", ["80", "160"])
def test_no_column_is_cut_off(run, monkeypatch, columns):
    """At a million tokens, whose numbers are as long as they get."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = run(heads=32, kv_heads=8, head_dim=128, layers=32, context=1 << 20).stdout.splitlines()
    for heading in ("reads keys values metadata scores all", "comes to attended GFLOP state ms over full over exact"):
        (at,) = (i for i, line in enumerate(lines) if line.split() == heading.split())
        rows = {line.split()[0]: line.split()[1:] for line in lines[at + 2 : at + 2 + len(registry().selectors)]}
        assert {name.partition(":")[0] for name in rows} == set(registry().selectors)
        assert {len(row) for row in rows.values()} == {
            len(heading.replace("over ", "").replace("comes to", "").split()) - ("reads" in heading)
        }


def test_what_kind_of_step_it_is_is_told(run, rows):
    text = run("--selector", "tokenselect").stdout
    assert "tokenselect: a hit" in text
    assert "a miss scores every key" in text
    found = rows("--selector", "retopk", "--selector", "full")
    assert "every head reuses" in found["retopk", 1024]["assumes"]
    assert found["full", 1024]["assumes"] == ""


@pytest.mark.parametrize(
    ("more", "changes", "field"),
    [
        ([], {"kv_heads": 3}, "cost.heads"),
        ([], {"heads": 0}, "cost.heads"),
        ([], {"kv_heads": 0}, "cost.kv_heads"),
        ([], {"head_dim": 0}, "cost.head_dim"),
        ([], {"layers": -1}, "cost.layers"),
        ([], {"layers": 10**23}, "cost.layers"),
        ([], {"heads": 2**32}, "cost.heads"),
        ([], {"kv_heads": 2**32}, "cost.kv_heads"),
        ([], {"head_dim": 10**320}, "cost.head_dim"),
        ([], {"context": 2**31}, "cost.contexts"),
        (["--context", str(10**320)], {}, "cost.contexts"),
        ([], {"bandwidth": "1e-320"}, "cost.bandwidth"),
        ([], {"context": 0}, "cost.contexts"),
        (["--context", "1024"], {}, "cost.contexts"),
        ([], {"dtype": "int4"}, "cost.dtype"),
        ([], {"bandwidth": "0"}, "cost.bandwidth"),
        ([], {"bandwidth": "nan"}, "cost.bandwidth"),
        ([], {"bandwidth": "inf"}, "cost.bandwidth"),
        ([], {"bandwidth": "h1000"}, "cost.bandwidth"),
        (["--selector", "nope"], {}, "selector"),
        (["--selector", "full", "--set", "topk=3"], {}, "--set"),
        (["--set", "topk=0"], {}, "exact_topk.topk"),
        (["--selector", "sparq,rank=65"], {}, "sparq.rank"),
        (["--selector", "loki,rank=65"], {}, "loki.rank"),
    ],
)
def test_bad_input_is_refused(run, more, changes, field):
    result = run(*more, **changes)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first == f"error in {field}"
    assert [line.split()[0] for line in rest if not line.startswith("   " * 4)] == ["expected", "got", "remedy"]


def test_geometry_must_be_given(run):
    assert run(heads=None).exit_code == 2
