"""Several processes measure one grid: the same results, no point twice, whatever is interrupted."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsesel import InputError
from sparsesel.eval.line import Point, point_of
from sparsesel.eval.results import RESULTS, ResultStore, read_results
from sparsesel.eval.sharding import Shard, merge


def line(document, selector="full"):
    return {
        "task": "perplexity",
        "selector": selector,
        "context": 64,
        "document": document,
        "metrics": {},
        "config": {},
        "provenance": {},
    }


@given(work=st.lists(st.floats(0.1, 100), max_size=12), world=st.integers(1, 4))
def test_every_case_is_dealt_to_one_process_and_the_load_is_even(work, world):
    items = list(range(len(work)))
    shares = [Shard(rank, world).share(items, work.__getitem__) for rank in range(world)]
    assert sorted(item for share in shares for item in share) == items
    loads = [sum(work[item] for item in share) for share in shares]
    assert max(loads) - min(loads) <= max(work, default=0) + 1e-6


def test_files_of_processes_are_merged_in_order_and_once(tmp_path):
    with ResultStore(tmp_path, "results.rank0.jsonl") as first, ResultStore(tmp_path, "results.rank1.jsonl") as second:
        first.append(line(2))
        second.append(line(1))
        second.append(line(0))
    with (tmp_path / "results.rank1.jsonl").open("ab") as torn:
        torn.write(b'{"task": "perp')  # a process that was killed
    order = {Point("perplexity", "full", 64, document): document for document in range(3)}
    with ResultStore(tmp_path) as store:
        store.append(line(1))  # a merge that was interrupted
        assert merge(store, order) == 2
        assert merge(store, order) == 0
    assert [entry["document"] for entry in read_results(tmp_path)] == [1, 0, 2]
    assert not list(tmp_path.glob("*rank*")) + list(tmp_path.glob(".*rank*"))


def test_a_process_that_still_writes_is_not_merged(tmp_path):
    with (
        ResultStore(tmp_path) as store,
        ResultStore(tmp_path, "results.rank1.jsonl"),
        pytest.raises(InputError, match="no other process"),
    ):
        merge(store, {})


@pytest.mark.parametrize("values", [{"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "-1"}])
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError):
        Shard.from_environment()


def essence(entry):
    metrics = {name: value for name, value in entry["metrics"].items() if name != "ms_per_step"}
    passing = ("time", "device_name", "commit")  # someone may be at work on the source
    provenance = {name: value for name, value in entry["provenance"].items() if name not in passing}
    return {**entry, "metrics": metrics, "provenance": provenance}


def test_two_processes_give_the_results_of_one(model_folder, text_file, tmp_path):
    options = ["--model", model_folder, "--text", text_file, "--suffix", 6, "--documents", 3, "--set", "topk=8"]
    options += ["--context", 48, "--context", 96, "--selector", "full", "--selector", "retopk", "--backend", "eager"]
    command = [sys.executable, "-m", "sparsesel", "eval", "perplexity", *map(str, options), "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command[1:]]

    def start(command):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    shown = start([*torchrun, str(tmp_path / "two")])
    assert shown.count("context 96") >= 1
    start([*command, str(tmp_path / "one")])
    one, two = ([essence(entry) for entry in read_results(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert len({point_of(entry) for entry in two}) == 12
    # Half of it lost, as if the machine had stopped: one process takes it up, with what another had.
    lines = (tmp_path / "two" / RESULTS).read_bytes().splitlines(keepends=True)
    (tmp_path / "two" / RESULTS).write_bytes(b"".join(lines[:4]))
    (tmp_path / "two" / "results.rank1.jsonl").write_bytes(b"".join(lines[6:9]))
    start([*torchrun, str(tmp_path / "two")])
    kept = {bytes(raw) for raw in (tmp_path / "two" / RESULTS).read_bytes().splitlines(keepends=True)}
    assert set(lines[:4] + lines[6:9]) <= kept
    assert sorted(map(str, (essence(e) for e in read_results(tmp_path / "two")))) == sorted(map(str, one))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "TAKEN"}, "in use"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "no port"}, "no port"),
    ],
)
def test_processes_that_cannot_meet_are_refused(monkeypatch, settings, problem):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **settings}.items():
            monkeypatch.setenv(name, str(taken.getsockname()[1]) if value == "TAKEN" else value)
        with pytest.raises(InputError, match=problem) as error:
            Shard.from_environment().join()
    assert "unset RANK" in error.value.remedy


@pytest.mark.parametrize(
    ("documents", "suffix", "field"), [(100_000, 6, "documents"), (3, 7, "out"), (3, 70, "suffix")]
)
def test_what_is_refused_is_said_once(model_folder, text_file, tmp_path, documents, suffix, field):
    """By torchrun's processes together; no traceback of ours beside it."""
    from sparsesel.eval import run

    fields = {"suffix": 6, "documents": 3, "contexts": [48], "texts": [text_file], "backend": "eager"}
    run("perplexity", str(model_folder), ["full"], out=tmp_path, **fields)
    options = ["--model", model_folder, "--text", text_file, "--suffix", suffix, "--documents", documents]
    options += ["--context", 48, "--selector", "full", "--backend", "eager", "--out", tmp_path]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*torchrun, "-m", "sparsesel", "eval", "perplexity", *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0
    assert result.stderr.count(f"error in {field}") == 1
    assert "sparsesel/eval" not in result.stderr
    assert result.stderr.count("[rank") == 0


# So slow that it is interrupted in the middle.
SLOW = """
import time
from sparsesel.cli import main
from sparsesel.eval.decode import Decoder

step = Decoder.step

def slowly(self, token):
    time.sleep(0.05)
    return step(self, token)

Decoder.step = slowly
main()
"""


def test_ctrl_c_under_torchrun_keeps_everything(model_folder, text_file, tmp_path):
    from sparsesel.eval import run

    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    options = ["--model", model_folder, "--text", text_file, "--suffix", 6, "--documents", 10, "--context", 48]
    options += ["--selector", "full", "--selector", "exact_topk,topk=8", "--backend", "eager", "--out", out]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, str(tmp_path / "slow.py"), "eval", "perplexity", *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal sends its signal to all of a group
    )
    try:
        parts = [out / f"results.rank{rank}.jsonl" for rank in range(2)]
        deadline = time.monotonic() + 120
        while not all(part.is_file() and part.read_bytes().count(b"\n") >= 2 for part in parts):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    kept = [bytes(line) for path in out.glob("results*.jsonl") for line in path.read_bytes().splitlines()]
    assert 4 <= len(kept) < 20
    specs = ["full", "exact_topk,topk=8"]
    fields = {"suffix": 6, "documents": 10, "contexts": [48], "texts": [text_file], "backend": "eager"}
    results = run("perplexity", str(model_folder), specs, out=out, **fields)
    assert len({point_of(entry) for entry in results.lines}) == len(results) == 20
    assert set(kept) <= set((out / RESULTS).read_bytes().splitlines())
