"""Selectors as users name them, and the `--set` that goes with them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsesel.config import FILE_SUFFIXES, AnyConfig, parse_assignments, parse_value, unknown_name
from sparsesel.errors import InputError, UnknownNameError
from sparsesel.registry import registry

CALIBRATION = "calibration"
"""By convention the field that names a calibration file, or says how to do without one."""


def needs_selectors(tasks: Iterable[str]) -> bool:
    """Whether any of these tasks measures the selectors that the user names."""
    return any(registry().task_class(name).needs_selectors for name in tasks)


def resolve_selectors(
    specs: Sequence[str],
    sets: Sequence[str] | Mapping[str, Any] = (),
    *,
    required: bool = True,
    names: Mapping[str, str] | None = None,
) -> dict[str, AnyConfig]:
    """Resolve the selectors that a command names.

    Args:
        specs: Selectors: `name`, `name:preset` or a config file, each optionally followed by `,field=value`.
        sets: `field=value` pairs, as text or read already. Each applies to every selector that has the field and
            wins over the spec.
        required: Whether naming none is refused.
        names: What some of them are called, by their spec.

    Returns:
        The configuration of each spec by its name, in the order given; of a file by layers, one for each of its
        ranges.

    Raises:
        InputError: No selector, one named twice or in two ways, one that does not exist or does not validate, a pair
            in `sets` whose field none of them has, or a name for none of them or for several.
    """
    if not specs and required:
        raise InputError(
            "--selector",
            expected="at least one selector",
            got="none",
            remedy="`sparsesel list` shows those installed.",
        )
    overrides = sets if isinstance(sets, Mapping) else parse_assignments(sets, where="--set")
    fields: dict[str, set[str]] = {}
    for spec in (spec.strip() for spec in specs):
        if spec in fields:
            raise InputError(
                "--selector",
                expected="each selector once",
                got=f"{spec!r} twice",
                remedy="Leave one of them out.",
            )
        fields[spec] = registry().fields(spec)
    if overrides and specs and not any(fields.values()):
        raise UnknownNameError(
            "--set",
            expected="a selector with fields",
            got=f"{next(iter(overrides))!r} for {', '.join(fields)}",
            remedy="Leave --set out, or name another selector.",
        )
    for key in overrides:
        if not any(key in known for known in fields.values()):
            raise unknown_name("--set", key, set().union(*fields.values()), what="field")
    resolved: dict[str, AnyConfig] = {}
    for spec, known in fields.items():
        config = registry().resolve(spec, {key: value for key, value in overrides.items() if key in known})
        for other, earlier in resolved.items():
            if config == earlier:
                raise InputError(
                    "--selector",
                    expected="each configuration once",
                    got=f"{other!r} and {spec!r}, which are the same: {config}",
                    remedy="Leave one of them out.",
                )
        resolved[spec] = config
    return _renamed(resolved, names or {})


def _renamed(resolved: Mapping[str, AnyConfig], names: Mapping[str, str]) -> dict[str, AnyConfig]:
    for spec in names:
        if spec not in resolved:
            raise unknown_name("names", spec, resolved, what="selector")
    renamed = {names.get(spec, spec): config for spec, config in resolved.items()}
    if len(renamed) < len(resolved) or not all(name.strip() for name in renamed):
        raise InputError(
            "names",
            expected="a name for each selector, of none beside it",
            got=", ".join(map(repr, names.values())),
            remedy="Choose other names.",
        )
    return renamed


def absolute_spec(spec: str) -> str:
    """A selector's spec with absolute paths: of its file, and of a calibration file that it names.

    A path that a spec cannot hold, as commas part its fields, stays as it is.
    """
    head, *pairs = spec.strip().split(",")
    parts = [_absolute(head) if head.strip().lower().endswith(FILE_SUFFIXES) else head]
    for pair in pairs:
        key, sign, value = pair.partition("=")
        path = absolute_value(key.strip(), parse_value(value.strip()))
        parts.append(f"{key}{sign}{path}" if isinstance(path, str) and path != value.strip() else pair)
    return ",".join(parts) if not any("," in part for part in parts) else spec


def absolute_value(field: str, value: Any) -> Any:
    """A selector field's value, absolute if it is the path of a calibration file."""
    is_file = field == CALIBRATION and isinstance(value, str) and os.path.isfile(value)
    return _absolute(value) if is_file else value


def _absolute(path: str) -> str:
    return os.path.abspath(path.strip())
