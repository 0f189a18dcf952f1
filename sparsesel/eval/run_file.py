"""`config.json` of a results folder: what was run there, to be given back with `--config` from anywhere."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsesel.config import RunConfig, build, load_file
from sparsesel.errors import InputError
from sparsesel.eval.results import ResultStore
from sparsesel.eval.selectors import absolute_spec, absolute_value

NAME = "config.json"


def portable(config: RunConfig) -> RunConfig:
    """The same with absolute paths; selectors keep the names that they were given."""
    names = {absolute_spec(spec): config.names.get(spec.strip(), spec.strip()) for spec in config.selectors}
    return config.model_copy(
        update={
            "selectors": tuple(names),
            "names": {spec: name for spec, name in names.items() if spec != name},
            "set": {field: absolute_value(field, value) for field, value in config.set.items()},
        }
    )


def write(store: ResultStore, config: RunConfig) -> None:
    """Write a run into its folder. What is there of earlier ones is kept.

    If tasks, selectors or contexts were added, one of these alone, the file says both. Otherwise the earlier one stays
    beside it as `config.1.json`, and so on.

    Raises:
        InputError: The folder cannot be written.
    """
    path = store.folder / NAME
    if path.is_file():
        both = _joined(_read(path), config)
        if both is None:
            _keep(store, path.read_text(encoding="utf-8", errors="surrogateescape"))
        else:
            config = both
    store.write_beside(NAME, json.dumps(config.model_dump(mode="json"), indent=2) + "\n")


def _read(path: Path) -> RunConfig | None:
    """An earlier run, None if the file holds none."""
    try:
        return build(RunConfig, load_file(path), where=NAME)
    except InputError:
        return None


def _joined(old: RunConfig | None, new: RunConfig) -> RunConfig | None:
    """One run that measures what two do and nothing else, None if there is none."""
    if old is None or any(new.tasks[name] != fields for name, fields in old.tasks.items() if name in new.tasks):
        return None
    shared = set(old.selectors) & set(new.selectors)
    if any(old.names.get(spec, spec) != new.names.get(spec, spec) for spec in shared):
        return None
    update: dict[str, Any] = {
        "tasks": {**old.tasks, **new.tasks},
        "selectors": _union(old.selectors, new.selectors),
        "contexts": _union(old.contexts, new.contexts),
        "names": {**old.names, **new.names},
    }
    both = new.model_copy(update=update)
    if old.model_copy(update=update) != both or len(set(both.names.values())) < len(both.names):
        return None
    mixed = [old.tasks != new.tasks, old.selectors != new.selectors, old.contexts != new.contexts]
    parts = (both.tasks, both.selectors, both.contexts)
    larger = any(
        (len(one.tasks), len(one.selectors), len(one.contexts)) == tuple(map(len, parts)) for one in (old, new)
    )
    return both if sum(mixed) <= 1 or larger else None


def _union(old: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*old, *new)))


def _keep(store: ResultStore, text: str) -> None:
    """Write what was there into the first free file, if none of the others says the same."""
    for number in itertools.count(1):
        path = store.folder / f"config.{number}.json"
        if not path.exists():
            store.write_beside(path.name, text)
        elif path.read_text(encoding="utf-8", errors="surrogateescape") != text:
            continue
        return
