"""Results survive a crash at any byte, and two processes never share a folder."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel import InputError
from sparsesel.eval.line import NoResultError
from sparsesel.eval.results import (
    RESULTS,
    TORN,
    ResultStore,
    check_folder,
    check_same,
    read_results,
    scan_results,
)


def line(document, **provenance):
    return {
        "task": "perplexity",
        "selector": "retopk:quality,topk=12",
        "context": 64,
        "document": document,
        "metrics": {"nll": 1.5, "candidates": None, "note": "µ\u2028 \r\udcff"},
        "config": {"topk": 12},
        "provenance": provenance,
    }


def test_lines_come_back_as_they_were(tmp_path):
    with ResultStore(tmp_path / "a" / "b") as store:
        assert store.lines == []
        store.append(line(0))
        store.append(line(1))
    with ResultStore(tmp_path / "a" / "b") as store:
        assert store.lines == [line(0), line(1)]
        assert store.torn == 0
    assert read_results(tmp_path / "a" / "b") == [line(0), line(1)]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_file_cut_at_any_byte_keeps_its_complete_lines(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ResultStore(folder) as store:
            for document in range(3):
                store.append(line(document))
        whole = (folder / RESULTS).read_bytes()
        cut = data.draw(st.integers(0, len(whole)), label="cut")
        (folder / RESULTS).write_bytes(whole[:cut])
        # A line is complete with or without its newline.
        complete = (whole[:cut] + b"\n").count(b"}\n{") + whole[:cut].rstrip(b"\n").endswith(b'"provenance": {}}')
        with ResultStore(folder) as store:
            assert store.lines == [line(document) for document in range(complete)]
            torn = whole[:cut].splitlines(keepends=True)[complete:]
            assert store.torn == sum(map(len, torn))
            store.append(line(7))
        assert [entry["document"] for entry in read_results(folder)] == [*range(complete), 7]
        assert (folder / RESULTS).read_bytes().count(b"\n") == complete + 1
        if torn:
            assert (folder / TORN).read_bytes() == torn[0] + b"\n"
        else:
            assert not (folder / TORN).exists()


def test_torn_lines_are_kept_one_after_another(tmp_path):
    for rest in (b'{"task": "per', b"\0\0\0\n"):
        with (tmp_path / RESULTS).open("ab") as file:
            file.write(rest)
        ResultStore(tmp_path).close()
    assert (tmp_path / TORN).read_bytes() == b'{"task": "per\n\0\0\0\n'
    assert (tmp_path / RESULTS).read_bytes() == b""


@pytest.mark.parametrize("bad", [b"no json\n", b"{}\n", b"[1]\n"])
def test_a_broken_line_in_the_middle_is_refused(tmp_path, bad):
    good = json.dumps(line(0)).encode() + b"\n"
    (tmp_path / RESULTS).write_bytes(bad + good)
    with pytest.raises(InputError, match="line 1"):
        ResultStore(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == bad + good


@pytest.mark.parametrize(
    "change",
    [{"selector": ["x"]}, {"document": "0"}, {"document": None}, {"context": True}, {"metrics": []}, {"config": None}],
)
def test_what_is_no_result_is_refused_and_left_alone(tmp_path, change):
    # Complete, so no crash has torn it: it is someone else's, even as the last line.
    foreign = json.dumps({**line(0), **change}).encode() + b"\n"
    (tmp_path / RESULTS).write_bytes(foreign)
    with pytest.raises(InputError, match=r"line 1 .* no result"):
        ResultStore(tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == foreign
    assert not (tmp_path / TORN).exists()
    assert read_results(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("provenance", "parameters"), None, "provenance.parameters is null, not a table"),
        (("provenance", "versions"), "1.0", 'provenance.versions is "1.0", not a table'),
        (("provenance", "versions"), {"torch": 2}, "provenance.versions.torch is 2, not a text"),
        (("provenance", "cost"), {"step_bytes": "many"}, 'provenance.cost.step_bytes is "many", not a number'),
        (("provenance", "model"), ["m"], 'provenance.model is ["m"], not a text'),
        (("metrics",), [1], "metrics is [1], not a table"),
        (("metrics", "perplexity"), "low", 'metrics.perplexity is "low", not a number'),
        (("metrics", "perplexity"), True, "metrics.perplexity is true, not a number"),
        (("metrics", "mine"), [{"a": float("inf")}], "a value is no JSON"),
        (("metrics", "nll"), float("nan"), "metrics.nll is NaN, not a number that is finite"),
        (("config", "layers"), {"0-1": "full"}, 'config.layers.0-1 is "full", not a table'),
        (("config", "name"), 3, "config.name is 3, not a text"),
        (("selector",), 7, "selector is 7, not a text"),
        (("selector",), "", 'selector is "", not a name'),
        (("context",), 0, "context is 0, not greater than or equal to 1"),
        (("document",), -1, "document is -1, not greater than or equal to 0"),
        (("document",), 10**400, "document is 1000"),
    ],
)
def test_a_line_of_another_shape_is_named_with_what_is_wrong(tmp_path, path, value, problem):
    bad: Any = line(1, parameters={}, versions={})
    place = bad
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    data = "".join(json.dumps(each) + "\n" for each in (line(0), bad, line(2)))
    (tmp_path / RESULTS).write_text(data, encoding="utf-8")
    with pytest.raises(InputError) as error:
        ResultStore(tmp_path)
    assert f"line 2 of {tmp_path / RESULTS}: no result: {problem}" in error.value.got
    lines, problems = scan_results(tmp_path)
    assert [number for number, _ in lines] == [1, 3]
    assert problems[0].startswith(f"Line 2 of {tmp_path / RESULTS} is left out: {problem}")
    assert (tmp_path / RESULTS).read_text(encoding="utf-8") == data
    with ResultStore(tmp_path / "new") as store, pytest.raises(NoResultError):  # nor is such a one written
        store.append(bad)


def test_what_is_missing_is_named(tmp_path):
    bad = line(0)
    del bad["config"]
    (tmp_path / RESULTS).write_text(json.dumps(bad) + "\n[3]\n", encoding="utf-8")
    assert [problem.partition("left out: ")[2] for problem in scan_results(tmp_path)[1]] == [
        "config is missing.",
        "the line is [3], not a table.",
    ]


def test_what_a_later_version_adds_is_kept(tmp_path):
    more = {**line(0, new=[1]), "new": {"a": None}}
    (tmp_path / RESULTS).write_text(json.dumps(more) + "\n", encoding="utf-8")
    with ResultStore(tmp_path) as store:
        assert store.lines == [more]


@pytest.mark.parametrize("end", ["\n", "\n\n\n", "  ", "\t\n ", "\r\n"])
def test_blank_lines_are_no_torn_ones(tmp_path, end):
    text = f"\n{json.dumps(line(0))}\n \n{json.dumps(line(1))}\n{end}"
    (tmp_path / RESULTS).write_bytes(text.encode())
    assert scan_results(tmp_path)[1] == []
    with ResultStore(tmp_path) as store:
        assert store.torn == 0
        store.append(line(2))
    assert read_results(tmp_path) == [line(0), line(1), line(2)]
    assert (tmp_path / RESULTS).read_bytes().startswith(text.encode())
    assert not (tmp_path / TORN).exists()


def test_a_torn_line_before_blank_ones_is_recovered(tmp_path):
    (tmp_path / RESULTS).write_bytes(json.dumps(line(0)).encode() + b'\n{"task": "per\n\n')
    with ResultStore(tmp_path) as store:
        assert store.torn
        store.append(line(1))
    assert read_results(tmp_path) == [line(0), line(1)]
    assert (tmp_path / TORN).read_bytes() == b'{"task": "per\n'


def test_a_pipe_in_the_place_of_results_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / RESULTS)
    with pytest.raises(OSError, match="pipe"):
        scan_results(tmp_path)
    with pytest.raises(InputError, match="pipe"):
        ResultStore(tmp_path)


def test_nesting_without_end_is_no_result(tmp_path):
    (tmp_path / RESULTS).write_bytes(b"[" * 100_000 + b"\n" + json.dumps(line(0)).encode() + b"\n")
    with pytest.raises(InputError, match=r"line 1 .* no result"):
        ResultStore(tmp_path)
    assert read_results(tmp_path) == [line(0)]


def test_one_point_twice_is_refused(tmp_path):
    (tmp_path / RESULTS).write_text((json.dumps(line(0)) + "\n") * 2, encoding="utf-8")
    with pytest.raises(InputError, match="line 2"):
        ResultStore(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path):
    with ResultStore(tmp_path), pytest.raises(InputError, match="no other process"):
        ResultStore(tmp_path)
    ResultStore(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "sub", Path("/proc/sparsesel")):
        with pytest.raises(InputError, match="can be written"):
            ResultStore(folder)


def test_a_folder_is_checked_without_being_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "new", tmp_path / "a" / "b" / ".." / "c"):
        check_folder(folder)
    monkeypatch.chdir(tmp_path)
    check_folder(Path("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for folder in (tmp_path / "file", Path("file/sub")):
        with pytest.raises(InputError, match="file is not a folder") as error:
            check_folder(folder)
        assert error.value.field == "out"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match="may not be written"):
        check_folder(tmp_path / "new")


def test_results_that_are_not_numbers_are_never_written(tmp_path):
    with ResultStore(tmp_path) as store:
        with pytest.raises(NoResultError, match="finite"):
            store.append({**line(0), "metrics": {"nll": float("nan")}})
        assert store.lines == []
    assert read_results(tmp_path) == []


def test_results_of_other_work_are_refused_with_what_differs(tmp_path):
    lines = [line(0, model="a"), line(1, model="b")]
    check_same(lines[:1], lambda _: {"provenance.model": "a", "config": {"topk": 12}}, tmp_path)
    with pytest.raises(InputError, match=r"results of model a.*document 1, has model b"):
        check_same(lines, lambda _: {"provenance.model": "a"}, tmp_path)
    with pytest.raises(InputError, match=r"seed 0.*has seed None"):
        check_same(lines, lambda _: {"provenance.seed": 0}, tmp_path)
