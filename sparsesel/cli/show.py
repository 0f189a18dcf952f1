"""`sparsesel show`: one selector, its configuration field by field."""

import types
import typing
from typing import Annotated, Any

import annotated_types
import typer
from pydantic.fields import FieldInfo
from rich.padding import Padding
from rich.text import Text

from sparsesel.cli.console import out, print_json, safe
from sparsesel.cli.selectors import resolve_selectors
from sparsesel.config import parse_spec
from sparsesel.registry import registry

_BOUNDS = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(arg) for arg in args)
    if origin is typing.Annotated:
        return _type(args[0])
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
        typer.Argument(metavar="SELECTOR", help="name, name:preset or a config file, then optional ,field=value"),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show a selector's resolved configuration, every field with its meaning, and its presets."""
    ((spec, config),) = resolve_selectors([selector], sets or []).items()
    name = parse_spec(spec).name
    found, presets = registry().get(name), registry().presets(name)
    fields = []
    for key, field in type(config).model_fields.items():
        if key == "name":
            continue
        value = getattr(config, key)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        fields.append(
            {
                "name": key,
                "type": field_type(field),
                "description": field.description or "",
                "default": default,
                "value": value,
                "changed": field.is_required() or value != default,
            }
        )
    if as_json:
        print_json(
            {
                "selector": spec,
                "summary": found.plugin.summary,
                "paper": found.plugin.paper,
                "distribution": found.distribution,
                "version": found.version,
                "fields": fields,
                "presets": presets,
                "config": config.model_dump(mode="json"),
            }
        )
        return
    out.print(f"{name}: {safe(found.plugin.summary)}", style="bold", soft_wrap=True)
    if found.plugin.paper:
        out.print(f"paper   {safe(found.plugin.paper)}", soft_wrap=True)
    out.print(f"from    {safe(found.distribution)} {safe(found.version)}", soft_wrap=True)
    if not fields:
        out.print("\nIt has no fields to configure.")
    for row in fields:
        _print_field(row)
    if any(row["changed"] for row in fields):
        out.print("\n* differs from the default")
    if presets:
        out.print()
    for preset, values in presets.items():
        text = ", ".join(f"{key} = {value}" for key, value in values.items()) or "nothing: the defaults"
        out.print(f"preset {safe(name)}:{safe(preset)} sets {safe(text)}", soft_wrap=True)


def _print_field(row: dict[str, Any]) -> None:
    """Value, default, type and meaning of one field; a star marks a value that differs from the default."""
    line = Text(f"\n{safe(row['name'])} = {safe(row['value'])}", "bold")
    if row["changed"]:
        line.append(" *", "bold yellow")
    default = "no default" if row["default"] is None else f"default {safe(row['default'])}"
    out.print(line.append(f"  ({default}; {safe(row['type'])})", "dim"), soft_wrap=True)
    out.print(Padding(Text(safe(row["description"])), (0, 0, 0, 4)))
