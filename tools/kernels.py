"""Compile every kernel at every configuration for every target, without a device, and record what each takes.

    python tools/kernels.py                   compile what is new or changed, write docs/kernels: record and tables
    python tools/kernels.py --all             compile everything and write
    python tools/kernels.py --check           compile what is new or changed and a few others, compare, write nothing
    python tools/kernels.py --check --all     compile everything and compare

Fails where a kernel does not compile, spills registers, takes more shared memory than its target has, is launched by
nothing that was traced, takes more of anything than recorded for this version of Triton, or, with `--check`, is not
what was recorded. What takes more is written only with `--accept`.
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
from kernel_sources import fingerprint
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
    parser.add_argument("--all", action="store_true", help="compile also what is as it was recorded")
    parser.add_argument("--accept", action="store_true", help="record also what takes more than before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--only", default="", help="only kernels whose name contains this, to check")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target, to check; repeatable")
    options = parser.parse_args()
    partial = options.only or options.target
    if partial and not options.check:
        parser.error("a part goes with --check: the record is of everything")
    targets = options.target or list(TARGETS)
    version = triton.__version__
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    found = collect()
    launches = [launch for launch in found.launches if options.only in launch.kernel]
    if not launches:
        parser.error(f"no kernel's name contains {options.only!r}")
    sources = {kernel: fingerprint(kernel) for kernel in sorted(kernels())}
    record = Record.read()
    known = {} if options.all else record.current(version, sources)
    sample = {key_of(launch) for launch in found.sample} if options.check else set()
    is_new = options.check and not options.all and version not in record.versions
    if is_new:
        console.print(
            f"Triton {version} is not in the record: some of every kernel is compiled, only limits are checked."
        )
    due = [launch for launch in launches if key_of(launch) in sample or (key_of(launch) not in known and not is_new)]
    rows, errors = compiled(due, targets, options.jobs)
    everything = {key_of(launch): known.get(key_of(launch), {}) | rows.get(key_of(launch), {}) for launch in launches}

    labels = described(launches)[1] | record.labels
    names = {key: f"{kernel.partition(':')[2]} [{label}]" for key, (kernel, label) in labels.items()}
    unlaunched = kernels() - {launch.kernel for launch in found.launches}
    problems = found.failures + [f"{kernel} is launched by nothing that was traced" for kernel in sorted(unlaunched)]
    problems += [f"{target} {names[key]} does not compile: {error}" for (key, target), error in errors.items()]
    problems += over_limits(everything, names)
    losses = list(worse(rows, record.versions.get(version, {}), names))
    if options.check:
        problems += losses
        problems += [] if partial or is_new else stale(launches, sources, record, version)
    elif errors or found.failures or (losses and not options.accept):
        problems += [*losses, "Nothing is written." + " --accept records what takes more." * bool(losses)]
    else:
        record.renew(launches, version, everything, sources)
        record.write()
    for problem in problems:
        console.print(problem)
    count = len({launch.kernel for launch in launches})
    done = f"{count} kernels, {len(launches)} configurations, {len(targets)} targets, {len(due)} compiled anew"
    console.print(f"{done}, Triton {version}: {f'{len(problems)} problems' if problems else 'all well'}.")
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
    """What takes more than recorded; what is not recorded is not compared."""
    for key, target, took in _each(rows):
        before = recorded.get(key, {}).get(target)
        for name in ("registers", "spilled", "shared", "instructions") if before else ():
            if getattr(took, name) > getattr(before, name):
                yield f"{target} {names[key]}: {getattr(took, name)} {name}, recorded {getattr(before, name)}"


def stale(launches: list[Launch], sources: dict[str, str], record: Record, version: str) -> Iterator[str]:
    """What the record does not say of the kernels as they are, and pages that are not what the record makes them."""
    before = record.sources[version]
    for kernel in sorted(sources.keys() | before.keys()):
        if sources.get(kernel) != before.get(kernel):
            yield f"{kernel} changed since it was recorded: run `make kernels`"
    keys = {key_of(launch) for launch in launches}
    missing, gone = len(keys - record.versions[version].keys()), len(record.versions[version].keys() - keys)
    if missing or gone:
        yield f"{missing} configurations are not in the record, {gone} are that no launch has: run `make kernels`"
    for name, text in record.tables().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield f"docs/kernels/{name} is stale: run `make kernels`"


def _each(rows: Rows) -> Iterator[tuple[str, str, Resources]]:
    return ((key, target, took) for key, on in rows.items() for target, took in on.items())


if __name__ == "__main__":
    main()
