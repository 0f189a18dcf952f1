"""Compile every kernel at every configuration for every target, without a device, and record what each takes.

    python tools/kernels.py                   write docs/kernels: the record and a table for each target
    python tools/kernels.py --check           compile everything and compare, write nothing
    python tools/kernels.py --check --quick   likewise a few configurations of each kernel

Fails where a kernel does not compile, spills registers, takes more shared memory than its target has, is launched by
nothing that was traced, or, with `--check`, takes more of anything than recorded for this version of Triton.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import triton
from kernel_launches import collect, kernels
from kernel_tables import FOLDER, Record, Rows, described, key_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparsesel.ops.compilation import SHARED_LIMITS, TARGETS, Resources, compile_launch
from sparsesel.ops.launch import Launch

CACHE = Path(__file__).parent.parent / ".cache" / "triton"


def main() -> None:
    """Compile, then write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the record and write nothing")
    parser.add_argument("--quick", action="store_true", help="a few configurations of each kernel, to check")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--only", default="", help="only kernels whose name contains this, to check")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target, to check; repeatable")
    options = parser.parse_args()
    partial = options.quick or options.only or options.target
    if partial and not options.check:
        parser.error("a part goes with --check: the record is of everything")
    targets = options.target or list(TARGETS)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    found = collect(quick=options.quick)
    launches = [launch for launch in found.launches if options.only in launch.kernel]
    covered = {launch.kernel for launch in found.launches}
    problems = found.failures + [
        f"{kernel} is launched by nothing that was traced" for kernel in sorted(kernels() - covered)
    ]
    rows, errors = compiled(launches, targets, options.jobs)
    record = Record.read()
    labels = described(launches)[1] | record.labels
    names = {key: f"{kernel.partition(':')[2]} [{label}]" for key, (kernel, label) in labels.items()}
    problems += [f"{target} {names[key]} does not compile: {error}" for (key, target), error in errors.items()]
    problems += over_limits(rows, names)
    version = triton.__version__
    if not options.check:
        if errors or found.failures:
            problems.append("Nothing is written.")
        else:
            record.renew(launches, version, rows)
            record.write()
    elif version not in record.versions:
        console.print(f"Triton {version} has no record: only limits are checked.")
    else:
        problems += worse(rows, record.versions[version], names)
        if not partial:
            problems += stale(rows, record, version)
    for problem in problems:
        console.print(problem)
    count = len({launch.kernel for launch in launches})
    done = f"{count} kernels, {len(launches)} configurations, {len(targets)} targets, Triton {triton.__version__}"
    console.print(f"{done}: {f'{len(problems)} problems' if problems else 'all well'}.")
    sys.exit(bool(problems))


def compiled(launches: list[Launch], targets: list[str], jobs: int) -> tuple[Rows, dict[tuple[str, str], str]]:
    """What each launch takes on each target, and the errors of those that do not compile, in a fixed order."""
    # Read by the processes that are started next, before they load Triton.
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    os.environ["OMP_NUM_THREADS"] = "1"
    work = [(launch, target) for launch in launches for target in targets]
    done: dict[tuple[str, str], Resources | str] = {}
    columns = (TextColumn("Compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task("", total=len(work))
        futures = {pool.submit(compile_one, *one): (key_of(one[0]), one[1]) for one in work}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            progress.advance(bar)
    rows: Rows = {}
    errors = {}
    for place in futures.values():
        result = done[place]
        if isinstance(result, Resources):
            rows.setdefault(place[0], {})[place[1]] = result
        else:
            errors[place] = result
    return rows, errors


def compile_one(launch: Launch, target: str) -> Resources | str:
    """What it takes, or why it does not compile."""
    try:
        return compile_launch(launch, target)
    except Exception as error:  # Triton's compilers raise many kinds
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]} … {lines[-1]}"


def over_limits(rows: Rows, names: dict[str, str]) -> Iterator[str]:
    """What spills, and what takes more shared memory than there is."""
    for key, target, took in _each(rows):
        if took.spilled:
            yield f"{target} {names[key]} spills {took.spilled} bytes of registers"
        if took.shared > SHARED_LIMITS[target]:
            yield f"{target} {names[key]} takes {took.shared} bytes of shared memory, there are {SHARED_LIMITS[target]}"


def worse(rows: Rows, recorded: Rows, names: dict[str, str]) -> Iterator[str]:
    """What takes more than recorded, and what is not recorded."""
    for key, target, took in _each(rows):
        before = recorded.get(key, {}).get(target)
        if before is None:
            yield f"{target} {names[key]} is not in the record: run `make kernels`"
            continue
        for name in ("registers", "spilled", "shared", "instructions"):
            if getattr(took, name) > getattr(before, name):
                yield f"{target} {names[key]}: {getattr(took, name)} {name}, recorded {getattr(before, name)}"


def stale(rows: Rows, record: Record, version: str) -> Iterator[str]:
    """What is recorded although nothing launches it, and pages that are not what the record makes them."""
    gone = len(record.versions[version].keys() - rows.keys())
    if gone:
        yield f"{gone} configurations are in the record that no launch has: run `make kernels`"
    for name, text in record.tables().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield f"docs/kernels/{name} is stale: run `make kernels`"


def _each(rows: Rows) -> Iterator[tuple[str, str, Resources]]:
    return ((key, target, took) for key, on in rows.items() for target, took in on.items())


if __name__ == "__main__":
    main()
