"""Results survive a crash at any byte, and two processes never share a folder."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsesel import InputError
from sparsesel.eval.results import RESULTS, TORN, ResultStore, check_folder, check_same, read_results


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
        with pytest.raises(ValueError, match="JSON"):
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
