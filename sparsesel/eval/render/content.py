"""What a report shows, gathered from results folders: sections of tables and figures, each with its lines."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesel.errors import InputError
from sparsesel.eval.differences import differences
from sparsesel.eval.figures import Figure
from sparsesel.eval.line import point_of
from sparsesel.eval.report import Line, by_task, sections_of
from sparsesel.eval.results import RESULTS, scan_results
from sparsesel.eval.summary import TASKS, summary
from sparsesel.eval.tables import Section

_LONGEST_NAME = 100

# What lines of one source share: where in the provenance, and what it is called.
SOURCE = {
    "model": "model",
    "dtype": "type",
    "backend": "backend",
    "device": "device",
    "device_name": "machine",
    "seed": "seed",
    "commit": "commit",
    "versions": "versions",
    "task_from": "task from",
    "data_sha256": "texts, SHA-256",
}


@dataclass(frozen=True)
class Entry:
    """One result line, and where it stands.

    Attributes:
        folder: The results folder, as short as it can be told apart.
        number: Of the line in its file, from 1.
        line: The result. Where folders hold different results of one point, its selector has the folder's name beside
            it.
    """

    folder: str
    number: int
    line: Line


@dataclass(frozen=True)
class Source:
    """Lines that were measured in the same place by the same code.

    Attributes:
        letter: A, B, … over the whole report.
        facts: Name and value, as text.
        entries: The lines.
    """

    letter: str
    facts: Sequence[tuple[str, str]]
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Shown:
    """A section, with the file names of its figures."""

    section: Section
    figures: Sequence[tuple[str, Figure]]


@dataclass(frozen=True)
class Part:
    """The sections of one task, or the summary of all.

    Attributes:
        task: Its name, empty for the summary.
        shown: Its sections.
        entries: The lines that they are computed from.
        sources: The same lines by where they come from.
    """

    task: str
    shown: Sequence[Shown]
    entries: Sequence[Entry]
    sources: Sequence[Source]


@dataclass(frozen=True)
class Content:
    """A whole report.

    Attributes:
        folders: The results folders.
        problems: Lines that were left out, and what else is wrong with the folders.
        differences: What was not measured alike.
        parts: The summary first.
        selectors: Names that look the same in all figures, in order: the summary's rows, or all.
    """

    folders: Sequence[Path]
    problems: Sequence[str]
    differences: Sequence[str]
    parts: Sequence[Part]
    selectors: Sequence[str]

    @property
    def entries(self) -> list[Entry]:
        """Every line once, in order."""
        return [entry for part in self.parts if part.task for entry in part.entries]

    @property
    def figures(self) -> list[tuple[str, Figure]]:
        """Every figure with the name of its files."""
        return [figure for part in self.parts for shown in part.shown for figure in shown.figures]

    def without(self, undrawn: Mapping[str, str]) -> "Content":
        """The same without some figures: from the name of each to what is wrong with it."""

        def left(shown: Shown) -> Shown:
            return Shown(shown.section, [(name, figure) for name, figure in shown.figures if name not in undrawn])

        parts = [dataclasses.replace(part, shown=[left(shown) for shown in part.shown]) for part in self.parts]
        return dataclasses.replace(self, parts=parts, problems=[*self.problems, *undrawn.values()])


def gather(folders: Sequence[Path]) -> Content:
    """Read results folders, without touching them, and compute what there is to show.

    Raises:
        InputError: A folder named twice, or without results; or one that holds two lines of one point.
    """
    entries, problems = read_folders(folders)
    lines = [entry.line for entry in entries]
    by_id = {id(entry.line): entry for entry in entries}
    letters = _Letters()
    names = _Names()
    parts: list[Part] = []
    for task, own, sections in [("", *_summary(lines)), *by_task(lines)]:
        found = [by_id[id(line)] for line in own]
        if sections:
            parts.append(Part(task, [names.name(section) for section in sections], found, letters.sources(found)))
    return Content(
        folders=folders,
        problems=problems,
        differences=differences(lines),
        parts=parts,
        selectors=_rows(parts[:1] if parts and not parts[0].task else parts),
    )


def read_folders(folders: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """The lines of results folders, and what is wrong with others, as sentences.

    Folders may hold different results of one point: then a selector's name has its folder's beside it. Lines that are
    the same in several folders count once.

    Raises:
        InputError: As `gather`.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder, real in zip(folders, resolved, strict=True):
        if resolved.count(real) > 1:
            raise InputError("DIR", expected="each folder once", got=f"{folder} twice", remedy="Leave one of them out.")
    read: dict[str, list[Entry]] = {}
    problems: list[str] = []
    for label, folder in zip(_labels(folders), folders, strict=True):
        numbered, wrong = _read(folder)
        read[label] = [Entry(label, number, line) for number, line in numbered]
        problems += wrong
    return _told_apart(read), problems


def _read(folder: Path) -> tuple[Sequence[tuple[int, Line]], list[str]]:
    try:
        numbered, problems = scan_results(folder)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and folder.is_dir()
        raise InputError(
            "DIR",
            expected=f"a folder of results, with a file {RESULTS}",
            got=f"{folder}, which has no {RESULTS}" if missing else f"{folder}: {error.strerror}",
            remedy="Name the folder that `sparsesel eval … --out` wrote to.",
        ) from error
    if not numbered:
        raise InputError(
            "DIR",
            expected="at least one result",
            got=f"{folder / RESULTS}, which has none{''.join(f'. {problem}' for problem in problems[:1])}",
            remedy="Run `sparsesel eval` to measure some.",
        )
    seen: dict[Any, int] = {}
    for number, line in numbered:
        first = seen.setdefault(point_of(line), number)
        if first != number:
            raise InputError(
                "DIR",
                expected="one line for each point",
                got=f"lines {first} and {number} of {folder / RESULTS}, which are about the same",
                remedy="Remove one of them.",
            )
    shards = sorted(path.name for path in folder.glob("results.rank*.jsonl") if path.stat().st_size)
    if shards:
        problems.append(f"{folder} has results that were not merged ({', '.join(shards)}): run `sparsesel eval` again.")
    if (folder / f"{RESULTS}.torn").exists():
        problems.append(f"A line of {folder / RESULTS} was incomplete once and set aside, to {RESULTS}.torn.")
    return numbered, problems


def _told_apart(read: Mapping[str, Sequence[Entry]]) -> list[Entry]:
    first: dict[Any, Line] = {}
    clashing: set[tuple[str, str]] = set()
    for entries in read.values():
        for entry in entries:
            if first.setdefault(point_of(entry.line), entry.line) != entry.line:
                clashing.add((entry.line["task"], entry.line["selector"]))
    kept: list[Entry] = []
    for label, entries in read.items():
        for entry in entries:
            line = entry.line
            if (line["task"], line["selector"]) in clashing:
                named = {**line, "selector": f"{line['selector']} [{label}]"}
                kept.append(Entry(label, entry.number, named))
            elif first[point_of(line)] is line:
                kept.append(entry)
    return kept


def _labels(folders: Sequence[Path]) -> list[str]:
    """As many of the last parts of each path as tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [os.path.join(*path[-depth:]) for path in paths]


def _summary(lines: Sequence[Line]) -> tuple[list[Line], list[Section]]:
    """What the summary is made of, and the summary."""
    own = [line for line in lines if line["task"] in TASKS]
    return own, sections_of("in the summary", summary, own) if own else []


def _rows(parts: Sequence[Part]) -> list[str]:
    tables = [table for part in parts for shown in part.shown for table in shown.section.tables]
    return list(dict.fromkeys(row for table in tables if table.kind == "selector" for row in table.rows))


class _Letters:
    """Names sources over the whole report."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, str], ...], str] = {}

    def sources(self, entries: Sequence[Entry]) -> list[Source]:
        groups: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
        for entry in entries:
            groups.setdefault(self._facts(entry), []).append(entry)
        return [
            Source(self._known.setdefault(facts, _letter(len(self._known))), facts, own)
            for facts, own in groups.items()
        ]

    @staticmethod
    def _facts(entry: Entry) -> tuple[tuple[str, str], ...]:
        provenance = entry.line["provenance"]
        return (
            ("folder", entry.folder),
            *((name, text) for key, name in SOURCE.items() if (text := as_text(provenance.get(key)))),
        )


def _letter(index: int) -> str:
    """A … Z, AA, AB, …"""
    letters = ""
    index += 1
    while index:
        index, last = divmod(index - 1, 26)
        letters = chr(ord("A") + last) + letters
    return letters


def as_text(value: Any) -> str:
    """A fact for people: a table as `name value` pairs, nothing for nothing."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return str(value)


class _Names:
    """File names of figures, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def name(self, section: Section) -> Shown:
        """A section with the names of its figures."""
        return Shown(section, [(self._free(f"{section.title} {one.title}"), one) for one in section.figures])

    def _free(self, title: str) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", title.casefold()).strip("-")[:_LONGEST_NAME].strip("-") or "figure"
        name = next(name for name in _candidates(slug) if name not in self._taken)
        self._taken.add(name)
        return name


def _candidates(slug: str) -> Iterable[str]:
    yield slug
    number = 2
    while True:
        yield f"{slug}-{number}"
        number += 1


def spread(entries: Sequence[Entry], pick: Callable[[Line], Any]) -> list[str]:
    """The different values of lines, as text, in order."""
    return list(dict.fromkeys(text for entry in entries if (text := as_text(pick(entry.line)))))
