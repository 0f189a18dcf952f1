"""`sparsesel report`: results folders as tables, figures and a page, from their lines alone."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from sparsesel.cli.console import err, out, print_differences, safe
from sparsesel.errors import InputError


def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR…", help="Folders that `sparsesel eval` wrote to.")],
    out_dir: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Where the report goes. [default: report, in the first folder]"),
    ] = None,
) -> None:
    """Show results: Markdown tables, figures as PNG and SVG, and one page that opens from disk.

    Several folders are shown together. What was not measured alike is marked. Nothing is measured or computed anew,
    and the folders' results are left as they are.
    """
    for name, value in [("DIR", folder) for folder in folders] + [("--out", out_dir)]:
        if value is not None and not value.strip():
            raise InputError(name, expected="a folder", got=repr(value), remedy="Name one.")

    from sparsesel.eval.render.content import gather
    from sparsesel.eval.render.draw import check_matplotlib
    from sparsesel.eval.render.write import write
    from sparsesel.eval.tables import renderables

    check_matplotlib()
    content = gather([Path(folder) for folder in folders])
    target = Path(folders[0]) / "report" if out_dir is None else Path(out_dir)
    written = write(
        content,
        target,
        track=lambda figures: track(figures, "Drawing", console=err, transient=True, disable=not err.is_terminal),
    )
    sections = [(part.task, shown.section) for part in content.parts for shown in part.shown]
    summary = [section for task, section in sections if not task] or [section for _, section in sections]
    silent = [section for _, section in sections if not (section.tables or section.figures) and section not in summary]
    for rendered in renderables([*summary, *silent], width=out.width):
        out.print(rendered)
    print_differences(content.differences)
    for problem in [*content.problems, *written.problems]:
        out.print(safe(problem), style="yellow", soft_wrap=True)
    out.print(f"{len(content.entries)} results, {written.count} figures:")
    for path in (written.page, written.markdown, written.figures):
        out.print(safe(path), soft_wrap=True)
