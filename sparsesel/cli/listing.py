"""`sparsesel list`: which selectors and evaluation tasks are installed, and what each is."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from sparsesel.cli.console import out, print_json, safe
from sparsesel.errors import BrokenPluginError
from sparsesel.registry import Broken, Registered, Registry, registry


def list_selectors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    tasks_only: Annotated[bool, typer.Option("--tasks", help="List evaluation tasks alone.")] = False,
) -> None:
    """List the selectors and evaluation tasks installed, with their paper and the distribution each came from.

    A plugin that cannot be used is listed with its error.
    """
    usable, unusable = checked(registry())
    selectors = [] if tasks_only else _rows(usable)
    tasks = _rows(usable_tasks(registry()))
    broken = [
        {"name": b.name, "distribution": b.distribution, "version": b.version, "error": b.error} for b in unusable
    ]
    if as_json:
        print_json({**({} if tasks_only else {"selectors": selectors}), "tasks": tasks, "broken": broken})
        return
    if not tasks_only:
        if selectors:
            _print_table("selector", "what it attends to", selectors)
        else:
            out.print("No selector is installed.")
    if tasks:
        if selectors:
            out.print()
        _print_table("task", "what it measures", tasks)
    elif tasks_only:
        out.print("No evaluation task is installed.")
    for row in broken:
        out.print(
            safe(f"\nbroken: {row['name']} (from {row['distribution']} {row['version']}): {row['error']}"),
            style="red",
            soft_wrap=True,
        )


def _rows(found: Mapping[str, Registered[Any]]) -> list[dict[str, str]]:
    """What is said of each."""
    return [
        {
            "name": name,
            "summary": one.plugin.summary,
            "paper": one.plugin.paper,
            "distribution": one.distribution,
            "version": one.version,
        }
        for name, one in found.items()
    ]


def _print_table(what: str, summary: str, rows: Sequence[Mapping[str, str]]) -> None:
    table = Table(what, summary, "paper", "from", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        origin = f"{row['distribution']} {row['version']}"
        table.add_row(*(safe(cell) for cell in (row["name"], row["summary"], row["paper"] or "-", origin)))
    out.print(table)


def checked(found: Registry) -> tuple[dict[str, Registered[Any]], list[Broken]]:
    """The selectors that can be used, as far as that is known without torch, and what cannot be, with the reason.

    That is also tasks that cannot be used.
    """
    problems = {name: _problem(found, name) for name in found.selectors}
    usable = {name: one for name, one in found.selectors.items() if not problems[name]}
    broken = [
        Broken(name, one.distribution, one.version, problems[name])
        for name, one in found.selectors.items()
        if problems[name]
    ]
    for name, one in found.tasks.items():
        if problem := _task_problem(found, name):
            broken.append(Broken(name, one.distribution, one.version, problem))
    return usable, found.broken + broken


def usable_tasks(found: Registry) -> dict[str, Registered[Any]]:
    """The evaluation tasks that can be used, as far as that is known without torch."""
    return {name: one for name, one in found.tasks.items() if not _task_problem(found, name)}


def _task_problem(found: Registry, name: str) -> str:
    """What is wrong with a task's configuration or the place of its factory, empty if nothing is."""
    try:
        found.task_config_class(name)
    except BrokenPluginError as error:
        return f"expected {error.expected}, got {error.got}"
    target = found.get_task(name).plugin.factory
    if not _is_there(target.partition(":")[0]):
        return f"expected `factory` {target!r} to import, got no such module"
    return ""


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
