"""Writes a report: Markdown, figures, the page. Each file is replaced completely or not at all."""

import contextlib
import os
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

_OURS = ".figures"  # names the files that the last report wrote into `figures`


@dataclass(frozen=True)
class Written:
    """Where a report is, of how many figures, and which could not be drawn."""

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
        _write_figures(figures, drawings)
        _replace(out / "report.md", markdown(content).encode())
        _replace(out / "report.html", page(content, drawings).encode())
    except OSError as error:
        raise InputError(
            "--out",
            expected="a folder that can be written",
            got=f"{out}: {error.strerror or error}",
            remedy="Choose another folder with --out.",
        ) from error
    return Written(out / "report.md", out / "report.html", figures, len(drawings), list(undrawn.values()))


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


def _write_figures(folder: Path, drawings: Mapping[str, Drawing]) -> None:
    files = {f"{name}.png": drawing.png for name, drawing in drawings.items()}
    files |= {f"{name}.svg": drawing.svg.encode() for name, drawing in drawings.items()}
    record = folder / _OURS
    before = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    # Both are named while files come and go, so that none is left behind by a run that was stopped.
    _replace(record, "".join(f"{name}\n" for name in sorted({*before, *files})).encode())
    for name, data in files.items():
        _replace(folder / name, data)
    for name in before:
        if name not in files and name == os.path.basename(name) and name.endswith((".png", ".svg")):
            (folder / name).unlink(missing_ok=True)
    _replace(record, "".join(f"{name}\n" for name in sorted(files)).encode())


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
