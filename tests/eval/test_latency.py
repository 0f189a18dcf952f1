"""What is timed is the work that was asked for: every layer, the paths in the shares that were set. Not how long."""

import importlib.resources
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsesel import InputError, make_selector
from sparsesel.eval import attention_step, run, runner, stages
from sparsesel.eval.attention_step import AttentionSteps, Contestant, Schedule, counted, milliseconds
from sparsesel.eval.decode import MeasurementError
from sparsesel.eval.paths import Geometry, PathMix
from sparsesel.eval.tasks.latency import Latency, stages_of
from sparsesel.hookspecs import SelectorPlugin
from sparsesel.registry import registry
from sparsesel_full.selector import FullSelector

GIVEN: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 32, "layers": 3, "bandwidth": 100.0}
QUICK: dict[str, Any] = {"steps": 3, "repeats": 1}
GEOMETRY = Geometry(heads=6, kv_heads=2, head_dim=32, layers=(0, 1, 2, 3), dtype="float32")


@pytest.fixture(scope="module")
def measured(model_folder):
    specs = ["full", "exact_topk", "retopk", "tokenselect,sink_size=8,local_size=8"]
    return run(
        "latency", str(model_folder), specs, set={"topk": 32}, contexts=[300, 400], backend="eager", **GIVEN, **QUICK
    )


def steps_of(specs, mix, *, steps=16, context=160, nearness=0.97):
    attention = AttentionSteps(GEOMETRY, Schedule(context, steps, 1, nearness), "cpu", "eager", 0)
    chosen = {spec: ([make_selector(spec)] * 4, mix) for spec in specs}
    return attention.time(chosen)


def test_no_model_is_loaded_and_its_positions_are_no_limit(model_folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("loaded")

    monkeypatch.setattr(runner, "load_model", refuse)
    monkeypatch.setattr(runner, "load_tokenizer", refuse)
    results = run("latency", str(model_folder), ["full"], contexts=[300], bandwidth=100.0, **QUICK)  # 256 positions
    (line,) = results.lines
    parameters = line["provenance"]["parameters"]
    # The model's own.
    assert [parameters[name] for name in ("layers", "heads", "kv_heads", "head_dim")] == [2, 4, 2, 8]
    assert line["metrics"]["attended"] == pytest.approx(300 - 3, abs=0.1)  # three steps, before two that count less


def test_lines_say_what_was_timed(measured):
    assert len(measured) == 8
    for line in measured.lines:
        metrics, parameters = line["metrics"], line["provenance"]["parameters"]
        assert [parameters[name] for name in GIVEN] == list(GIVEN.values())
        assert parameters["dtype"] == "float32"
        assert line["provenance"]["data_sha256"] is None
        low, high = metrics["attention_ms_range"]
        assert 0 < low <= metrics["attention_ms"] <= high
        assert metrics["modelled_ms"] == pytest.approx(metrics["bytes_per_step"] / 100e6)
        assert metrics["roofline_share"] == pytest.approx(metrics["modelled_ms"] / metrics["attention_ms"])
        assert metrics["path_mix"] == "0.875/0.119/0.006"
    by_spec = {(line["selector"], line["context"]): line["metrics"] for line in measured.lines}
    # All keys and values of all layers once, float32.
    assert by_spec["full", 400]["bytes_per_step"] == 3 * 2 * 400 * 32 * 2 * 4


@pytest.mark.parametrize(("fallback", "refresh"), [(0.0, 0.0), (0.3, 0.0), (0.2, 0.1), (0.9, 0.0)])
def test_heads_take_paths_in_the_shares_that_are_set(fallback, refresh):
    (one,) = steps_of(["retopk,topk=16,refresh_interval=0"], PathMix(fallback, refresh)).values()
    shares: dict[str, Any] = counted(one)
    assert shares["exact_share"] == pytest.approx(fallback + refresh, abs=0.08)
    assert shares["fallback_share"] == pytest.approx(fallback, abs=0.08)
    assert shares["refresh_share"] == pytest.approx(refresh)
    assert shares["exact_share"] + shares["reuse_share"] == pytest.approx(1)
    assert shares["attended"] == 16


def test_heads_that_share_a_choice_turn_together():
    mix = PathMix(0.3, together=True)
    (one,) = steps_of(["tokenselect,topk=32,sink_size=8,local_size=8"], mix).values()
    assert counted(one)["miss_share"] == pytest.approx(0.3, abs=0.1)
    near = torch.nn.functional.cosine_similarity(one.queries[..., 1:, :], one.queries[..., :-1, :], dim=-1) > 0.8
    assert torch.equal(near, near[:, :, :1].expand_as(near))


def test_queries_are_as_near_as_is_set():
    (one,) = steps_of(["full"], PathMix(), nearness=0.9).values()
    queries = one.queries[..., :40, :]
    cosines = [
        torch.nn.functional.cosine_similarity(queries[..., i, :], queries[..., j, :], dim=-1).mean()
        for i, j in itertools.combinations((0, 7, 20, 39), 2)
    ]
    assert torch.stack(cosines).mean().item() == pytest.approx(0.9, abs=0.02)


def test_every_selector_sees_the_same_steps():
    one, other = steps_of(["full", "exact_topk,topk=160"], PathMix(0.2)).values()
    assert torch.equal(one.queries, other.queries)
    assert one.ordinary["attended"] == other.ordinary["attended"] == pytest.approx(160 - 2 - 7.5)


class Bystander(FullSelector):
    def attend(self, query, kv, state, *, scale):
        return query


def test_a_selector_that_does_not_act_is_refused():
    attention = AttentionSteps(GEOMETRY, Schedule(80, 3, 1, 0.97), "cpu", "eager", 0)
    with pytest.raises(MeasurementError, match="acted in 0 of 72"):
        attention.time({"idle": ([Bystander(make_selector("full").config)] * 4, PathMix())})


def test_a_median_for_each_step_and_a_mean_over_them_by_their_share():
    times = [[1.0, 3.0, 10.0, 20.0], [2.0, 3.0, 30.0, 20.0], [9.0, 6.0, 20.0, 20.0]]
    one = Contestant([], PathMix(0.1, 0.25), torch.empty(0), times=times)
    middle, fastest, slowest = milliseconds(one, 2)
    assert middle == pytest.approx(0.75 * (2 + 3) / 2 + 0.25 * 20)
    assert fastest == pytest.approx(0.75 * (1 + 3) / 2 + 0.25 * 15)
    assert slowest == pytest.approx(0.75 * (9 + 6) / 2 + 0.25 * 25)
    one.grown = {1, 2, 3}  # of both kinds of steps one at least is left, or all are
    assert milliseconds(one, 2)[0] == pytest.approx(0.75 * 2 + 0.25 * 20)


def test_steps_that_take_more_memory_do_not_count():
    """Loki's copy of the keys is full once within these steps, and grows by half."""
    loki, full = steps_of(["loki,topk=32,rank=8", "full"], PathMix(), steps=70, context=210).values()
    assert len(loki.grown) == 1
    assert not full.grown


def test_stages_of_eager_steps_are_those_of_the_paper(measured):
    by_spec = {line["selector"]: line["metrics"]["stage_ms"] for line in measured.lines}
    assert {"match", "union", "QK", "select", "gather", "aggregate"} <= by_spec["retopk"].keys()
    assert {"QK", "select", "aggregate"} <= by_spec["exact_topk"].keys()
    assert "match" not in by_spec["exact_topk"]
    assert "QK + aggregate" in by_spec["full"]
    assert all(taken >= 0 for stages in by_spec.values() for taken in stages.values())


def test_stages_of_kernels_and_levels(model_folder):
    tiny = {"heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1, "bandwidth": 1.0}
    results = run(
        "latency",
        str(model_folder),
        ["retopk,topk=4,cache_size=4,window_size=2,recall_size=2"],
        contexts=[48],
        backend="triton",
        steps=1,
        repeats=1,
        levels=[3, 5],
        **tiny,
    )
    stages = {line["selector"].rpartition(" ")[2]: line["metrics"]["stage_ms"].keys() for line in results.lines}
    exact = {"QK + select", "select + aggregate"}
    (usual,) = [names for level, names in stages.items() if level not in ("L3", "L5")]
    assert {"match + union", "QK"} | exact <= usual
    assert {"match to aggregate"} | exact <= stages["L5"]
    assert "QK" not in stages["L5"]
    assert {"match + union", "QK", "aggregate"} | exact <= stages["L3"]
    counts = [line["metrics"]["attended"] for line in results.lines]
    assert counts == [4, 4, 4]


def test_the_report_divides_times_and_bytes(measured):
    (section,) = measured.report()
    times, work, stages = (table for table in section.tables if "context 400" in table.title)
    metrics = {line["selector"]: line["metrics"] for line in measured.lines if line["context"] == 400}
    columns, by_bytes = ({column.heading: column.values for column in table.columns} for table in (times, work))
    for row, spec in enumerate(times.rows):
        own = metrics[spec]
        for reference, name in (("exact_topk", "×exact"), ("full", "×full")):
            assert columns[name][row] == pytest.approx(metrics[reference]["attention_ms"] / own["attention_ms"])
            modelled = metrics[reference]["bytes_per_step"] / own["bytes_per_step"]
            assert by_bytes[name][row] == pytest.approx(modelled)
    assert list(stages.rows) == list(work.rows) == list(times.rows)
    assert "measured" in times.title
    assert "modelled" in work.title
    assert "no measure of a kernel's speed" in section.notes[0]
    titles = [figure.title for figure in section.figures]
    assert len(set(titles)) == len(titles) == 5
    assert [figure.title for figure in section.figures if type(figure).__name__ == "Bars"] == titles[3:]


def test_stages_and_the_rest_are_the_whole(measured):
    from sparsesel.eval.report import rows_by_context

    for rows in rows_by_context(measured.lines).values():
        for row in rows:
            stages = stages_of(row)
            (line,) = row.lines.values()
            timed = line["metrics"]["stage_ms"]
            whole = max(row.mean("attention_ms"), math.fsum(timed.values()))  # timing each takes time too
            assert math.fsum(stages.values()) == pytest.approx(whole)
            assert stages.keys() == timed.keys() | {"other"}


def test_what_no_stage_takes_has_one_name(measured):
    (section,) = measured.report()
    table = section.tables[2]
    assert table.columns[-1].heading == "other"
    bars = next(figure for figure in section.figures if type(figure).__name__ == "Bars")
    assert bars.parts[-1][0] == "other"
    assert "other is what no stage takes" in section.notes[1]
    # Stages that the figure has no part for are named below it.
    names = [f"kernel_{index}" for index in range(9)]
    lines = [
        {**line, "metrics": {**line["metrics"], "attention_ms": 90.0, "stage_ms": dict.fromkeys(names, 9.0)}}
        for line in measured.lines
        if line["context"] == 400
    ]
    (bars,) = Latency.report(lines)[0].figures
    assert [name for name, _ in bars.parts] == [*names[:7], "other"]
    assert list(bars.parts[-1][1]) == [pytest.approx(27.0)] * len(lines)
    assert "kernel_7, kernel_8: part of other here" in bars.caption


def test_no_lines_no_report():
    assert Latency.report([]) == []


def test_a_mix_comes_from_results_with_the_same_selector(model_folder, text_file, tmp_path):
    specs = ["full", "retopk,similarity_threshold=0.3", "tokenselect,sink_size=2,local_size=2"]
    common = {"set": {"topk": 8}, "texts": [text_file], "backend": "eager"}
    counted_there = run("perplexity", str(model_folder), specs, contexts=[64, 96], suffix=8, out=tmp_path, **common)
    there = {line["selector"]: line["metrics"] for line in counted_there.lines if line["context"] == 96}
    timed = run("latency", str(model_folder), specs, contexts=[120], path_mix=str(tmp_path), set={"topk": 8}, **QUICK)
    here = {line["selector"]: line["metrics"]["path_mix"] for line in timed.lines}
    assert here["full"] == "1/0/0"
    own = there[specs[1]]
    assert here[specs[1]] == str(PathMix(own["exact_share"] - own["refresh_share"], own["refresh_share"]))
    assert here[specs[2]] == str(PathMix(there[specs[2]]["miss_share"]))
    with pytest.raises(
        InputError, match=r"path_mix: expected results of perplexity or fidelity with the selector retopk"
    ):
        run("latency", str(model_folder), ["retopk"], contexts=[120], path_mix=str(tmp_path), set={"topk": 8})


@pytest.mark.parametrize(
    ("fields", "selectors", "message"),
    [
        ({"path_mix": "0.5/0.1/0.1"}, ["full"], "add up to 1"),
        ({"path_mix": "0/0/1"}, ["full"], "add up to 1"),
        ({"path_mix": "nowhere"}, ["full"], "a folder with results"),
        ({"kv_heads": 4}, ["full"], "a divisor of the 6 query heads"),
        ({"steps": 500}, ["full"], "at least 546"),
        ({"levels": [1]}, ["full"], "a selector with levels"),
        ({"levels": [1]}, ["retopk"], "backend triton"),
        ({"levels": [9]}, ["retopk"], "less than or equal to 5"),
        ({"bandwidth": "fast"}, ["full"], "one of l4"),
    ],
)
def test_what_cannot_be_timed_is_refused(model_folder, fields, selectors, message):
    with pytest.raises(InputError, match=message):
        run(
            "latency",
            str(model_folder),
            selectors,
            contexts=[120],
            backend="eager",
            **{**GIVEN, **QUICK, **fields},
        )


def test_caches_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(attention_step, "free_memory", lambda device: 1e6)
    with pytest.raises(InputError, match=r"caches fit into the 0\.0 GB"):
        AttentionSteps(GEOMETRY, Schedule(4000, 3, 1, 0.97), "cpu", "eager", 0)


def test_bandwidths_have_names():
    assert registry().make_task_config("latency", {"bandwidth": "l20"}).model_dump()["bandwidth"] == 864
    assert registry().make_task_config("latency", {"bandwidth": 5}).model_dump()["bandwidth"] == 5


@pytest.mark.parametrize("name", [name for name, one in registry().selectors.items() if one.plugin.stages])
def test_the_stages_that_a_plugin_declares_are_of_its_own_functions(name):
    """A name that is gone would be counted as something else."""
    plugin = registry().get(name).plugin
    folder = Path(str(importlib.resources.files(plugin.factory.partition(".")[0])))
    defined = set(re.findall(r"def (\w+)\(", "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))))
    assert plugin.stages.keys() <= defined


def test_what_a_third_partys_functions_do_is_told_by_its_plugin(monkeypatch):
    here, there = ({"torch": torch, "__name__": name} for name in ("mine.selector", "others.selector"))
    for space in (here, there):
        exec("def pick(x):\n    return torch.topk(x, 2).indices", space)
    plugin = SelectorPlugin("mine", "Mine.", "mine.config:C", "mine.selector:S", stages={"pick": "guess"})
    monkeypatch.setattr(stages, "registry", lambda: SimpleNamespace(selectors={"mine": SimpleNamespace(plugin=plugin)}))
    stages._declared.cache_clear()
    ones = torch.ones(8)
    try:
        with stages.StageClock(torch.device("cpu")) as clock:
            here["pick"](ones)
            first = clock.milliseconds().keys()
            there["pick"](ones)
        assert list(first) == ["guess"]
        assert clock.milliseconds().keys() == {"guess", "other"}
    finally:
        stages._declared.cache_clear()
