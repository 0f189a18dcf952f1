"""Evaluation from Python: `sparsesel.eval.run`."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparsesel.config import RunConfig, build
from sparsesel.errors import InputError
from sparsesel.eval.line import Point
from sparsesel.eval.progress import Silent
from sparsesel.eval.report import report
from sparsesel.eval.runner import Progress, Run
from sparsesel.eval.selectors import needs_selectors, resolve_selectors
from sparsesel.eval.tables import Section


@dataclass(frozen=True)
class Result:
    """One measured point, as a line of `results.jsonl` has it."""

    task: str
    selector: str
    context: int
    document: int
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """What a run measured.

    Attributes:
        lines: Every line of the folder, in the order measured.
    """

    lines: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[Result]:
        return map(_result, self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def report(self) -> list[Section]:
        """The tables that the command line shows."""
        return report(self.lines)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row for each point: what it is about, every metric, every parameter of the task.

        Raises:
            InputError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError(
                "to_pandas", expected="the package pandas", got="none", remedy="Run `pip install pandas`."
            ) from None
        rows = [
            {
                **{f"parameters.{name}": value for name, value in result.provenance["parameters"].items()},
                "task": result.task,
                "selector": result.selector,
                "context": result.context,
                "document": result.document,
                **result.metrics,
            }
            for result in self
        ]
        first = ["task", "selector", "context", "document"]
        frame = pandas.DataFrame(rows)
        return frame[first + [name for name in frame.columns if name not in first]] if rows else frame


def run(
    task: str | Mapping[str, Mapping[str, Any]],
    model: str,
    selectors: str | Iterable[str] = (),
    *,
    contexts: int | Iterable[int] = (2048,),
    set: Mapping[str, Any] | None = None,
    texts: str | Path | Iterable[str | Path] = (),
    skip_chars: int = 0,
    seed: int = 0,
    backend: str = "auto",
    out: str | Path | None = None,
    online: bool = False,
    progress: Progress | None = None,
    on_result: Callable[[Result], object] | None = None,
    **fields: Any,
) -> Results:
    """Measure selectors, as `sparsesel eval` does.

    Args:
        task: A task's name, or several names with the fields of each.
        model: `smollm2-135m`, a local folder or a Hub id.
        selectors: Specs: `"retopk:quality,topk=128"` or a file; one or several. None where the task needs none.
        contexts: Tokens that a task may fill; one length or several.
        set: Fields for every selector that has them.
        texts: UTF-8 text files, one or several; without any, Python's language reference.
        skip_chars: Characters left out at the beginning of each text.
        seed: Of torch's generator and of tasks.
        backend: What runs the selectors.
        out: Folder of the results, with which a run can be resumed; by default they are only returned.
        online: Whether the model, and a task's data, may be downloaded.
        progress: Is told how far the run is.
        on_result: Is given each result as it is measured.
        fields: Fields of the task, if it is one.

    Raises:
        InputError: Anything that cannot work.
        MeasurementError: A selector did not act, or what was measured is no number.
    """
    if not isinstance(task, str) and fields:
        raise InputError(
            next(iter(fields)),
            expected="fields within the mapping of tasks",
            got="fields beside it",
            remedy='Write {"perplexity": {"suffix": 256}}.',
        )
    config = build(
        RunConfig,
        {
            "model": model,
            "selectors": _several(selectors, str, "selectors", 'a spec, or a list of them such as ["full", "retopk"]'),
            "set": dict(set or {}),
            "contexts": _several(
                contexts, int, "contexts", "a number of tokens, or a list of them such as [1024, 2048]"
            ),
            "texts": tuple(map(str, _several(texts, (str, Path), "texts", "a text file, or a list of them"))),
            "skip_chars": skip_chars,
            "seed": seed,
            "backend": backend,
            "tasks": {task: fields} if isinstance(task, str) else {name: dict(own) for name, own in task.items()},
        },
        where="run",
    )
    resolved = resolve_selectors(
        config.selectors, config.set, required=needs_selectors(config.tasks), names=config.names
    )
    with contextlib.ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measuring = stack.enter_context(Run(config, resolved, folder, online=online))
        measuring.measure(_Told(progress or Silent(), measuring, on_result))
        return Results(list(measuring.store.lines))


ValueT = TypeVar("ValueT")


def _several(
    values: ValueT | Iterable[ValueT], kind: type | tuple[type, ...], field: str, expected: str
) -> tuple[ValueT, ...]:
    """One value or several, as several.

    Raises:
        InputError: Something else.
    """
    several = (values,) if isinstance(values, kind) else values
    if not isinstance(several, Iterable) or isinstance(several, bytes):
        raise InputError(field, expected=expected, got=repr(values), remedy="Give one, or a list of several.")
    found = tuple(several)
    for one in found:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise InputError(field, expected=expected, got=repr(one), remedy="Give one, or a list of several.")
    return found  # pyright: ignore[reportReturnType]


def _result(line: Mapping[str, Any]) -> Result:
    return Result(**{each.name: line[each.name] for each in dataclasses.fields(Result)})


class _Told:
    """Progress that also hands on each result."""

    def __init__(self, progress: Progress, measuring: Run, on_result: Callable[[Result], object] | None) -> None:
        self._run = measuring
        self._progress = progress
        self._on_result = on_result
        self.say = progress.say
        self.start = progress.start
        self.doing = progress.doing
        self.advance = progress.advance

    def measured(self, point: Point, metrics: Mapping[str, Any], done: int, total: int) -> None:
        self._progress.measured(point, metrics, done, total)
        if self._on_result is not None:
            self._on_result(_result(self._run.newest))
