"""`results.jsonl`: one JSON line per measured point, durable as soon as it is measured."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sparsesel.errors import InputError
from sparsesel.eval.line import Point, check_line, point_of, scan

RESULTS = "results.jsonl"
TORN = "results.jsonl.torn"


class ResultStore:
    """The results of one folder, for one process at a time. A context manager.

    Args:
        folder: Where they are.
        name: Of the file, which is held for this process; `results.jsonl` stands for the folder.

    Attributes:
        lines: Every complete line, in the order measured.
        torn: Bytes of an incomplete last line that were moved to `results.jsonl.torn`, 0 if there were none.

    Raises:
        InputError: The folder cannot be written, is in use, or holds something else under these names.
    """

    def __init__(self, folder: Path, name: str = RESULTS) -> None:
        self.folder = folder
        self._name = name
        self.torn = 0
        self._file = -1
        self._lock = -1
        try:
            with self._refusing():
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(folder / lock_name(name), os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    "out",
                    expected="a folder that no other process writes to",
                    got=f"{folder} ({error.strerror})",
                    remedy="Wait until that run has ended, or choose another folder.",
                ) from error
            with self._refusing():
                self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                self.lines = self._read()
        except BaseException:
            self.close()
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            NoResultError: It is none, or not to be written as JSON.
            InputError: It could not be written. What was there stays.
        """
        check_line(line)
        # ASCII: the name of a text file may be no valid Unicode.
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._refusing():
            while data:
                data = data[os.write(self._file, data) :]
            self.lines.append(dict(line))
            os.fsync(self._file)

    def write_beside(self, name: str, text: str) -> None:
        """Write a whole file into the folder, completely or not at all."""
        part = self.folder / f".{name}.part"
        with self._refusing():
            part.write_text(text, encoding="utf-8", errors="surrogateescape")
            part.replace(self.folder / name)

    def close(self) -> None:
        """Let other processes have the folder."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> list[dict[str, Any]]:
        path = self.folder / self._name
        found = scan(path)
        problems = {number: f"no result: {problem}" for number, problem in found.problems}
        seen: set[Point] = set()
        for number, line in found.lines:
            if point_of(line) in seen:
                problems.setdefault(number, "another of the same point")
            seen.add(point_of(line))
        if problems:
            number = min(problems)
            raise InputError(
                "out",
                expected="one measured point per line, each once",
                got=f"line {number} of {path}: {problems[number]}",
                remedy="Correct or remove that line, or choose another folder.",
            )
        if found.torn is not None:
            self._set_aside(path.read_bytes()[found.torn :], found.torn)
        elif not found.ended:
            os.write(self._file, b"\n")
        return [line for _, line in found.lines]

    def _set_aside(self, torn: bytes, offset: int) -> None:
        """Move an incomplete last line out of the way, so that nothing is ever appended to it."""
        with (self.folder / TORN).open("ab") as file:
            file.write(torn.rstrip(b"\r\n") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(self._file, offset)
        os.fsync(self._file)
        self.torn = len(torn)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unwritable(self.folder, error.strerror or str(error)) from error


def lock_name(name: str) -> str:
    """The file whose lock stands for a results file."""
    return ".lock" if name == RESULTS else f".{name}.lock"


def check_folder(folder: Path) -> None:
    """Refuse a folder that could not be written, without making it.

    Raises:
        InputError: It, or the nearest folder above it that is there, is none or may not be written.
    """
    nearest = next((path for path in (folder, *folder.absolute().parents) if os.path.exists(path)), Path("/"))
    if not os.path.isdir(nearest):
        raise _unwritable(folder, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"{nearest} may not be written")


def _unwritable(folder: Path, problem: str) -> InputError:
    return InputError(
        "out",
        expected="a folder that can be written",
        got=f"{folder}: {problem}",
        remedy="Choose another folder, or make room and run the command again: what was measured is kept.",
    )


def read_results(folder: Path, name: str = RESULTS) -> list[dict[str, Any]]:
    """The complete lines of a folder's results, without touching them."""
    return [line for _, line in scan(folder / name).lines]


def scan_results(folder: Path) -> tuple[Sequence[tuple[int, dict[str, Any]]], list[str]]:
    """The results of a folder with the numbers of their lines, and what is wrong with the others, as sentences.

    Raises:
        OSError: They cannot be read.
    """
    path = folder / RESULTS
    found = scan(path)
    problems = [f"Line {number} of {path} is left out: {problem}." for number, problem in found.problems]
    if found.torn is not None:
        problems.append(f"The last line of {path} is incomplete and left out; the others are all there.")
    return found.lines, problems


def check_same(
    lines: list[dict[str, Any]], expected: Callable[[dict[str, Any]], Mapping[str, Any]], folder: Path
) -> None:
    """Refuse a folder that holds results of other work.

    Args:
        lines: What it holds.
        expected: For a line, what must be found there: dotted path to value.
        folder: Named in the error.

    Raises:
        InputError: The first line that differs, and in what.
    """
    for line in lines:
        for path, value in expected(line).items():
            known: Any = line
            for key in path.split("."):
                known = known.get(key) if isinstance(known, dict) else None
            if known != value:
                point = point_of(line)
                raise InputError(
                    "out",
                    expected=f"a folder without results, or with results of {path.split('.')[-1]} {value}",
                    got=f"{folder}, where {point.selector} at context {point.context}, document {point.document}, "
                    f"has {path.split('.')[-1]} {known}",
                    remedy="Choose another --out, or run what this folder holds (its config.json says what).",
                )
