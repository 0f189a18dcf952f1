"""Runs the sections one after the other, and keeps the report."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu import conformance, environment, plan
from gpu.pool import Job, Outcome, Pool
from gpu.report import FAILED, INCOMPLETE, NOT_RUN, PASSED, Report, table
from kernel_launches import kernels

SHARES = {"environment": 3, "operations": 18, "selectors": 24, "graphs": 11, "latency": 22, "conformance": 22}
"""Of the time, in percent, in the order in which they run. What one section leaves is the next one's."""
NEEDS_DEVICE = ("graphs", "latency")
LAUNCHING = ("operations", "selectors", "graphs")
"""Sections whose launches are noted."""
EXIT = {PASSED: 0, NOT_RUN: 0, FAILED: 1, INCOMPLETE: 3}
NOTHING_THERE = 2
"""Exit code where `--only` names no check."""
WORKER_MEMORY = 6 << 30
"""Bytes of the device that a checking process may come to need."""


def nothing_named(only: str) -> str:
    """What is said where `--only` names no check."""
    return f"no check's name contains {only!r}"


def offers(options: argparse.Namespace) -> bool:
    """Whether there is anything that `--only` names; tests of the conformance suite are known to pytest alone."""
    if not options.only or ("conformance" in options.sections and not options.tiny):
        return True
    jobs = {
        "operations": lambda: plan.operations(options.device, tiny=options.tiny),
        "selectors": lambda: plan.selectors(options.device, tiny=options.tiny),
        "graphs": lambda: plan.graphs(options.device),
        "latency": lambda: plan.latency(options.device, None),
    }
    chosen = [name for name in options.sections if name in jobs]
    return any(options.only in job.name for name in chosen for job in jobs[name]())


class Check:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        settings = {name: str(value) for name, value in vars(options).items()}
        self.report = Report(options.output, {**settings, "started": environment.provenance.now()})
        self._began = time.monotonic()
        self._pool = Pool()
        self._launched: dict[str, set[int]] = {}
        chosen = [name for name in SHARES if name in ("environment", *options.sections)]
        total, so_far = sum(SHARES[name] for name in chosen), 0
        self._deadlines = {}
        for name in chosen:
            so_far += SHARES[name]
            self._deadlines[name] = self._began + 60 * options.minutes * so_far / total
        # Everything else leans on it, and loading torch for the first time may take long.
        self._deadlines["environment"] = max(self._deadlines["environment"], self._began + 60)

    def run(self) -> int:
        """Run the sections; the exit code."""
        code = None
        try:
            for name in self._deadlines:
                self._section(name)
            self._kernels()
        except KeyboardInterrupt:
            code = 130
            self.report.content["interrupted"] = True
        finally:
            self._pool.close()
            for name in self._deadlines:
                self.report.sections.setdefault(name, {"status": INCOMPLETE, "reason": "not reached"})
            self.report.write()
            for line in table(self.report.content):
                print(line)
            print(f"written to {self.report.path}")
        if code is None and self._found_nothing():
            print(nothing_named(self.options.only), file=sys.stderr)
            return NOTHING_THERE
        return EXIT[self.report.status] if code is None else code

    def _found_nothing(self) -> bool:
        reasons = [self.report.sections[name].get("reason") for name in self._deadlines if name != "environment"]
        return bool(reasons) and all(reason == nothing_named(self.options.only) for reason in reasons)

    def _section(self, name: str) -> None:
        section = self.report.begin(name, failures=[])
        began = time.monotonic()
        print(f"{name} …", flush=True)
        try:
            if name in NEEDS_DEVICE and self.options.device == "cpu":
                section |= {"status": NOT_RUN, "reason": environment.NO_DEVICE}
            else:
                getattr(self, f"_{name}")(section)
        finally:
            section["seconds"] = time.monotonic() - began
            self.report.write()

    def _environment(self, section: dict[str, Any]) -> None:
        job = Job("environment", "gpu.environment:describe", {"device": self.options.device}, watched=False)

        def keep(outcome: Outcome) -> None:
            section["found"] = outcome.found
            section["summary"] = "see above"

        self._run("environment", [job], 1, keep)

    def _operations(self, section: dict[str, Any]) -> None:
        self._run("operations", plan.operations(self.options.device, tiny=self.options.tiny), self._workers())

    def _selectors(self, section: dict[str, Any]) -> None:
        self._run("selectors", plan.selectors(self.options.device, tiny=self.options.tiny), self._workers())

    def _graphs(self, section: dict[str, Any]) -> None:
        self._run("graphs", plan.graphs(self.options.device), self._workers())

    def _latency(self, section: dict[str, Any]) -> None:
        bandwidth = (self._found("bandwidth") or {}).get("bytes_per_second")
        section["rows"] = []

        def keep(outcome: Outcome) -> None:
            if outcome.passed:
                section["rows"].append(outcome.found)
                if "error" in outcome.found:
                    section["failures"].append({"name": outcome.name, "error": outcome.found["error"]})

        self._run("latency", plan.latency(self.options.device, bandwidth), 1, keep)

    def _conformance(self, section: dict[str, Any]) -> None:
        missing = conformance.missing()
        if missing:
            what = f"{' and '.join(missing)} not installed: see benchmarks/README.md"
            section |= {"status": FAILED, "failures": [{"name": "conformance", "error": what}]}
            return
        self._pool.close()  # to leave the device's memory to the processes of pytest
        tests = {"expression": TINY_TESTS} if self.options.tiny else {"only": self.options.only}

        def keep(found: dict[str, Any]) -> None:
            section.update(found)
            counts = [f"{found[name]} {name}" for name in ("passed", "failed", "skipped", "not reached")]
            section["summary"] = ", ".join(counts)
            section["status"] = FAILED if found["failed"] else INCOMPLETE if found["not reached"] else PASSED
            if tests.get("only") and not any(found[name] for name in ("passed", "failed", "skipped", "not reached")):
                section.update(status=NOT_RUN, reason=nothing_named(self.options.only))
            self.report.write()

        deadline = self._deadlines["conformance"]
        processes = 1 if self.options.tiny else self._workers()
        conformance.run(self.options.device, processes=processes, deadline=deadline, on_progress=keep, **tests)

    def _run(
        self, name: str, jobs: Iterable[Job], workers: int, keep: Callable[[Outcome], None] = lambda outcome: None
    ) -> None:
        """Run a section's jobs and keep what comes of each at once."""
        section = self.report.sections[name]
        work = [job for job in jobs if name == "environment" or self.options.only in job.name]
        if not work:
            section |= {"status": NOT_RUN, "reason": nothing_named(self.options.only)}
            return
        section |= {"checks": [], "not_reached": [job.name for job in work]}

        def on_outcome(outcome: Outcome) -> None:
            section["not_reached"].remove(outcome.name)
            record = {"name": outcome.name, "passed": outcome.passed, "seconds": round(outcome.seconds, 3)}
            if name in LAUNCHING:
                record["found"] = outcome.found
            section["checks"].append(record)
            if not outcome.passed:
                section["failures"].append({"name": outcome.name, "error": outcome.error})
                print(f"  FAILED {outcome.name}: {outcome.error[:200]}", flush=True)
            for kernel, configuration in outcome.launches:
                self._launched.setdefault(kernel, set()).add(configuration)
            section["summary"] = f"{sum(one['passed'] for one in section['checks'])} of {len(work)} passed"
            keep(outcome)
            self.report.write()

        self._pool.run(work, workers=workers, deadline=self._deadlines[name], on_outcome=on_outcome)
        section["status"] = FAILED if section["failures"] else INCOMPLETE if section["not_reached"] else PASSED

    def _kernels(self) -> None:
        """Which kernels were launched, of all that are in the sources, and in how many configurations."""
        every = kernels()
        missing = sorted(every - self._launched.keys())
        configurations = {name: len(found) for name, found in sorted(self._launched.items())}
        section = self.report.begin("kernels", configurations=configurations, not_launched=missing, failures=[])
        section["summary"] = (
            f"{len(every) - len(missing)} of {len(every)} launched, {sum(configurations.values())} configurations"
        )
        complete = not self.options.only and all(
            self.report.sections.get(name, {}).get("status") in (PASSED, NOT_RUN) for name in LAUNCHING
        )
        section["status"] = PASSED
        if missing and complete:
            section["status"] = FAILED
            section["failures"] = [{"name": name, "error": "no check launches it"} for name in missing]
        elif missing:
            section |= {"status": NOT_RUN, "reason": f"{section['summary']}; not all checks were done"}

    def _found(self, name: str) -> Any:
        value = (self.report.sections["environment"].get("found") or {}).get(name)
        return value if isinstance(value, dict) else None

    def _workers(self) -> int:
        """As many as the cores and the device's memory allow."""
        if self.options.workers is not None:
            return self.options.workers
        cores = len(os.sched_getaffinity(0))
        memory = (self._found("gpu") or {}).get("memory", 2 * WORKER_MEMORY)
        return max(1, min(12, cores if cores <= 4 else cores - 2, memory // WORKER_MEMORY))


TINY_TESTS = "TestEverySelector and full and (leaves_its_inputs or counts_its_steps)"
"""What of the conformance suite a tiny run has."""
