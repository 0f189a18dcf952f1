"""Selectors as users name them, and the `--set` that goes with them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsesel.config import AnyConfig, parse_assignments, unknown_name
from sparsesel.errors import InputError
from sparsesel.registry import registry


def needs_selectors(tasks: Iterable[str]) -> bool:
    """Whether any of these tasks measures the selectors that the user names."""
    return any(registry().task_class(name).needs_selectors for name in tasks)


def resolve_selectors(
    specs: Sequence[str], sets: Sequence[str] | Mapping[str, Any] = (), *, required: bool = True
) -> dict[str, AnyConfig]:
    """Resolve the selectors that a command names.

    Args:
        specs: Selectors: `name`, `name:preset` or a config file, each optionally followed by `,field=value`.
        sets: `field=value` pairs, as text or read already. Each applies to every selector that has the field and
            wins over the spec.
        required: Whether naming none is refused.

    Returns:
        The configuration of each spec, in the order given; of a file by layers, one for each of its ranges.

    Raises:
        InputError: No selector, one named twice or in two ways, one that does not exist or does not validate, or a
            pair in `sets` whose field none of them has.
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
    return resolved
