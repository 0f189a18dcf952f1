"""`sparsesel eval`: measure selectors on a real model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsesel.cli.console import err, out, safe
from sparsesel.cli.selectors import resolve_selectors
from sparsesel.config import RunConfig, build, load_file, parse_assignments
from sparsesel.errors import InputError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def evaluation() -> None:
    """Measure selectors against each other on the same work."""


@app.command()
def perplexity(
    out_dir: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the results; run again to resume.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="smollm2-135m (offline), a local folder or a Hub id. [default: smollm2-135m]"),
    ] = None,
    selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="name, name:preset or a config file, then optional ,field=value; repeatable. "
            "[required, here or in --config]",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field in every selector that has it; repeatable."),
    ] = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option("--context", help="Tokens of a document, scored ones included; repeatable. [default: 2048]"),
    ] = None,
    suffix: Annotated[int | None, typer.Option("--suffix", help="Tokens scored per document. [default: 512]")] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text, repeatable. [default: Python's language reference]"),
    ] = None,
    skip_chars: Annotated[
        int | None, typer.Option("--skip-chars", help="Characters left out at the beginning of each text. [default: 0]")
    ] = None,
    documents: Annotated[
        int | None, typer.Option("--documents", help="Documents, from the texts in turn. [default: one of each text]")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML, YAML or JSON file; options given here win over it."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="What runs the selectors: auto, triton or eager. [default: auto]"),
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Allow a download from the Hub.")] = False,
) -> None:
    """Perplexity of the last tokens of long documents, every one of them decoded through the selector.

    The rest of each document is prefilled once, densely, for all selectors.
    """
    if not out_dir.strip():  # as a path it would be the folder that the command runs in
        raise InputError(
            "--out", expected="a folder", got=repr(out_dir), remedy="Name one; it is made if it is not there."
        )
    folder = Path(out_dir)
    values: dict[str, Any] = load_file(config_file) if config_file is not None else {}
    given = {
        "model": model,
        "selectors": selectors,
        "contexts": contexts,
        "suffix": suffix,
        "texts": texts,
        "skip_chars": skip_chars,
        "documents": documents,
        "backend": backend,
    }
    values.update({name: value for name, value in given.items() if value is not None})
    if sets:
        known = values.get("set")
        values["set"] = {**(known if isinstance(known, dict) else {}), **parse_assignments(sets, where="--set")}
    config = build(RunConfig, values, where="eval perplexity")
    resolved = resolve_selectors(config.selectors, config.set)

    from sparsesel.eval.progress import TerminalProgress
    from sparsesel.eval.report import perplexity_report
    from sparsesel.eval.runner import Run

    with Run(config, resolved, folder, online=online) as run:
        # Loads torch, which is seconds; `Run` has refused what it can without.
        from sparsesel.eval.perplexity import MeasurementError

        try:
            with TerminalProgress(err) as progress:
                run.measure(progress)
        except KeyboardInterrupt:
            err.print(
                f"\nInterrupted. {run.done} of {len(run.points)} points are kept in {safe(folder)}; "
                "run the same command again to measure the rest.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        except MeasurementError as error:
            err.print(f"error: {safe(error)}", soft_wrap=True)
            raise typer.Exit(1) from None
        for part in perplexity_report(run.store.lines, width=out.width):
            out.print(part)
