"""`sparsesel eval`: measure selectors on a real model; one subcommand for each task installed."""

import functools
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from sparsesel.cli.console import err, out, print_differences, safe
from sparsesel.config import AnyConfig, RunConfig, TaskConfig, build, load_file, parse_assignments, parse_value
from sparsesel.errors import InputError
from sparsesel.eval.selectors import needs_selectors, resolve_selectors
from sparsesel.registry import registry


class Tasks(TyperGroup):
    """The tasks installed, third parties' among them, as subcommands made when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all that can be used."""
        return [name for name in registry().tasks if self.get_command(ctx, name) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a task, None if there is none or it is broken; `resolve_command` says why."""
        try:
            return _command(cmd_name)
        except InputError:
            return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As it is, but what is no task is refused with the nearest that is."""
        if args and not args[0].startswith("-"):
            _command(args[0])
        return super().resolve_command(ctx, args)


Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the results; run again to resume.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML, YAML or JSON file; options given here win over it."),
]
Online = Annotated[bool, typer.Option("--online", help="Allow a download from the Hub.")]

app = typer.Typer(cls=Tasks, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def evaluation(
    ctx: typer.Context,
    config_file: Config = None,
    out_dir: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Folder of the results; run again to resume.")
    ] = None,
    online: Online = False,
) -> None:
    """Measure selectors against each other on the same work: one task, or all those of a file.

    `sparsesel eval --config grid.toml --out DIR` runs the tasks that the file has tables for: `[tasks.perplexity]`.
    """
    if ctx.invoked_subcommand is not None:
        if config_file is not None or out_dir is not None or online:
            raise InputError(
                "eval",
                expected="options after the task",
                got=f"options before {ctx.invoked_subcommand!r}",
                remedy=f"Write sparsesel eval {ctx.invoked_subcommand} --out DIR …",
            )
        return
    if config_file is None or out_dir is None:
        raise InputError(
            "--config" if config_file is None else "--out",
            expected="a task, or --config FILE and --out DIR",
            got="neither" if config_file is None else "no --out",
            remedy="Write sparsesel eval --config grid.toml --out DIR, or name a task.",
        )
    values = load_file(config_file)
    try:
        if not values.get("tasks"):
            raise InputError(
                "tasks",
                expected="a table of at least one task",
                got="none",
                remedy="Add [tasks.perplexity] for example, or name a task: "
                f"sparsesel eval perplexity --config {config_file} --out {out_dir}.",
            )
        _run(values, out_dir, online=online)
    except InputError as error:  # all that it says of the run comes from the file
        if error.field.removeprefix("--") == "out":
            raise
        raise error.within(str(config_file)) from None


_COMMON: dict[str, Any] = {
    "out_dir": Out,
    "model": Annotated[
        str | None,
        typer.Option("--model", help="smollm2-135m (offline), a local folder or a Hub id. [default: smollm2-135m]"),
    ],
    "selectors": Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="name, name:preset or a config file, then optional ,field=value; repeatable. "
            "[required, here or in --config]",
        ),
    ],
    "sets": Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field in every selector that has it; repeatable."),
    ],
    "contexts": Annotated[
        list[int] | None,
        typer.Option("--context", help="Tokens of a case, decoded ones included; repeatable. [default: 2048]"),
    ],
    "texts": Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text, repeatable. [default: Python's language reference]"),
    ],
    "skip_chars": Annotated[
        int | None, typer.Option("--skip-chars", help="Characters left out at the beginning of each text. [default: 0]")
    ],
    "seed": Annotated[int | None, typer.Option("--seed", help="Seed of everything random. [default: 0]")],
    "backend": Annotated[
        str | None,
        typer.Option("--backend", help="What runs the selectors: auto, triton or eager. [default: auto]"),
    ],
    "config_file": Config,
    "online": Online,
}
_PREFIX = "field_"  # of the parameters that are the task's fields


@functools.cache
def _command(name: str) -> Any:
    """The command of a task.

    Raises:
        InputError: There is no such task, or it is broken.
    """
    model = registry().task_config_class(name)
    # What a task without selectors has no use for.
    hidden = () if registry().task_class(name).needs_selectors else ("selectors", "sets")
    summary = safe(registry().get_task(name).plugin.summary)

    def command(**values: Any) -> None:
        fields = {key.removeprefix(_PREFIX): value for key, value in values.items() if key.startswith(_PREFIX)}
        given = {"sets": None, **{key: value for key, value in values.items() if not key.startswith(_PREFIX)}}
        _run_task(name, {key: value for key, value in fields.items() if value is not None}, **given)

    parameters = {key: option for key, option in _COMMON.items() if key not in hidden}
    taken = {one.__metadata__[0].default for one in parameters.values()}
    for key, field in model.model_fields.items():
        option = "--" + key.replace("_", "-")
        if option in taken:  # a third party's; its file still sets it
            continue
        parameters[_PREFIX + key] = Annotated[_kind(field) | None, _option(option, key, field)]
    command.__doc__ = summary
    command.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            inspect.Parameter(
                key,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotation,
                default=inspect.Parameter.empty if key == "out_dir" else (False if key == "online" else None),
            )
            for key, annotation in parameters.items()
        ]
    )
    command.__annotations__ = parameters
    single = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    single.command(name)(command)
    made = typer.main.get_command(single)
    made.name = name
    return made


def _shape(field: FieldInfo) -> str:
    """How a field is given: a list, a table, a flag or one value."""
    options = [field.annotation]
    if typing.get_origin(field.annotation) in (typing.Union, types.UnionType):
        options = list(typing.get_args(field.annotation))
    for option in options:
        origin = typing.get_origin(option) or option
        if origin in (tuple, list, set, frozenset):
            return "list"
        if origin is dict:
            return "table"
        if origin is bool:
            return "flag"
    return "value"


def _kind(field: FieldInfo) -> Any:
    return {"list": list[str], "table": list[str], "flag": bool, "value": str}[_shape(field)]


def _option(option: str, key: str, field: FieldInfo) -> Any:
    shape = _shape(field)
    described = (field.description or key).removesuffix(".")
    repeatable = "; repeatable" if shape in ("list", "table") else ""
    shown = safe(f"{described}{repeatable}. [{_default(field)}]")
    if shape == "flag":
        return typer.Option(f"{option}/--no-{option[2:]}", help=shown, show_default=False)
    metavar = {"table": "NAME=VALUE", "list": "VALUE", "value": "VALUE"}[shape]
    return typer.Option(option, metavar=metavar, help=shown, show_default=False)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required, here or in --config"
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return f"default: {extra['default']}"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, dict):
        return f"default: {', '.join(f'{key}={value}' for key, value in default.items())}"
    if isinstance(default, tuple | list):
        return f"default: {', '.join(map(str, default))}"
    return f"default: {default}"


def _parsed(field: FieldInfo, key: str, value: Any) -> Any:
    """What was given for a field, as its file would hold it."""
    match _shape(field):
        case "list":
            return [_value(one) for one in value] or None
        case "table":
            return parse_assignments(value, where=f"--{key.replace('_', '-')}") or None
        case "flag":
            return value
        case _:
            return _value(value)


def _value(text: str) -> Any:
    """As in TOML, where text needs no quotes."""
    return parse_value(text.strip()) if text.strip() else text


def _run_task(
    name: str,
    fields: dict[str, Any],
    *,
    out_dir: str,
    config_file: Path | None,
    online: bool,
    sets: list[str] | None,
    **given: Any,
) -> None:
    """Run one task with what the command line gives, over what the file holds."""
    values: dict[str, Any] = load_file(config_file) if config_file is not None else {}
    model: type[TaskConfig] = registry().task_config_class(name)
    tables = values.get("tasks")
    own = tables.get(name, {}) if isinstance(tables, dict) else {}
    own = dict(own) if isinstance(own, dict) else own
    if isinstance(own, dict):
        # A file for one task may have its fields beside the others.
        own = {**{key: values.pop(key) for key in model.model_fields if key in values and key not in _OWN}, **own}
        parsed = {key: _parsed(model.model_fields[key], key, value) for key, value in fields.items()}
        own.update({key: value for key, value in parsed.items() if value is not None})
    values["tasks"] = {name: own}
    values.update({key: value for key, value in given.items() if value is not None and value != []})
    if given.get("selectors") and isinstance(names := values.get("names"), dict):
        values["names"] = {spec: name for spec, name in names.items() if spec in given["selectors"]}
    if sets:
        known = values.get("set")
        values["set"] = {**(known if isinstance(known, dict) else {}), **parse_assignments(sets, where="--set")}
    _run(values, out_dir, online=online)


_OWN = frozenset(RunConfig.model_fields)


def _run(values: dict[str, Any], out_dir: str, *, online: bool) -> None:
    """Measure what a run's configuration says, and show it."""
    if not out_dir.strip():  # as a path it would be the folder that the command runs in
        raise InputError(
            "--out", expected="a folder", got=repr(out_dir), remedy="Name one; it is made if it is not there."
        )
    config = build(RunConfig, values, where="eval")
    for name, fields in config.tasks.items():
        registry().make_task_config(name, fields)
    resolved = resolve_selectors(
        config.selectors, config.set, required=needs_selectors(config.tasks), names=config.names
    )

    from sparsesel.eval.sharding import LeftAloneError

    try:
        _measure(config, resolved, Path(out_dir), online=online)
    except LeftAloneError as error:
        err.print(f"error: {safe(error)}", soft_wrap=True)
        raise typer.Exit(1) from None


def _measure(config: RunConfig, selectors: Mapping[str, AnyConfig], folder: Path, *, online: bool) -> None:
    """Measure a run, and show it."""
    from sparsesel.eval.differences import differences
    from sparsesel.eval.progress import Silent, TerminalProgress
    from sparsesel.eval.report import report
    from sparsesel.eval.runner import Run
    from sparsesel.eval.tables import renderables

    with Run(config, selectors, folder, online=online) as run:
        # Loads torch, which is seconds; `Run` has refused what it can without.
        from sparsesel.eval.decode import MeasurementError

        try:
            if run.shard.is_first:
                with TerminalProgress(err, several=len(config.tasks) > 1) as progress:
                    run.measure(progress)
            else:
                run.measure(Silent())
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
        if run.shard.is_first:
            for part in renderables(report(run.store.lines), width=out.width):
                out.print(part)
            print_differences(differences(run.store.lines))
