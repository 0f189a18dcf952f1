"""What makes results unequal beside their selectors: a comparison across any of it is marked wherever it is shown."""

import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from sparsesel.errors import InputError
from sparsesel.eval.report import Line, budget_of
from sparsesel.registry import registry

# Of the whole run: provenance key, and what it is called.
_RUN = {
    "model": "models",
    "dtype": "types of numbers",
    "backend": "backends",
    "device": "devices",
    "device_name": "machines",
    "seed": "seeds",
    "data_sha256": "texts",
    "commit": "commits",
}
_SLACK = 1.05  # times the budget that may be attended unmarked
_MOST = 4  # names in a list
_LONGEST = 60  # characters of a value


def differences(lines: Sequence[Line]) -> list[str]:
    """A sentence for each way in which `lines` were not measured alike, most weighty first; none if they were.

    Compared within a task and context: budgets, documents, prompts by their hash, parameters of the task. Compared with
    its budget: what a selector attended to. Compared over all lines: models, texts, devices, backends, seeds, versions,
    commits, and what a selector's name stands for.
    """
    return [
        *_within_cases(lines),
        *_attended(lines),
        *_within_runs(lines),
        *_configurations(lines),
        *_uncommitted(lines),
    ]


def _within_cases(lines: Sequence[Line]) -> list[str]:
    """What differs between the selectors of one task and context; what differs alike in several is said once."""
    found: dict[tuple[str, str], list[str]] = {}
    for (task, context), own in _grouped(lines, lambda line: (line["task"], line["context"])).items():
        for what, how in (*_budgets(own), *_documents(own), *_prompts(own), *_parameters(own)):
            found.setdefault((what, how), []).append(f"{task} at {context}")
    return [f"Unequal {what} in {_listed(places)}: {how}." for (what, how), places in found.items()]


def _budgets(lines: Sequence[Line]) -> Iterable[tuple[str, str]]:
    budgets = _grouped(lines, lambda line: budget_of(line["config"]))
    budgets.pop(None, None)
    if len(budgets) > 1 and not _varies_budgets(lines):
        yield "budgets", "; ".join(f"topk {budget} for {_selectors(own)}" for budget, own in budgets.items())


def _varies_budgets(lines: Sequence[Line]) -> bool:
    """Whether their task does on purpose; one that is not installed does not say so."""
    try:
        return registry().task_class(lines[0]["task"]).varies_budgets_in(lines)
    except InputError:
        return False


def _documents(lines: Sequence[Line]) -> Iterable[tuple[str, str]]:
    every = {line["document"] for line in lines}
    by_selector = _grouped(lines, lambda line: line["selector"])
    counts = {selector: len({line["document"] for line in own}) for selector, own in by_selector.items()}
    short = [f"{selector} has {count}" for selector, count in counts.items() if count < len(every)]
    if short:
        yield "documents", f"of {len(every)}, {_listed(short)}"


def _prompts(lines: Sequence[Line]) -> Iterable[tuple[str, str]]:
    documents = _grouped(lines, lambda line: line["document"])
    unequal = [
        groups
        for own in documents.values()
        if len(groups := _grouped(own, lambda line: _text(line["provenance"].get("prompt_sha256")))) > 1
    ]
    if unequal:
        who = "; ".join(f"one for {_selectors(group)}" for group in unequal[0].values())
        yield "prompts", f"in {len(unequal)} of {len(documents)} documents, {who}"


def _parameters(lines: Sequence[Line]) -> Iterable[tuple[str, str]]:
    told: set[str] = set()
    for own in _grouped(lines, lambda line: line["document"]).values():
        names = dict.fromkeys(name for line in own for name in line["provenance"].get("parameters", {}))
        for name in names:
            values = _grouped(own, lambda line, name=name: _text(line["provenance"].get("parameters", {}).get(name)))
            if len(values) > 1 and name not in told:
                told.add(name)
                yield name, "; ".join(f"{_short(value)} for {_selectors(group)}" for value, group in values.items())


def _attended(lines: Sequence[Line]) -> Iterable[str]:
    """Selectors that attend to more than their budget, in layers that stay dense for example."""
    more: dict[str, float] = {}
    for (selector, _, _), own in _grouped(
        lines, lambda line: (line["selector"], line["task"], line["context"])
    ).items():
        budget = budget_of(own[0]["config"])
        counted = [one for line in own if isinstance(one := line["metrics"].get("attended"), int | float)]
        if isinstance(budget, int) and counted and (share := statistics.fmean(counted) / budget) > _SLACK:
            more[selector] = max(share, more.get(selector, 0.0))
    if more:
        most = [f"{selector} up to {share:.1f} times" for selector, share in more.items()]
        yield f"More tokens attended than topk: {_listed(most)}."


def _within_runs(lines: Sequence[Line]) -> Iterable[str]:
    for key, what in _RUN.items():
        own = lines if key != "data_sha256" else [line for line in lines if _used_a_text(line)]
        yield from _unequal(own, what, lambda line, key=key: line["provenance"].get(key))
    packages = dict.fromkeys(name for line in lines for name in line["provenance"].get("versions", {}))
    for name in packages:
        yield from _unequal(
            lines, f"versions of {name}", lambda line, name=name: line["provenance"].get("versions", {}).get(name)
        )


def _used_a_text(line: Line) -> bool:
    """Whether a text decided a result: lines without one do not differ in it from others."""
    provenance = line["provenance"]
    return provenance.get("data_sha256") is not None and bool(provenance.get("parameters", {}).get("text"))


def _unequal(lines: Sequence[Line], what: str, value: Callable[[Line], Any]) -> Iterable[str]:
    groups = _grouped(lines, lambda line: _text(value(line)))
    if len(groups) > 1:
        yield (
            f"Unequal {what}: "
            + "; ".join(f"{_short(one)} in {_places(own, lines)}" for one, own in groups.items())
            + "."
        )


def _configurations(lines: Sequence[Line]) -> Iterable[str]:
    for selector, own in _grouped(lines, lambda line: line["selector"]).items():
        configs = [group[0]["config"] for group in _grouped(own, lambda line: _text(line["config"])).values()]
        if len(configs) > 1:
            names = dict.fromkeys(name for config in configs for name in config)
            fields = [name for name in names if len({_text(config.get(name)) for config in configs}) > 1]
            yield f"Unequal configurations under the name {selector}: they differ in {_listed(fields)}."


def _uncommitted(lines: Sequence[Line]) -> Iterable[str]:
    commits = dict.fromkeys(str(line["provenance"].get("commit")) for line in lines)
    dirty = [_short(commit) for commit in commits if commit.endswith("-dirty")]
    if dirty:
        yield f"Measured with changes that were not committed ({_listed(dirty)}): which code ran is not known."


def _places(lines: Sequence[Line], every: Sequence[Line]) -> str:
    """Whose lines these are among `every`: tasks where all of a task's are, otherwise selectors."""
    chosen = {id(line) for line in lines}
    split = {line["task"] for line in every if id(line) not in chosen}
    tasks = _grouped(lines, lambda line: line["task"])
    return _listed([task if task not in split else f"{task} of {_selectors(own)}" for task, own in tasks.items()])


def _selectors(lines: Iterable[Line]) -> str:
    return _listed(list(dict.fromkeys(line["selector"] for line in lines)))


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST])
    if len(names) > _MOST:
        shown.append(f"{len(names) - _MOST} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _short(value: str) -> str:
    """Values as they are told apart, hashes by their beginning."""
    name, at, rest = value.rpartition("@")
    dirty = "-dirty" * rest.endswith("-dirty")
    rest = rest.removesuffix("-dirty").removeprefix("sha256:")
    if len(rest) >= 40 and all(char in "0123456789abcdef" for char in rest):
        rest = rest[:12]
    value = name + at + rest + dirty
    return value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, sort_keys=True)


def _grouped(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> dict[Any, list[Line]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups
