"""A run resumes where it stopped, repeats nothing, and mixes with nothing else."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsesel import InputError
from sparsesel.cli.app import app
from sparsesel.config import MAX_COUNT, RunConfig, build, load_file
from sparsesel.eval import runner
from sparsesel.eval.results import RESULTS, read_results
from sparsesel.eval.runner import Run
from sparsesel.eval.selectors import resolve_selectors

SPECS = ("full", "exact_topk", "retopk")
TASK = {"suffix": 6, "documents": 2}


class Quiet:
    """Progress that may be interrupted after some points."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.lines: list[str] = []
        self.units = 0.0
        self.advanced = 0.0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, units: float) -> None:
        self.units = units

    def doing(self, text: str) -> None:
        pass

    def advance(self, units: float) -> None:
        self.advanced += units

    def measured(self, point: Any, metrics: Mapping[str, Any], done: int, total: int) -> None:
        if done == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def run(model_folder, text_file):
    def make(out, *, sets=(), **changes) -> Run:
        values = {
            "model": str(model_folder),
            "selectors": SPECS,
            "set": {"topk": 8},
            "contexts": (48, 96),
            "texts": [str(text_file)],
            **{key: value for key, value in changes.items() if key not in TASK},
        }
        fields = {**TASK, **{key: value for key, value in changes.items() if key in TASK}}
        values.setdefault("tasks", {"perplexity": fields})
        config = build(RunConfig, values, where="run")
        pairs = [f"{name}={json.dumps(value)}" for name, value in config.set.items()]
        return Run(config, resolve_selectors(config.selectors, pairs), out)

    return make


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder, text_file):
    """An uninterrupted run: its folder, and its lines by point."""
    out = tmp_path_factory.mktemp("finished")
    values = {"model": str(model_folder), "selectors": SPECS, "set": {"topk": 8}, "contexts": (48, 96)}
    config = build(RunConfig, {**values, "texts": [str(text_file)], "tasks": {"perplexity": TASK}}, where="run")
    with Run(config, resolve_selectors(SPECS, ["topk=8"]), out) as whole:
        whole.measure(Quiet())
    return out, read_results(out)


def test_each_line_says_which_backend_ran(finished):
    assert {line["provenance"]["backend"] for line in finished[1]} == {"eager"}
    assert load_file(finished[0] / "config.json")["backend"] == "eager"  # what auto meant


def test_a_run_on_triton_measures_the_same_and_says_so(run, finished, tmp_path):
    small = {"selectors": ("full", "exact_topk"), "contexts": (48,), "documents": 1}
    with run(tmp_path, backend="triton", **small) as on_triton:
        on_triton.measure(Quiet())
    lines = {line["selector"]: line for line in read_results(tmp_path)}
    for eager in finished[1]:
        if (eager["document"], eager["context"]) == (0, 48) and eager["selector"] in lines:
            got = lines.pop(eager["selector"])
            assert got["provenance"]["backend"] == "triton"
            assert got["metrics"]["nll"] == pytest.approx(eager["metrics"]["nll"], rel=1e-4)
            assert got["metrics"]["attended"] == eager["metrics"]["attended"]
    assert not lines
    with pytest.raises(InputError, match="results of backend eager"):
        run(tmp_path, **small)


def test_a_backend_that_cannot_run_is_refused_before_anything_is_made(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="backend triton on cpu"):
        run(tmp_path / "out", backend="triton")
    assert not (tmp_path / "out").exists()


def essence(line):
    """What must be the same whenever it is measured."""
    metrics = {name: value for name, value in line["metrics"].items() if name != "ms_per_step"}
    provenance = {name: value for name, value in line["provenance"].items() if name != "time"}
    return {**line, "metrics": metrics, "provenance": provenance}


def test_every_point_has_its_line(finished):
    _, lines = finished
    keys = [(line["document"], line["context"], line["selector"]) for line in lines]
    assert keys == [(d, c, s) for d in range(2) for c in (48, 96) for s in SPECS]
    assert len({line["provenance"]["prompt_sha256"] for line in lines}) == 4
    for line in lines:
        origin = line["provenance"]
        assert line["metrics"]["tokens"] == 6
        assert line["config"]["name"] == line["selector"]
        assert line["config"].get("topk", 8) == 8
        assert origin["parameters"]["start"] == 96 * line["document"]
        assert origin["bos_count"] == 0
        assert {"torch", "transformers", "sparsesel", "python"} <= origin["versions"].keys()
        assert "tiny@sha256:" in origin["model"]


@pytest.mark.parametrize("stop_after", [1, 4, 12])
def test_an_interrupted_run_goes_on_and_ends_the_same(run, finished, tmp_path, stop_after):
    with run(tmp_path) as first, pytest.raises(KeyboardInterrupt):
        first.measure(Quiet(stop_after))
    kept = (tmp_path / RESULTS).read_bytes()
    assert kept.count(b"\n") == stop_after
    progress = Quiet()
    with run(tmp_path) as second:
        assert second.done == stop_after
        second.measure(progress)
        assert second.done == 12
    assert (tmp_path / RESULTS).read_bytes().startswith(kept)
    assert [essence(line) for line in read_results(tmp_path)] == [essence(line) for line in finished[1]]
    assert progress.advanced == pytest.approx(progress.units)


def test_a_finished_run_loads_no_model(run, finished, monkeypatch):
    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(runner, name, lambda *_, **__: pytest.fail("loaded something"))
    with run(finished[0]) as again:
        again.measure(Quiet())


def test_selectors_contexts_and_documents_can_be_added(run, finished, tmp_path):
    with run(tmp_path, selectors=("exact_topk",), contexts=(96,), documents=1) as small:
        small.measure(Quiet())
    with run(tmp_path) as large:
        assert large.done == 1
        large.measure(Quiet())
    by_key = {(x["document"], x["context"], x["selector"]): essence(x) for x in finished[1]}
    lines = read_results(tmp_path)
    assert {(x["document"], x["context"], x["selector"]): essence(x) for x in lines} == by_key
    assert len(lines) == 12


CHANGES = {
    "suffix": {"suffix": 13},
    "data_sha256": {"skip_chars": 5},
    "config": {"set": {"topk": 9}},
    "start": {"contexts": (48, 97)},
    "seed": {"seed": 1},
    "backend": {"backend": "triton"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_of_other_results_is_refused(run, finished, what):
    before = (finished[0] / RESULTS).read_bytes()
    with pytest.raises(InputError, match=f"results of {what}") as error:
        run(finished[0], **CHANGES[what])
    assert error.value.field == "out"
    assert (finished[0] / RESULTS).read_bytes() == before


def test_a_calibration_file_of_other_content_is_noticed(run, model_folder, text_file, tmp_path):
    """Its name in the configuration is the same."""
    file = tmp_path / "components"
    command = ["calibrate", "loki", "--model", str(model_folder), "--text", str(text_file), "--out", str(file)]

    def calibrate(tokens):
        result = CliRunner().invoke(app, [*command, "--max-tokens", str(tokens)])
        assert result.exit_code == 0, result.output

    calibrate(400)
    layered = tmp_path / "layered.toml"
    layered.write_text(f'layers = {{"0" = "full", "1" = "loki,rank=4,calibration={file}"}}\n', encoding="utf-8")
    specs = ("full", "loki,rank=4", f"loki,rank=4,calibration={file}", str(layered))
    small = {"selectors": specs, "contexts": (48,), "documents": 1}
    with run(tmp_path / "out", **small) as first:
        first.measure(Quiet())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    recorded = [line["provenance"]["calibration_sha256"] for line in read_results(tmp_path / "out")]
    assert recorded == ["", "", digest, digest]
    with run(tmp_path / "out", **small) as again:
        assert again.done == 4
    calibrate(300)
    with pytest.raises(InputError, match="results of calibration_sha256"):
        run(tmp_path / "out", **small)


def test_a_folder_of_another_models_results_is_refused(run, finished, other_model_folder):
    with pytest.raises(InputError, match="results of model other@sha256"):
        run(finished[0], model=str(other_model_folder))


def test_the_resolved_run_can_be_given_back(run, finished, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # its paths hold anywhere
    values = load_file(finished[0] / "config.json")
    with run(finished[0], **values) as again:
        assert again.done == len(again.points) == 12


def test_bos_is_counted_and_only_where_it_is(run, other_model_folder, tmp_path):
    with run(tmp_path, model=str(other_model_folder), selectors=("full",), contexts=(48,), set={}) as first:
        first.measure(Quiet())
    assert [line["provenance"]["bos_count"] for line in read_results(tmp_path)] == [1, 0]


def test_a_text_may_have_any_name_that_a_file_can_have(run, text_file, tmp_path):
    path = tmp_path / os.fsdecode(b"t\xff [red].txt")
    path.write_bytes(text_file.read_bytes())
    out = tmp_path / "out"
    with run(out, texts=[str(path)], selectors=("full",), contexts=(48,), documents=1, set={}) as first:
        first.measure(Quiet())
    (line,) = read_results(out)
    assert line["provenance"]["parameters"]["text"] == str(path)
    assert load_file(out / "config.json")["texts"] == [str(path)]


def test_a_context_beyond_the_model_is_refused(run, tmp_path):
    with pytest.raises(InputError, match="at most 256 tokens") as error:
        run(tmp_path / "out", contexts=(48, 257))
    assert error.value.field == "context"
    assert not (tmp_path / "out").exists()
    run(tmp_path, contexts=(256,)).close()


def test_too_short_a_text_is_refused_before_the_model_loads(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    for documents in (1000, MAX_COUNT):  # more than could ever be listed
        with pytest.raises(InputError, match=r"at most \d+ of 96 tokens") as error:
            run(tmp_path, documents=documents)
        assert error.value.field == "documents"
    run(tmp_path, documents=2).close()  # the folder was let go


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"contexts": ()}, "contexts"),
        ({"contexts": (64, 64)}, "each once"),
        ({"contexts": (0,)}, "positive"),
        ({"contexts": (2**31,)}, "at most 2147483647"),
        ({"skip_chars": 2**63}, "skip_chars"),
        ({"suffix": 46}, "at most 45"),
        ({"suffix": 0}, "suffix"),
        ({"suffix": True}, "suffix"),
        ({"seed": 2**64}, "seed"),
        ({"skip_chars": -1}, "skip_chars"),
        ({"documents": 0}, "documents"),
        ({"documents": 1, "texts": ["one", "two"]}, "at least 2"),
        ({"selectors": ()}, "at least one selector"),
        ({"wat": 1}, "wat"),
        ({"backend": "cuda"}, "'auto', 'triton' or 'eager'"),
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"perplexty": {}}}, "Did you mean 'perplexity'"),
        ({"tasks": {"perplexity": {"sufix": 3}}}, "Did you mean 'suffix'"),
        ({"tasks": {"perplexity": 3}}, "tasks"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(run, values, expected, tmp_path):
    if texts := values.get("texts"):
        for name in texts:
            (tmp_path / name).write_text(name * 1000)
        values = {**values, "texts": [str(tmp_path / name) for name in texts]}
    with pytest.raises(InputError, match=expected):
        run(tmp_path / "out", **{"contexts": (48,), **values})
    assert not (tmp_path / "out").exists()


def test_by_default_every_text_gives_one_document(run, text_file, tmp_path):
    (tmp_path / "copy.txt").write_bytes(text_file.read_bytes()[10:])
    texts = [str(text_file), str(tmp_path / "copy.txt")]
    with run(tmp_path / "out", texts=texts, documents=None, contexts=(48,)) as both:
        assert {point.document for point in both.points} == {0, 1}
