"""`sparsesel list`: which selectors are installed, and what each is."""

import importlib.util
from typing import Annotated

import typer
from rich.table import Table

from sparsesel.cli.console import out, print_json, safe
from sparsesel.errors import BrokenPluginError
from sparsesel.registry import Broken, Registered, Registry, registry


def list_selectors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the selectors installed, with their paper and the distribution each came from.

    A plugin that cannot be used is listed with its error.
    """
    usable, unusable = checked(registry())
    selectors = [
        {
            "name": name,
            "summary": found.plugin.summary,
            "paper": found.plugin.paper,
            "distribution": found.distribution,
            "version": found.version,
        }
        for name, found in usable.items()
    ]
    broken = [
        {"name": b.name, "distribution": b.distribution, "version": b.version, "error": b.error} for b in unusable
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


def checked(found: Registry) -> tuple[dict[str, Registered], list[Broken]]:
    """The selectors that can be used, as far as that is known without torch, and what cannot be, with the reason."""
    problems = {name: _problem(found, name) for name in found.selectors}
    usable = {name: one for name, one in found.selectors.items() if not problems[name]}
    broken = [
        Broken(name, one.distribution, one.version, problems[name])
        for name, one in found.selectors.items()
        if problems[name]
    ]
    return usable, found.broken + broken


def _problem(found: Registry, name: str) -> str:
    """What is wrong with a plugin's configuration, presets or the place of its factory, empty if nothing is."""
    try:
        found.config_class(name)
        found.presets(name)
    except BrokenPluginError as error:
        return f"expected {error.expected}, got {error.got}"
    plugin = found.get(name).plugin
    for field in ("factory", "calibrate"):
        target: str = getattr(plugin, field)
        if target and not _is_there(target.partition(":")[0]):
            return f"expected `{field}` {target!r} to import, got no such module"
    return ""


def _is_there(module: str) -> bool:
    """Whether a module is installed; it is not run, since those of factories load torch."""
    try:
        return importlib.util.find_spec(module) is not None
    except KeyboardInterrupt:
        raise
    except BaseException:  # its package does not import, and a third party's can raise anything
        return False
