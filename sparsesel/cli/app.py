"""The commands, and what becomes of bad input and Ctrl-C in any of them.

Modules imported here load neither torch nor transformers; a command imports what it needs when it runs.
"""

import os
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sparsesel
from sparsesel.cli import calibrate, cost, environment, explain, generate, listing, report, show
from sparsesel.cli import eval as evaluation
from sparsesel.cli.console import err, out, print_error
from sparsesel.errors import InputError

_PATIENCE = 20.0  # seconds; on a busy machine a process takes some to end


class _Commands(TyperGroup):
    """Turns refused input into a short error with exit code 2, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            if os.environ.get("RANK", "0") != "0":
                # What all processes of a run find, the first one says; torchrun ends the others meanwhile.
                time.sleep(_PATIENCE)
            print_error(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err.print("\nInterrupted.")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="sparsesel",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own would swallow `[default: 512]` in a help text
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"sparsesel {sparsesel.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Sparse-attention selectors for long-context decoding."""


app.command("list")(listing.list_selectors)
app.command("show")(show.show)
app.command("env")(environment.env)
app.command("generate")(generate.generate)
app.command("cost")(cost.cost)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(evaluation.app, name="eval", help="Measure selectors against each other on the same work.")
