"""Variants are what their names say, are measured as such, and are found again from their configurations alone."""

import math

import pytest

from sparsesel import InputError, make_config, make_selector
from sparsesel.config import LayeredConfig
from sparsesel.eval import run
from sparsesel.eval.paths import Geometry, step_bytes
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.eval.sweep import varied
from sparsesel.eval.tasks.ablation import Ablation, AblationConfig
from sparsesel.eval.tasks.sensitivity import Sensitivity, SensitivityConfig

BASE = "retopk,similarity_threshold=0.3,cache_size=6,window_size=4,recall_size=2,refresh_interval=5"


def sensitivity(**fields):
    return Sensitivity(SensitivityConfig(**fields))


@pytest.fixture(scope="module")
def measured(model_folder, text_file):
    """Both tasks, and perplexity of two of the variants, on the same documents."""

    def one(task, selectors, **fields):
        return run(
            task,
            str(model_folder),
            selectors,
            set={"topk": 8},
            contexts=[64, 96],
            texts=[text_file],
            suffix=8,
            documents=2,
            **fields,
        )

    named = ["full", "exact_topk", BASE]
    return {
        "sensitivity": one("sensitivity", named, values={"similarity_threshold": [0.1, 2.0], "recall_size": [1]}),
        "ablation": one("ablation", named, smaller_cache_size=3),
        "perplexity": one("perplexity", [varied(BASE, "similarity_threshold", 2.0), f"{BASE},fallback=off"]),
    }


@pytest.mark.parametrize("task", [sensitivity(), Ablation(AblationConfig())])
def test_a_variant_differs_in_one_field_and_is_named_by_it(task):
    given = resolve_selectors(["full", "retopk:quality", "streaming_llm"])
    chosen = task.selectors(given)
    assert list(given) == [spec for spec in chosen if spec in given]
    for spec, config in chosen.items():
        # As a user would write it, it is what is measured.
        assert resolve_selectors([spec])[spec] == config
    assert len({str(config) for config in chosen.values()}) == len(chosen)
    base = given["retopk:quality"].model_dump()
    variants = [one.model_dump() for spec, one in chosen.items() if spec.startswith("retopk") and spec not in given]
    assert len(variants) > 4
    for variant in variants:
        assert sum(variant[name] != base[name] for name in base) == 1


def test_default_sweeps_are_around_the_selectors_own_values():
    given = resolve_selectors(["full", "exact_topk", "retopk"], ["topk=128"])
    chosen = sensitivity().selectors(given)
    values = {}
    for spec in chosen:
        if spec not in given:
            field, _, value = spec.removeprefix("retopk,").partition("=")
            values.setdefault(field, []).append(float(value))
    assert values == {
        "topk": [64, 256],
        "cache_size": [16, 64],
        "recall_size": [1, 2, 8],
        "similarity_threshold": [0.8, 0.9, 0.95],
        "refresh_interval": [0, 32, 512],
        "window_size": [0, 16, 64],
    }


def test_defaults_that_a_selector_refuses_are_left_out():
    chosen = sensitivity().selectors(resolve_selectors(["retopk,cache_size=4,recall_size=4"]))
    assert not any("recall_size=8" in spec or "cache_size=2" in spec for spec in chosen)
    assert "retopk,recall_size=4,cache_size=8" in chosen


def test_a_percentage_is_halved_and_doubled():
    chosen = sensitivity().selectors(resolve_selectors(["retopk,topk=6.25%"]))
    assert {"retopk,topk=3.125%", "retopk,topk=12.5%"} <= chosen.keys()


def test_any_field_of_any_selector_can_be_swept():
    given = resolve_selectors(["full", "streaming_llm", "quest"])
    chosen = sensitivity(values={"sink_size": 8, "topk": [256, 512]}).selectors(given)
    assert list(chosen) == [
        "full",
        "streaming_llm",
        "streaming_llm,sink_size=8",
        "streaming_llm,topk=256",
        "quest",
        "quest,topk=256",
    ]  # 512 is what both have


def test_ablations_of_the_paper_and_no_more():
    chosen = Ablation(AblationConfig()).selectors(resolve_selectors(["full", "retopk"]))
    assert list(chosen)[2:] == [
        "retopk,retrieval=recent",
        "retopk,recall_size=2",
        "retopk,cache_size=16",
        "retopk,fallback=off",
        "retopk,window_size=0",
        "retopk,refresh_interval=0",
    ]
    without = Ablation(AblationConfig()).selectors(resolve_selectors(["retopk,window_size=0"]))
    assert sum("window_size=0" in spec for spec in without) == len(without)


@pytest.mark.parametrize(
    ("values", "selectors", "message"),
    [
        ({"topc": [1]}, ["retopk"], "Did you mean 'topk'"),
        ({"topk": [0]}, ["retopk"], "at least 1"),
        ({"topk": [512]}, ["retopk"], "one of the fields to vary"),
        ({}, ["full"], "one of the fields to vary"),
    ],
)
def test_sweeps_of_nothing_are_refused(values, selectors, message):
    with pytest.raises(InputError, match=message):
        sensitivity(values=values).selectors(resolve_selectors(selectors))


def test_a_spec_that_set_made_something_else_is_refused():
    given = resolve_selectors(["retopk,topk=64"], ["topk=128"])
    with pytest.raises(InputError, match="Leave topk out of the spec"):
        sensitivity(values={"topk": [64]}).selectors(given)


def test_bad_values_are_refused():
    from sparsesel.registry import registry

    with pytest.raises(InputError, match="at least one value"):
        registry().make_task("sensitivity", {"values": {"topk": []}})


def test_variants_score_what_perplexity_scores(measured):
    for task in ("sensitivity", "ablation"):
        lines = {(line["selector"], line["context"], line["document"]): line for line in measured[task].lines}
        for line in measured["perplexity"].lines:
            key = (line["selector"], line["context"], line["document"])
            if key in lines:
                assert lines[key]["metrics"]["nll"] == line["metrics"]["nll"]
                assert lines[key]["provenance"]["prompt_sha256"] == line["provenance"]["prompt_sha256"]
                break
        else:
            pytest.fail("no common variant")


def test_a_threshold_that_nothing_reaches_is_exact_topk(measured):
    lines = {(line["selector"], line["context"], line["document"]): line for line in measured["sensitivity"].lines}
    variant = varied(BASE, "similarity_threshold", 2.0)
    for (spec, context, document), line in lines.items():
        if spec == variant:
            exact = lines["exact_topk", context, document]["metrics"]
            assert line["metrics"]["exact_share"] == 1.0
            assert line["metrics"]["nll"] == pytest.approx(exact["nll"], rel=1e-5)


def test_reports_have_a_table_and_a_curve_for_each_field(measured):
    (section,) = measured["sensitivity"].report()
    titles = [table.title for table in section.tables]
    assert [title for title in titles if "exact_topk" in title] == []  # it has none of the fields
    assert len(titles) == 4  # two fields, two contexts
    tau = next(table for table in section.tables if "similarity_threshold (tau)" in table.title)
    assert list(tau.rows) == ["full", "exact_topk", "0.1", "0.3 (given)", "2.0"]
    assert tau.references == 2
    columns = {column.heading: column.values for column in tau.columns}
    assert columns["÷base"][3] == 1.0
    assert columns["PPL"][4] == pytest.approx(columns["PPL"][1], rel=1e-5)
    assert columns["exact"][2] <= columns["exact"][3] <= columns["exact"][4] == 1.0
    curve = next(one for one in section.figures if one.title == "Perplexity against similarity_threshold")
    assert [series.x for series in curve.series] == [[0.1, 0.3, 2.0]] * 2
    assert curve.series[0].y == list(columns["PPL"][2:])


def test_ablations_stand_beside_the_full_method(measured):
    (section,) = measured["ablation"].report()
    assert len(section.tables) == len(section.figures) == 2
    assert list(section.tables[0].rows) == [
        "full",
        "exact_topk",
        "retopk as given",
        "recent-R retrieval",
        "R = 1",
        "C = 3",
        "no fallback",
        "W = 0",
        "Tr = 0",
    ]
    columns = {column.heading: column.values for column in section.tables[0].columns}
    fallback = columns["fall-\nback"]
    assert fallback[2] > 0
    assert fallback[6] == 0
    assert columns["re-\nfresh"][8] == 0 < columns["re-\nfresh"][2]


def test_only_documents_that_all_have_are_compared(measured):
    lines = [line for line in measured["ablation"].lines if line["context"] == 64]
    lines = [line for line in lines if "fallback=off" not in line["selector"] or line["document"] == 1]
    (table,) = Ablation.report(lines)[0].tables
    ppl = dict(zip(table.rows, table.columns[0].values, strict=True))
    own = next(line for line in lines if line["selector"] == "full" and line["document"] == 1)
    assert ppl["full"] == pytest.approx(own["metrics"]["perplexity"])
    assert "1 document" in table.title


def test_a_variant_that_changed_nothing_is_said(measured):
    for task in (Sensitivity, Ablation):
        lines = [line for line in measured[task.__name__.lower()].lines if line["context"] == 64]
        assert "exactly the base" not in " ".join(task.report(lines)[0].notes)
        base = {line["document"]: line["metrics"] for line in lines if line["selector"] == BASE}
        field, value = ("similarity_threshold", 0.1) if task is Sensitivity else ("window_size", 0)
        made = [
            {**line, "metrics": {**base[line["document"]], "ms_per_step": 7.0, "given": False}}
            if line["selector"] == varied(BASE, field, value)
            else line
            for line in lines
        ]
        note = task.report(made)[0].notes[-1]
        name = "similarity_threshold = 0.1" if task is Sensitivity else "W = 0"
        assert note.startswith(f"{BASE}, context 64: {name} gave exactly the base's results: what it changes did not")


def test_no_lines_no_report():
    assert Sensitivity.report([]) == Ablation.report([]) == []


GEOMETRY = Geometry(heads=6, kv_heads=2, head_dim=16, layers=(0, 1, 2), dtype="float32")
LAYERS = GEOMETRY.specs()


def cost(spec, context):
    return sum(make_selector(spec).cost(layer, context).bytes_read for layer in LAYERS)


def test_without_paths_a_step_reads_what_the_selector_says():
    for spec in ("full", "exact_topk,topk=8", "quest,topk=64,dense_layers=0"):
        shares = {"exact_share": 1.0 if "exact" in spec else None, "reuse_share": None, "candidates": None}
        assert step_bytes(make_config(spec), LAYERS, 500, shares) == cost(spec, 500)


def test_layers_left_out_are_dense():
    config = LayeredConfig(layers={"1-": make_config("exact_topk,topk=8")})
    expected = cost("full", 500) / 3 + 2 * cost("exact_topk,topk=8", 500) / 3
    assert step_bytes(config, LAYERS, 500, {}) == expected


def test_paths_mix_the_scan_and_the_reuse():
    config = make_config("retopk,topk=8,recall_size=4,window_size=4")

    def read(exact, refresh=0.0, candidates=36.0):
        shares = {"exact_share": exact, "refresh_share": refresh, "reuse_share": 1 - exact, "candidates": candidates}
        return step_bytes(config, LAYERS, 500, shares)

    assert read(0.0) == pytest.approx(cost("retopk,topk=8,recall_size=4,window_size=4", 500))
    assert read(0.0, candidates=18.0) < read(0.0)
    # All heads exact: keys and scores as exact top-K, values of each head, and the cache that was looked at in vain.
    exact = [make_selector("exact_topk").cost(layer, 500) for layer in LAYERS]
    own = [make_selector(config).cost(layer, 500) for layer in LAYERS]
    expected = sum(one.key_bytes + one.score_bytes for one in exact)
    assert read(1.0) == pytest.approx(expected + sum(one.value_bytes + one.metadata_bytes for one in own))
    # Together as in a refresh, heads share scans; each by itself, three heads scan nearly three times as much.
    keys = 3 * 2 * 500 * 16 * 4
    assert read(0.01) - read(0.01, refresh=0.01) == pytest.approx(keys * (0.99 - 0.99**3))
    assert math.isclose(read(1.0), read(1.0, refresh=1.0))


def test_a_miss_of_all_heads_reads_every_key():
    config = make_config("tokenselect,topk=128")
    hit, miss = (step_bytes(config, LAYERS, 500, {"miss_share": share}) for share in (0.0, 1.0))
    assert hit == cost("tokenselect,topk=128", 500)
    assert miss - hit == 3 * (2 * 500 * 16 * 4 + 2 * 4 * 6 * 500)
