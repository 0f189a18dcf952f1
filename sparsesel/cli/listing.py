"""`sparsesel list`: which selectors are installed, and what each is."""

from typing import Annotated

import typer
from rich.table import Table

from sparsesel.cli.console import out, print_json, safe
from sparsesel.registry import registry


def list_selectors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the selectors installed, with their paper and the distribution each came from.

    A plugin that cannot be used is listed with its error.
    """
    selectors = [
        {
            "name": name,
            "summary": found.plugin.summary,
            "paper": found.plugin.paper,
            "distribution": found.distribution,
            "version": found.version,
        }
        for name, found in registry().selectors.items()
    ]
    broken = [
        {"name": b.name, "distribution": b.distribution, "version": b.version, "error": b.error}
        for b in registry().broken
    ]
    if as_json:
        print_json({"selectors": selectors, "broken": broken})
        return
    table = Table("selector", "what it attends to", "paper", "from", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in selectors:
        origin = f"{row['distribution']} {row['version']}"
        table.add_row(*(safe(cell) for cell in (row["name"], row["summary"], row["paper"] or "-", origin)))
    if selectors:
        out.print(table)
    else:
        out.print("No selector is installed.")
    for row in broken:
        out.print(
            safe(f"\nbroken: {row['name']} (from {row['distribution']} {row['version']}): {row['error']}"),
            style="red",
            soft_wrap=True,
        )
