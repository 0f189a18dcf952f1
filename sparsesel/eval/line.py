"""What a line of `results.jsonl` must look like, and how a file of them is read: here alone."""

import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsesel.config import MAX_COUNT

_LARGEST = 1e300  # of a number: sums and squares of some must be finite
_SHOWN = 60  # characters of a value in a message


class Point(NamedTuple):
    """What one line is about; a folder holds at most one line for each."""

    task: str
    selector: str
    context: int
    document: int


def point_of(line: Mapping[str, Any]) -> Point:
    """The point that a line is about."""
    return Point(line["task"], line["selector"], line["context"], line["document"])


Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class _Shape(BaseModel):
    """Fields that reports of every task rely on; whatever else there is may be anything."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Metrics(_Shape):
    perplexity: Number | None = None
    nll: Number | None = None
    tokens: Number | None = None
    score: Number | None = None
    density: Number | None = None
    attended: Number | None = None
    exact_share: Number | None = None
    reuse_share: Number | None = None
    fallback_share: Number | None = None
    refresh_share: Number | None = None
    miss_share: Number | None = None
    candidates: Number | None = None
    ms_per_step: Number | None = None
    bytes_per_step: Number | None = None


class _Config(_Shape):
    """Of one selector, or by `layers` of several."""

    name: str = ""
    layers: dict[str, dict[str, Any]] = {}


class _Cost(_Shape):
    """Of a step by design, or why it is not known."""

    attended: Number | None = None
    bytes_read: Number | None = None
    step_bytes: Number | None = None
    state_bytes: Number | None = None
    full_bytes: Number | None = None
    exact_bytes: Number | None = None
    dense_layers: int | None = None
    error: str = ""


class _Provenance(_Shape):
    model: str = ""
    backend: str = ""
    device: str = ""
    device_name: str = ""
    dtype: str = ""
    parameters: dict[str, Any] = {}
    versions: dict[str, str] = {}
    cost: _Cost | None = None
    prompt_sha256: str = ""
    commit: str | None = None
    time: str = ""


class _Line(_Shape):
    task: str = Field(min_length=1)
    selector: str = Field(min_length=1)
    context: int = Field(ge=1, le=MAX_COUNT)
    document: int = Field(ge=0, le=2**63 - 1)
    metrics: _Metrics
    config: _Config
    provenance: _Provenance


class NoResultError(ValueError):
    """JSON, but no result; its text says what is wrong with it."""


def parse_line(raw: bytes) -> dict[str, Any]:
    """A line's content.

    Raises:
        NoResultError: It is something else than a result.
        ValueError: It is no JSON, as a line of which only the beginning was written.
        RecursionError: Likewise.
    """
    line = json.loads(raw)
    check_line(line)
    return line


def check_line(line: Any) -> None:
    """Refuse what is no result.

    Raises:
        NoResultError: It is something else.
    """
    try:
        _Line.model_validate(line)
        json.dumps(line, allow_nan=False)
    except ValidationError as error:
        raise NoResultError(_problem(error)) from None
    except (TypeError, ValueError) as error:
        raise NoResultError(f"a value is no JSON: {error}") from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "the line"
    if first["type"] == "missing":
        return f"{path} is missing"
    expected = _WORDS.get(first["type"]) or first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    got = json.dumps(first["input"], default=str)
    return f"{path} is {got if len(got) <= _SHOWN else got[:_SHOWN] + '…'}, not {expected}"


_WORDS = {
    "dict_type": "a table",
    "model_type": "a table",
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_too_short": "a name",
    "finite_number": "a number that is finite",
}


@dataclass(frozen=True)
class Scanned:
    """What a file of results holds.

    Attributes:
        lines: Number and content of every result.
        problems: Number of every other line that is no blank one, and what is wrong with it.
        torn: Where an incomplete last line begins, in bytes; None if there is none.
        ended: Whether a new line can be added as it is: the file is empty or ends with a newline.
    """

    lines: Sequence[tuple[int, dict[str, Any]]]
    problems: Sequence[tuple[int, str]]
    torn: int | None
    ended: bool


def scan(path: Path) -> Scanned:
    """Read a file of results without touching it; blank lines are none.

    Raises:
        OSError: It cannot be read, or is no file.
    """
    data = _read(path)
    lines: list[tuple[int, dict[str, Any]]] = []
    problems: list[tuple[int, str]] = []
    torn: int | None = None
    offset, last = 0, len(data.rstrip())
    for number, raw in enumerate(data.splitlines(keepends=True), start=1):
        end = offset + len(raw)
        if raw.strip():
            try:
                lines.append((number, parse_line(raw)))
            except NoResultError as error:
                problems.append((number, str(error)))
            except (ValueError, RecursionError):
                if end >= last:
                    torn = offset
                else:
                    problems.append((number, "it is no JSON"))
        offset = end
    return Scanned(lines, problems, torn, data[-1:] in (b"", b"\n"))


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its other end
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a folder" if stat.S_ISDIR(mode) else "a pipe or device", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
