"""`sparsesel show`: one selector or evaluation task, its configuration field by field."""

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.padding import Padding
from rich.text import Text

from sparsesel.cli.console import out, print_json, safe
from sparsesel.config import LayeredConfig, SelectorConfig, parse_assignments
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.registry import Registered, registry

_BOUNDS = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(arg) for arg in args)
    if origin is typing.Annotated:
        return _type(args[0])
    if annotation is types.NoneType:
        return "None"
    if origin is not None:
        return str(annotation).replace("typing.", "")
    return getattr(annotation, "__name__", str(annotation))


def field_type(field: FieldInfo) -> str:
    """Type of a configuration field and the bounds on it, for people: `int, ≥ 1`."""
    bounds = [
        f"{sign} {getattr(limit, kind.__name__.lower())}"
        for limit in field.metadata
        for kind, sign in _BOUNDS.items()
        if isinstance(limit, kind)
    ]
    return ", ".join([_type(field.annotation), *bounds])


def show(
    selector: Annotated[
        str,
        typer.Argument(
            metavar="SELECTOR",
            help="name, name:preset or a config file, then optional ,field=value; or an evaluation task's name",
        ),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show a selector's resolved configuration, every field with its meaning, and its presets; likewise a task's."""
    if selector.strip() in registry().tasks and selector.strip() not in registry().selectors:
        shown = _describe_task(selector.strip(), parse_assignments(sets or [], where="--set"))
        if as_json:
            print_json({"task": selector.strip(), **{key: shown[key] for key in shown if key != "name"}})
        else:
            _print(shown)
        return
    ((spec, config),) = resolve_selectors([selector], sets or []).items()
    if isinstance(config, LayeredConfig):
        shown = {key: _describe(one) for key, one in config.layers.items()}
        if as_json:
            print_json({"selector": spec, "layers": shown, "config": config.model_dump(mode="json")})
            return
        for index, (key, description) in enumerate(shown.items()):
            out.print(f"{chr(10) * bool(index)}layers {key}", style="bold underline")
            _print(description)
        return
    description = _describe(config)
    if as_json:
        print_json({"selector": spec, **description})
        return
    _print(description)


def _describe(config: SelectorConfig) -> dict[str, Any]:
    """All there is to know of a configuration and its selector."""
    found = registry().get(config.name)
    return {**_described(config, found), "presets": registry().presets(config.name), "config": _dumped(config)}


def _describe_task(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """All there is to know of a task and its configuration; fields without a default may be left out."""
    found, model = registry().get_task(name), registry().task_config_class(name)
    lacking = {key for key, field in model.model_fields.items() if field.is_required()} - set(values)
    config = model.model_construct(**values) if lacking else registry().make_task_config(name, values)
    return {"name": name, **_described(config, found), "presets": {}, "config": _dumped(config)}


def _dumped(config: BaseModel) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _described(config: BaseModel, found: Registered[Any]) -> dict[str, Any]:
    fields = []
    for key, field in type(config).model_fields.items():
        if key == "name":
            continue
        value = getattr(config, key, None)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        fields.append(
            {
                "name": key,
                "type": field_type(field),
                "description": field.description or "",
                "default": default,
                "value": value,
                "changed": value != default or (field.is_required() and value is not None),
            }
        )
    return {
        "summary": found.plugin.summary,
        "paper": found.plugin.paper,
        "distribution": found.distribution,
        "version": found.version,
        "fields": fields,
    }


def _print(shown: dict[str, Any]) -> None:
    """What `_describe` found, for people."""
    name = safe(shown["name"] if "name" in shown else shown["config"]["name"])
    out.print(f"{name}: {safe(shown['summary'])}", style="bold", soft_wrap=True)
    if shown["paper"]:
        out.print(f"paper   {safe(shown['paper'])}", soft_wrap=True)
    out.print(f"from    {safe(shown['distribution'])} {safe(shown['version'])}", soft_wrap=True)
    if not shown["fields"]:
        out.print("\nIt has no fields to configure.")
    for row in shown["fields"]:
        _print_field(row)
    if any(row["changed"] for row in shown["fields"]):
        out.print("\n* differs from the default")
    if shown["presets"]:
        out.print()
    for preset, values in shown["presets"].items():
        text = ", ".join(f"{key} = {value}" for key, value in values.items()) or "nothing: the defaults"
        out.print(f"preset {name}:{safe(preset)} sets {safe(text)}", soft_wrap=True)


def _print_field(row: dict[str, Any]) -> None:
    """Value, default, type and meaning of one field; a star marks a value that differs from the default."""
    line = Text(f"\n{safe(row['name'])} = {safe(row['value'])}", "bold")
    if row["changed"]:
        line.append(" *", "bold yellow")
    default = "no default" if row["default"] is None else f"default {safe(row['default'])}"
    out.print(line.append(f"  ({default}; {safe(row['type'])})", "dim"), soft_wrap=True)
    out.print(Padding(Text(safe(row["description"])), (0, 0, 0, 4)))
