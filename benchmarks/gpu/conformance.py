"""Runs the conformance suite on the device, in as many processes of pytest as there is room for."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
RESTARTS = 20
"""Times that a process is started anew, in all, after one that a test ended."""


def missing() -> list[str]:
    """Packages that the suite needs and this machine does not have."""
    return [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]


def run(
    device: str,
    *,
    processes: int,
    deadline: float,
    on_progress: Callable[[dict[str, Any]], None],
    only: str = "",
    expression: str = "",
) -> None:
    """Run all tests, or those whose names contain `only` and fit pytest's `-k expression`, until the deadline.

    Every few seconds, and at the end in any case, `on_progress` is told how many passed, failed, were skipped and were
    not reached, and the errors of those that failed.
    """
    os.environ["GPU_CHECK_DEVICE"] = device
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as name:
        folder = Path(name)
        shards = [_Shard(folder, index, processes, only, expression) for index in range(processes)]
        restarts, told = RESTARTS, time.monotonic()
        try:
            while time.monotonic() < deadline:
                restarts -= sum(shard.go_on() for shard in shards if restarts > 0)
                if not any(shard.is_running for shard in shards):
                    break
                time.sleep(0.2)
                if time.monotonic() > told + 5:
                    told = time.monotonic()
                    on_progress(_summary(shards))
        finally:
            for shard in shards:
                shard.stop()
            on_progress(_summary(shards))


class _Shard:
    """One process of pytest after the other for one share of the tests."""

    def __init__(self, folder: Path, index: int, count: int, only: str, expression: str) -> None:
        self.lines, self.log = folder / f"{index}.jsonl", folder / f"{index}.log"
        # -P: where sparsesel is an installed copy, not the checkout that this may be run in, as in other sections.
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            str(_FOLDER / "device_conformance.py"),
            "--noconftest",
            "-q",
        ]
        self._command += ["-p", "gpu.shard", "-p", "no:cacheprovider", "-W", "default", "-o", "addopts="]
        self._command += ["--import-mode=importlib", "--tb=short", *(["-k", expression] if expression else [])]
        self._environment = os.environ | {
            "GPU_CHECK_LINES": str(self.lines),
            "GPU_CHECK_SHARD": f"{index}/{count}",
            "GPU_CHECK_ONLY": only,
            "PYTHONPATH": os.pathsep.join([str(_FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        self.was_stopped = False
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def ended_well(self) -> bool:
        """All passed, or some failed, or its share is empty."""
        return self._process.poll() in (0, 1, 5)

    def go_on(self) -> bool:
        """Start a process anew where one was ended by a test; says whether."""
        if self.is_running or self.ended_well or not read(self.lines)[0]:
            return False
        self._start()
        return True

    def stop(self) -> None:
        if self.is_running:
            self.was_stopped = True
            self._process.kill()
        self._process.wait(10)

    def last_words(self) -> str:
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:])[-1500:]


def read(path: Path) -> tuple[dict[str, dict], int]:
    """Each test begun and what came of it (nothing yet: an empty record), and how many there are in the share."""
    tests: dict[str, dict] = {}
    total = 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut off when the process died
            continue
        total = record.get("total", total)
        if "test" in record:
            tests.setdefault(record["test"], {}).update({k: v for k, v in record.items() if k != "test"})
    return tests, total


def _summary(shards: list[_Shard]) -> dict[str, Any]:
    counts = {"passed": 0, "failed": 0, "skipped": 0, "not reached": 0}
    failures, under_way = [], []
    for shard in shards:
        tests, total = read(shard.lines)
        counts["not reached"] += total - len(tests)
        begun = [test for test, record in tests.items() if not record]
        if begun and (shard.was_stopped or shard.is_running):
            under_way.append(begun[-1])
            counts["not reached"] += 1
        for test, record in tests.items():
            if test in under_way:
                continue
            outcome = record.get("outcome", "failed")
            counts[outcome] += 1
            if outcome == "failed":
                failures.append({"name": test, "error": record.get("error", "the process ended in it")})
        if not total and not shard.lines.exists():
            is_early = shard.was_stopped or shard.is_running
            counts["not reached" if is_early else "failed"] += 1
            failures += [] if is_early else [{"name": "collection", "error": shard.last_words()}]
    return {**counts, "failures": failures, "under way": under_way}
