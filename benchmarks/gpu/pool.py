"""Jobs in processes of their own: a fault on the device, a hang or a crash costs the job it happened in and no other.

A job is a function of one of the modules beside this one, called with the arguments given. It passes by returning what
it found, and fails by raising. Kernels that it launched are reported with it.
"""

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One thing to do.

    Attributes:
        name: For people; unique within its section.
        function: `"module:function"`.
        arguments: Of the function, by name.
        seconds: After so many it counts as hanging.
        watched: Whether the kernels launched are noted, which takes time at every launch.
    """

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 150.0
    watched: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        name: The job's.
        passed: Whether it returned.
        seconds: How long it took, compilation included.
        found: What it returned.
        error: What it raised, or how its process ended.
        launches: Kernel and configuration of what it launched, the latter as a number that stands for it.
    """

    name: str
    passed: bool
    seconds: float
    found: Any = None
    error: str = ""
    launches: frozenset[tuple[str, int]] = frozenset()


class Pool:
    """Processes, kept from one list of jobs to the next."""

    def __init__(self) -> None:
        self._team: list[_Worker] = []

    def run(
        self, jobs: Iterable[Job], *, workers: int, deadline: float, on_outcome: Callable[[Outcome], None]
    ) -> list[str]:
        """Run jobs in order, several at a time.

        Args:
            jobs: What to do.
            workers: Processes.
            deadline: By `time.monotonic`; what is under way then is ended.
            on_outcome: Called with each outcome as soon as it is there.

        Returns:
            Names of the jobs that were not reached or not finished.
        """
        waiting = list(reversed(list(jobs)))
        while True:
            self._renew(min(workers, len(waiting)))
            for worker in self._team[:workers]:
                if worker.job is None and waiting and time.monotonic() < deadline:
                    worker.give(waiting.pop())
            busy = [worker for worker in self._team if worker.job is not None]
            left = deadline - time.monotonic()
            ready = connection.wait([worker.pipe for worker in busy], timeout=min(1.0, max(0.0, left))) if busy else []
            for worker in busy:
                if worker.pipe in ready:
                    on_outcome(worker.receive())
                elif worker.hangs:
                    on_outcome(worker.failed("it took too long, and was ended"))
            busy = [worker for worker in busy if worker.job is not None]
            if left <= 0 or not (busy or waiting):
                unfinished = [worker.job.name for worker in busy if worker.job is not None]
                for worker in busy:
                    worker.is_done = True
                return unfinished + [job.name for job in reversed(waiting)]

    def close(self) -> None:
        """End all processes."""
        for worker in self._team:
            worker.stop()
        self._team = []

    def _renew(self, workers: int) -> None:
        """Replace processes that are of no further use, up to so many."""
        for worker in [worker for worker in self._team if worker.is_done]:
            worker.stop()
            self._team.remove(worker)
        self._team += [_Worker() for _ in range(workers - len(self._team))]


class _Worker:
    """A process that takes one job after another."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        handle, name = tempfile.mkstemp(prefix="gpu_check_", suffix=".log")
        os.close(handle)
        self._log = Path(name)
        self._process = spawn.Process(target=_serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()
        self.job: Job | None = None
        self.started = 0.0
        self.is_done = False
        """Whether it takes no further job."""

    def give(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self.pipe.send(job)

    def receive(self) -> Outcome:
        """What the job came to; a process that ended on the way is an outcome too."""
        try:
            outcome, self.is_done = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return self.failed(f"the process ended with {self._process.exitcode}: {self._last_words()}")
        self.job = None
        return outcome

    @property
    def hangs(self) -> bool:
        return self.job is not None and time.monotonic() > self.started + self.job.seconds

    def failed(self, error: str) -> Outcome:
        """The job failed together with the process."""
        name, self.job, self.is_done = self.job.name if self.job else "", None, True
        return Outcome(name, False, time.monotonic() - self.started, error=error)

    def stop(self) -> None:
        self._process.kill()
        self._process.join(10)
        self.pipe.close()
        self._log.unlink(missing_ok=True)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-8:])[-1500:] or "it left no word"


def _serve(pipe: Any, log: str) -> None:
    """What a process does."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        outcome = perform(job)
        broken = not _device_answers()
        pipe.send((outcome, broken))
        if broken:
            return


def perform(job: Job) -> Outcome:
    """Do a job in this process."""
    from sparsesel.ops.launch import recording

    module, name = job.function.split(":")
    began = time.monotonic()
    with recording(running=True) if job.watched else contextlib.nullcontext([]) as launches:
        try:
            found = getattr(importlib.import_module(module), name)(**job.arguments)
        except Exception as error:
            passed, found, message = False, None, _told(error)
        else:
            passed, message = True, ""
    seen = frozenset((launch.kernel, zlib.crc32(repr(launch.configuration).encode())) for launch in launches)
    return Outcome(job.name, passed, time.monotonic() - began, found, message, seen)


def _told(error: Exception) -> str:
    """The error and the last calls that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error).strip()[:1500]} ({where})"


def _device_answers() -> bool:
    """Whether the device still takes work: after some faults a process has no use of it any more."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").cpu()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
