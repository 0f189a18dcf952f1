"""What compiled kernels took, kept from one time to the next, and the tables that the documentation shows of it.

The record holds the numbers of each version of Triton by themselves, since another compiler gives others.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsesel.ops.compilation import SHARED_LIMITS, Resources
from sparsesel.ops.launch import Launch

FOLDER = Path(__file__).parent.parent / "docs" / "kernels"
RECORD = FOLDER / "record.json"

Rows = dict[str, dict[str, Resources]]
"""From the key of a configuration to what it takes on each target."""


@dataclass
class Record:
    """What is recorded.

    Attributes:
        kernels: Of each kernel, what all of its configurations share, in words.
        labels: From the key of a configuration to its kernel and what distinguishes it from the kernel's others.
        versions: By version of Triton.
        sources: By version of Triton, of each kernel the fingerprint that it had when it was compiled.
    """

    kernels: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    versions: dict[str, Rows] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> "Record":
        """The one in the repository; an empty one if there is none."""
        if not RECORD.exists():
            return cls()
        content = json.loads(RECORD.read_text(encoding="utf-8"))
        labels = {
            key: (kernel, label) for kernel, known in content["configurations"].items() for key, label in known.items()
        }
        versions = {
            version: {key: {t: Resources(*row) for t, row in on.items()} for key, on in rows.items()}
            for version, rows in content["versions"].items()
        }
        return cls(content["kernels"], labels, versions, content["sources"])

    def current(self, version: str, sources: Mapping[str, str]) -> Rows:
        """The rows of a version whose kernels are still what they were."""
        before = self.sources.get(version, {})
        same = {kernel for kernel, source in sources.items() if before.get(kernel) == source}
        rows = self.versions.get(version, {})
        return {key: on for key, on in rows.items() if key in self.labels and self.labels[key][0] in same}

    def renew(self, launches: Iterable[Launch], version: str, rows: Rows, sources: Mapping[str, str]) -> None:
        """Put the rows of one version in place of what it had; forget configurations that no launch has any more."""
        self.kernels, self.labels = described(launches)
        self.versions[version] = rows
        self.sources[version] = dict(sorted(sources.items()))
        self.versions = {
            version: {key: on for key, on in rows.items() if key in self.labels}
            for version, rows in self.versions.items()
        }

    def write(self) -> None:
        """Write the record and the tables."""
        FOLDER.mkdir(exist_ok=True)
        RECORD.write_text(self.text(), encoding="utf-8")
        for name, text in self.tables().items():
            (FOLDER / name).write_text(text, encoding="utf-8")

    def text(self) -> str:
        """The record as JSON, one configuration a line."""
        configurations: dict[str, dict[str, str]] = {kernel: {} for kernel in sorted(self.kernels)}
        for key in sorted(self.labels):
            kernel, label = self.labels[key]
            configurations[kernel][key] = label
        versions = {
            version: {
                key: {t: [r.registers, r.spilled, r.shared, r.instructions] for t, r in sorted(on.items())}
                for key, on in sorted(rows.items())
            }
            for version, rows in sorted(self.versions.items())
        }
        content = {
            "configurations": configurations,
            "kernels": dict(sorted(self.kernels.items())),
            "sources": dict(sorted(self.sources.items())),
            "versions": versions,
        }
        return _json(content, depth=3) + "\n"

    def tables(self) -> dict[str, str]:
        """A page of Markdown for each target, from the newest version recorded."""
        version = max(self.versions, key=_natural)
        return {f"{target}.md": self._table(target, version) for target in SHARED_LIMITS}

    def _table(self, target: str, version: str) -> str:
        rows = self.versions[version]
        lines = [
            f"# {target}",
            "",
            f"Compiled by Triton {version}; written by `make kernels`. [What the columns mean](index.md).",
        ]
        module = ""
        for kernel in sorted(self.kernels):
            keys = [key for key, (owner, _) in self.labels.items() if owner == kernel and key in rows]
            if kernel.partition(":")[0] != module:
                module = kernel.partition(":")[0]
                lines += ["", f"## {module}"]
            lines += ["", f"### {kernel.partition(':')[2]}", "", f"All: {self.kernels[kernel]}.", ""]
            lines += ["| configuration | registers | spilled | shared | instructions |", "|---|---:|---:|---:|---:|"]
            for key in sorted(keys, key=lambda key: _natural(self.labels[key][1])):
                took = rows[key][target]
                cells = (self.labels[key][1], took.registers, took.spilled, took.shared, took.instructions)
                lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
        return "\n".join(lines) + "\n"


def key_of(launch: Launch) -> str:
    """Short name of a launch's configuration, the same in every process."""
    return hashlib.sha256(repr(launch.configuration).encode()).hexdigest()[:12]


def described(launches: Iterable[Launch]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """`Record.kernels` and `Record.labels` of these launches."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(launch.kernel, []).append(launch)
    kernels, labels = {}, {}
    for kernel, own in by_kernel.items():
        kernels[kernel], texts = _labels(own)
        labels |= {key_of(launch): (kernel, text) for launch, text in zip(own, texts, strict=True)}
    return kernels, labels


def _choices(launch: Launch) -> dict[str, str]:
    """What tells a configuration apart for people: types, what is there, constants, warps and stages."""
    constants = dict(launch.constants)
    items = {
        "warps": str(launch.num_warps),
        "stages": str(launch.num_stages),
        "registers": f"up to {launch.max_registers}" if launch.max_registers else "free",
    }
    for name, kind in launch.signature:
        if kind.startswith("*"):
            items[name.removeprefix("p_")] = kind[1:]
        elif name.isupper() or constants.get(name, 0) is None:
            items[name.removeprefix("p_")] = str(constants[name])
    return items


def _details(launch: Launch) -> dict[str, str]:
    """The rest: what Triton knows of the other numbers, and which pointers are aligned."""
    constants = dict(launch.constants)
    items = {}
    for name, kind in launch.signature:
        if kind.startswith("*"):
            items[f"({name} aligned)"] = str(name in launch.aligned)
        elif not name.isupper() and constants.get(name, 0) is not None:
            known = " /16" if name in launch.aligned else ""
            items[f"({name})"] = str(constants[name]) if kind == "constexpr" else kind + known
    return items


def _labels(launches: list[Launch]) -> tuple[str, list[str]]:
    """What all share, and what tells each from the others: details only between those that nothing else tells apart."""
    common, texts = _differences([_choices(launch) for launch in launches])
    alike: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        alike.setdefault(text, []).append(place)
    for text, places in alike.items():
        if len(places) > 1:
            details = _differences([_details(launches[place]) for place in places])[1]
            for place, detail in zip(places, details, strict=True):
                texts[place] = f"{text}, {detail}" if text else detail
    return common, [text or "the only one" for text in texts]


def _differences(items: list[dict[str, str]]) -> tuple[str, list[str]]:
    """What all have in common, and what each has for itself; names whose values go together are told together."""
    names = dict.fromkeys(name for one in items for name in one)
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        grouped.setdefault(tuple(one.get(name, "-") for one in items), []).append(name)
    common: list[str] = []
    own: list[list[str]] = [[] for _ in items]
    for column, group in grouped.items():
        # Of details that change together, one says enough.
        title = " ".join(group[:1] if group[0][0] == "(" else group)
        if len(set(column)) == 1:
            common += [f"{name} {column[0]}" for name in group]
            continue
        for place, value in enumerate(column):
            own[place].append(f"{title} {value}")
    return ", ".join(common), [", ".join(parts) for parts in own]


def _natural(text: str) -> list[Any]:
    """Sorts numbers within text by their value."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def _json(value: Any, depth: int, indent: str = "") -> str:
    if depth == 0 or not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    inner = indent + " "
    parts = [f"{inner}{json.dumps(name)}: {_json(part, depth - 1, inner)}" for name, part in value.items()]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
