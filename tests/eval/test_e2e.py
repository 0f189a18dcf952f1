"""The whole model and the attention in it are timed; what is beyond is modelled by bytes, and says so."""

import pytest
import torch

from sparsesel import InputError, make_selector
from sparsesel.eval import run
from sparsesel.eval.decode import clock
from sparsesel.eval.differences import differences
from sparsesel.eval.report import rows_by_context
from sparsesel.eval.tasks.e2e import E2e, modelled
from sparsesel.eval.timed import Timed
from sparsesel.kv import KVView
from sparsesel.selector import LayerSpec

SPECS = ["full", "exact_topk", "retopk,similarity_threshold=0.3"]


@pytest.fixture(scope="module")
def measured(model_folder):
    return run(
        "e2e", str(model_folder), SPECS, set={"topk": 8}, contexts=[64, 128], steps=6, modelled_contexts=[10000, 1000]
    )


def test_parts_of_a_token_are_no_more_than_the_whole(measured):
    assert len(measured) == 6
    for line in measured.lines:
        metrics = line["metrics"]
        assert 0 < metrics["attention_ms"] < metrics["ms_per_token"]
        assert 0 < metrics["non_attention_ms"] < metrics["ms_per_token"]
        assert metrics["non_attention_share"] == pytest.approx(metrics["non_attention_ms"] / metrics["ms_per_token"])
        assert metrics["modelled_contexts"] == [1000, 10000]
        assert metrics["density"] <= 1


def test_attention_is_what_a_clock_around_it_says(model_folder, monkeypatch):
    """With a clock that ticks once for each call, a step of two layers takes two ticks."""

    class Ticks:
        def __init__(self, device):
            self.taken = []

        def start(self):
            pass

        def stop(self):
            self.taken.append(0.001)

        def seconds(self):
            return self.taken

    from sparsesel.eval import decode

    monkeypatch.setattr(decode, "clock", Ticks)
    results = run("e2e", str(model_folder), SPECS, set={"topk": 8}, contexts=[64], steps=3, warmup=1)
    for line in results.lines:
        assert line["metrics"]["attention_ms"] == pytest.approx(2.0)
        assert line["metrics"]["ms_per_token"] == pytest.approx(1.0)


def with_times(measured, spec, times):
    """Rows of a selector by context, with these times of attention at these contexts, reading a MB for each token."""
    lines = {line["context"]: line for line in measured.lines if line["selector"] == spec}
    given = {"non_attention_ms": 4.0, "modelled_bytes": [1e9, 1e10]}
    changed = [
        {
            **lines[context],
            "metrics": {**lines[context]["metrics"], **given, "attention_ms": ms},
            "provenance": {**lines[context]["provenance"], "cost": {"step_bytes": 1e6 * context}},
        }
        for context, ms in times.items()
    ]
    return {context: rows[0] for context, rows in rows_by_context(changed).items()}


def test_contexts_beyond_are_modelled_by_bytes(measured):
    def at_1000(times):
        total, share = modelled(with_times(measured, "full", times), list(times)).times[1000]
        assert share == pytest.approx(4 / total)
        return total - 4

    assert at_1000({128: 2.0}) == pytest.approx(2 * 1000 / 128)
    assert at_1000({64: 1.5, 128: 2.0}) == pytest.approx(1 + 1000 / 128)


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        ({64: 2.5, 128: 2.0}, "context 128 took no longer than context 64"),
        ({64: 0.5, 128: 2.0}, "begin below 0"),
        ({128: 2.0}, "not measured at context 64"),
    ],
)
def test_what_has_no_line_that_goes_on_is_not_modelled(measured, times, problem):
    found = modelled(with_times(measured, "full", times), [64, 128])
    assert found.times == {}
    assert problem in found.problem


def test_a_selector_that_reads_as_much_at_any_length_takes_as_long(measured):
    rows = with_times(measured, "full", {64: 2.5, 128: 2.0})
    for row in rows.values():
        (line,) = row.lines.values()
        line["metrics"]["modelled_bytes"] = [7.0, 7.0]
        line["provenance"] = {**line["provenance"], "cost": {"step_bytes": 7.0}}
    assert modelled(rows, [64, 128]).times == {1000: (6.0, 4 / 6), 10000: (6.0, 4 / 6)}


def lines_with_times(measured, exact):
    """Results of all selectors, those of exact_topk with these times."""
    times = {SPECS[0]: {64: 1.5, 128: 2.0}, SPECS[1]: exact, SPECS[2]: {64: 1.5, 128: 1.6}}
    rows = [row for spec in SPECS for row in with_times(measured, spec, times[spec]).values()]
    return [line for row in rows for line in row.lines.values()]


def test_one_table_has_one_way_of_modelling(measured):
    """A selector without a line is left out, with all its ratios, and it is said why."""
    lines = lines_with_times(measured, {64: 2.5, 128: 2.0})
    (section,) = E2e.report(lines)
    table = section.tables[-1]
    assert table.title == "One token, context 10000, modelled along the line through two contexts"
    columns = {column.heading: column.cells for column in table.columns}
    assert columns["ms per\ntoken"][1] == columns["×full"][1] == columns["×exact"][2] == "–"
    assert "–" not in (columns["×full"][2], columns["ms per\ntoken"][0])
    assert "exact_topk: context 128 took no longer than context 64" in section.notes[-1]
    (alone,) = E2e.report([line for line in lines if line["context"] == 128])
    assert alone.tables[-1].title.endswith("modelled in proportion to bytes")
    assert "–" not in alone.tables[-1].columns[0].cells
    assert len(alone.notes) == 2


def test_the_report_tells_measured_from_modelled(measured):
    (section,) = E2e.report(lines_with_times(measured, {64: 1.5, 128: 2.0}))
    kinds = [table.title.rpartition(", ")[2].partition(" ")[0] for table in section.tables]
    assert kinds == ["measured"] * 2 + ["modelled"] * 2
    assert all(list(table.rows) == SPECS for table in section.tables)
    columns = {column.heading: column.values for column in section.tables[1].columns}
    assert columns["×full"][0] == columns["×exact"][1] == 1.0
    curves = section.figures[0]
    assert [series.name for series in curves.series] == [
        name for spec in SPECS for name in (spec, f"{spec} (modelled)")
    ]
    assert list(curves.series[0].x) == [64, 128]
    assert list(curves.series[1].x) == [128, 1000, 10000]
    assert curves.series[1].y[0] == curves.series[0].y[1]
    assert "no measure of a kernel's speed" in section.notes[0]


def test_one_context_without_models_has_no_curve(measured):
    lines = [
        {**line, "metrics": {**line["metrics"], "modelled_contexts": [], "modelled_bytes": []}}
        for line in measured.lines
        if line["context"] == 64
    ]
    (section,) = E2e.report(lines)
    assert [type(figure).__name__ for figure in section.figures] == ["Bars"]
    assert len(section.tables) == 1
    assert E2e.report([]) == []


def test_nothing_is_modelled_where_the_cost_is_not_known(measured):
    lines = [{**line, "provenance": {**line["provenance"], "cost": {"error": "Boom"}}} for line in measured.lines]
    (section,) = E2e.report(lines)
    assert [table.title.rpartition(", ")[2] for table in section.tables] == ["measured"] * 2
    assert all(cell == "–" for cell in section.tables[0].columns[-1].cells)


def test_prompts_are_random_or_the_text(model_folder, text_file):
    def line(**fields):
        (found,) = run("e2e", str(model_folder), ["full"], texts=[text_file], contexts=[64], steps=2, **fields).lines
        return found["provenance"]

    first, again, other, text = line(), line(), line(seed=1), line(prompt="text")
    assert first["parameters"]["text"] == "random tokens"
    assert first["prompt_sha256"] == again["prompt_sha256"] != other["prompt_sha256"]
    assert text["parameters"]["text"].endswith("text.txt")
    assert first["data_sha256"] is other["data_sha256"] is None
    assert len(text["data_sha256"]) == 64


def test_what_was_made_of_no_text_goes_on_whatever_the_text(model_folder, text_file, tmp_path):
    common = {"contexts": [64], "out": tmp_path}
    run("e2e", str(model_folder), ["full"], steps=2, **common)
    both = {"e2e": {"steps": 2}, "perplexity": {"suffix": 4}}
    results = run(both, str(model_folder), ["full"], texts=[text_file], **common)
    assert [line["task"] for line in results.lines] == ["e2e", "perplexity"]
    assert not [note for note in differences(results.lines) if "texts" in note]
    with pytest.raises(InputError, match="data_sha256"):  # perplexity has one
        run(both, str(model_folder), ["full"], **common)


def test_a_timed_selector_is_the_selector():
    selector = make_selector("retopk,topk=8")
    timed = Timed(selector, clock(torch.device("cpu")))
    layer = LayerSpec(0, 4, 2, 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (4, 2, 2))
    outputs = []
    for one in (selector, timed):
        state = one.init_state(layer)
        one.observe_prefill(query[:, :, :39], KVView.dense(keys[:, :, :39], values[:, :, :39]), state, scale=0.3)
        outputs.append(one.attend(query[:, :, 39:], KVView.dense(keys, values), state, scale=0.3))
    assert torch.equal(*outputs)
    assert timed.config == selector.config
    assert timed.cost(layer, 40) == selector.cost(layer, 40)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 200}, "at least 204"),
        ({"modelled_contexts": [64]}, "beyond 64"),
        ({"modelled_contexts": [100, 100]}, "each once"),
        ({"modelled_contexts": [0]}, "from 1"),
    ],
)
def test_what_cannot_be_timed_is_refused(model_folder, fields, message):
    with pytest.raises(InputError, match=message):
        run("e2e", str(model_folder), ["full"], contexts=[64], **fields)


def test_layers_left_dense_are_refused(model_folder, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('layers = {"1-" = "exact_topk"}\ntopk = 8\n', encoding="utf-8")
    with pytest.raises(InputError, match="serves 1 of 2 layers"):
        run("e2e", str(model_folder), [str(path)], contexts=[64], steps=2)
