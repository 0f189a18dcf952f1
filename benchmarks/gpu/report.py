"""What was found, written after every result, and as a table for people."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSED, FAILED, INCOMPLETE, NOT_RUN = "passed", "failed", "incomplete", "not run"
_SHOWN = 12
"""Failures of a section that the table tells in full."""


class Report:
    """All sections by name, each with a `status`, as a file that is complete at any time."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "status": INCOMPLETE, "sections": {}}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        return self.content["sections"]

    def begin(self, name: str, **content: Any) -> dict[str, Any]:
        """A new section, incomplete until it says otherwise."""
        self.sections[name] = {"status": INCOMPLETE, **content}
        self.write()
        return self.sections[name]

    def write(self) -> None:
        """Replace the file; whoever reads it meanwhile finds the one or the other."""
        self.content["status"] = self.status
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    @property
    def status(self) -> str:
        """Of all: failed if anything is, else incomplete if anything is."""
        found = {section["status"] for section in self.sections.values()}
        for status in (FAILED, INCOMPLETE):
            if status in found:
                return status
        return PASSED if found else INCOMPLETE


def table(content: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    sections = content["sections"]
    yield ""
    yield from _heading(sections.get("environment", {}).get("found"))
    yield ""
    yield f"{'section':<14}{'status':<12}{'seconds':>8}  what"
    for name, section in sections.items():
        yield f"{name:<14}{section['status']:<12}{section.get('seconds', 0):8.0f}  {_what(section)}"
        failures = section.get("failures", [])
        for failure in failures[:_SHOWN]:
            yield f"    FAILED {failure['name']}: {failure['error'][:400]}"
        if len(failures) > _SHOWN:
            yield f"    … and {len(failures) - _SHOWN} more, in the file"
        unreached = section.get("not_reached", [])
        if unreached:
            yield f"    not reached ({len(unreached)}): {'; '.join(unreached[:6])}{' …' if len(unreached) > 6 else ''}"
    rows = sections.get("latency", {}).get("rows", [])
    if rows:
        yield from _latency(rows)
    yield ""
    yield f"{content['status']}"


def _heading(found: dict[str, Any] | None) -> Iterator[str]:
    if not found:
        yield "sparsesel, on a device not looked at"
        return
    versions = " · ".join(f"{name} {value or 'missing'}" for name, value in found["versions"].items())
    commit = f"commit {found['commit'] or 'unknown'}" if found["commit"] or found["in_checkout"] else "not a checkout"
    yield f"{found['device']} · {commit} · sources {found['sources']} in {found['folders'][0]}"
    yield versions
    gpu, bandwidth = found["gpu"], found["bandwidth"]
    if isinstance(gpu, dict):
        clocks = ", ".join(f"{name} {value}" for name, value in gpu["clocks"].items())
        yield f"capability {gpu['capability']} · {gpu['memory'] / 1e9:.0f} GB · CUDA {gpu['cuda']} · {clocks}"
        yield f"memory bandwidth {bandwidth['bytes_per_second'] / 1e9:.0f} GB/s, measured by copies"
    else:
        yield f"bandwidth, capability, clocks: {bandwidth}"


def _what(section: dict[str, Any]) -> str:
    if "reason" in section:
        return section["reason"]
    return section.get("summary", "")


def _latency(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A block for each context: both scenarios beside each other."""
    width = max(len(row["selector"]) for row in rows)
    for context in sorted({row["context"] for row in rows}):
        block = [row for row in rows if row["context"] == context]
        times = {(row["scenario"], row["selector"]): row.get("graph_ms") for row in block}
        yield ""
        yield (
            f"{f'{context} keys':<{width}}  {'scenario':<8} {'graph ms':>9} {'launched':>9} {'×full':>7} {'×exact':>7} "
            f"{'MB':>8} {'roofline':>8}  paths"
        )
        for row in block:
            start = f"{row['selector']:<{width}}  {row['scenario']:<8}"
            if "missing" in row:
                yield f"{start} not there: {row['missing']}"
                continue
            own = row.get("graph_ms")
            full, exact = (_ratio(times.get((row["scenario"], name)), own) for name in ("full", _exact(block)))
            paths = ", ".join(f"{name} {value:.0%}" for name, value in _paths(row).items())
            yield (
                f"{start} {_number(own)} {_number(row['launched_ms'])} {full:>7} {exact:>7} "
                f"{row['bytes'] / 1e6:8.1f} {_percent(row['roofline_share'])}  {paths}"
            )


def _exact(block: list[dict[str, Any]]) -> str:
    """How Exact Top-K is called among these rows."""
    return next((row["selector"] for row in block if row["selector"].split(":")[0] == "exact_topk"), "")


def _number(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.4f}"


def _percent(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.0%}"


def _paths(row: dict[str, Any]) -> dict[str, float]:
    shares = row.get("shares", {})
    return {name: value for name, value in shares.items() if name not in ("attended", "candidates") and value}


def _ratio(reference: float | None, own: float | None) -> str:
    return "-" if reference is None or own is None else f"{reference / own:.2f}"
