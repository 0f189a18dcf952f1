"""Writes a report: Markdown, figures, the page. Each file is replaced completely or not at all."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesel.errors import InputError
from sparsesel.eval.figures import Figure
from sparsesel.eval.render.content import Content
from sparsesel.eval.render.draw import Drawing, draw
from sparsesel.eval.render.markdown import markdown
from sparsesel.eval.render.page import page

_NAME = re.compile(rb"[a-z0-9-]+\.(png|svg)")  # as `sparsesel.eval.render.content` names figures
_OURS = ".figures"  # names the files that the last report wrote into `figures`


@dataclass(frozen=True)
class Written:
    """Where a report is, of how many figures, and what could not be drawn or was not as it should be."""

    markdown: Path
    page: Path
    figures: Path
    count: int
    problems: Sequence[str]


def write(content: Content, out: Path, *, track: Callable[[list[Any]], Iterable[Any]] = iter) -> Written:
    """Write a report into a folder, in the place of the one that it holds; other files there stay.

    Args:
        content: What to show.
        out: Folder, made if it is not there.
        track: Is given what takes time, to hand it on piece by piece and show how far it is.

    Raises:
        InputError: The folder cannot be written.
    """
    figures = out / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)  # before the work: what cannot be is refused at once
        drawings, undrawn = _draw(track(content.figures), content.selectors)
        content = content.without(undrawn)
        problems = [*undrawn.values(), *_write_figures(figures, drawings)]
        _replace(out / "report.md", markdown(content).encode())
        _replace(out / "report.html", page(content, drawings).encode())
    except OSError as error:
        raise InputError(
            "--out",
            expected="a folder that can be written",
            got=f"{out}: {error.strerror or error}",
            remedy="Choose another folder with --out.",
        ) from error
    return Written(out / "report.md", out / "report.html", figures, len(drawings), problems)


def _draw(figures: Iterable[tuple[str, Figure]], selectors: Sequence[str]) -> tuple[dict[str, Drawing], dict[str, str]]:
    """The drawing of each figure, and of those that cannot be drawn why: a third party's may hold anything."""
    drawings: dict[str, Drawing] = {}
    undrawn: dict[str, str] = {}
    for name, figure in figures:
        try:
            drawings[name] = draw(figure, selectors)
        except Exception as error:
            undrawn[name] = f"The figure {figure.title!r} cannot be drawn ({type(error).__name__}: {error})."
    return drawings, undrawn


def _write_figures(folder: Path, drawings: Mapping[str, Drawing]) -> list[str]:
    """Write the figures in the place of those that the last report wrote; returns what is to be said of that."""
    files = {f"{name}.png": drawing.png for name, drawing in drawings.items()}
    files |= {f"{name}.svg": drawing.svg.encode() for name, drawing in drawings.items()}
    record = folder / _OURS
    # Of a file that something has damaged, only what can be a figure's name is taken.
    said = record.read_bytes().split(b"\n") if record.is_file() else []
    before = [name.decode() for name in said if _NAME.fullmatch(name)]
    # Both are named while files come and go, so that none is left behind by a run that was stopped.
    _replace(record, "".join(f"{name}\n" for name in sorted({*before, *files})).encode())
    for name, data in files.items():
        _replace(folder / name, data)
    for name in before:
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    _replace(record, "".join(f"{name}\n" for name in sorted(files)).encode())
    if any(name and not _NAME.fullmatch(name) for name in said):
        return [f"{record} was damaged, and made anew: figures of an earlier report may be left beside these."]
    return []


def _replace(path: Path, data: bytes) -> None:
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
