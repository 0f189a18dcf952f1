"""Measures a grid of tasks, selectors, contexts and documents, and takes up where an earlier run stopped."""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from sparsesel.config import AnyConfig, BackendName, LayeredConfig, RunConfig, SelectorConfig
from sparsesel.errors import InputError
from sparsesel.eval import provenance, run_file
from sparsesel.eval.cost import model_cost
from sparsesel.eval.line import NoResultError, Point, point_of
from sparsesel.eval.results import ResultStore, check_folder, check_same, read_results
from sparsesel.eval.selectors import CALIBRATION
from sparsesel.eval.sharding import Shard, merge
from sparsesel.eval.task import Case, Task
from sparsesel.eval.texts import Text, load_texts, texts_sha256
from sparsesel.hf.models import (
    ModelSource,
    default_device,
    load_model,
    load_tokenizer,
    quiet,
    resolve,
    resolve_backend,
)
from sparsesel.registry import registry

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.decode import Prefill
    from sparsesel.hf.inject import Selection
    from sparsesel.selector import Selector

_PREFILL_WEIGHT = 0.05  # decode steps that one token of prefill is worth, for the time left only


class Progress(Protocol):
    """Is told how far a run is."""

    def say(self, text: str) -> None:
        """Something worth a line."""
        ...

    def start(self, units: float) -> None:
        """The work begins; it is `units` long."""
        ...

    def doing(self, text: str) -> None:
        """What is being done now."""
        ...

    def advance(self, units: float) -> None:
        """That much of it is done."""
        ...

    def measured(self, point: Point, metrics: Mapping[str, Any], done: int, total: int) -> None:
        """A point was measured and is on the disk."""
        ...


@dataclass(frozen=True)
class Group:
    """Selectors that share one case."""

    task: str
    context: int
    document: int
    specs: tuple[str, ...]

    @property
    def points(self) -> list[Point]:
        """One for each selector."""
        return [Point(self.task, spec, self.context, self.document) for spec in self.specs]


class RunSetting:
    """What tasks are given before any model is loaded; see `sparsesel.eval.task.Setting`."""

    def __init__(self, config: RunConfig, texts: Sequence[Text], source: ModelSource, *, online: bool) -> None:
        self.contexts = config.contexts
        self.seed = config.seed
        self.online = online
        self.texts = texts
        self._source = source

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's, loaded now."""
        with quiet():
            return load_tokenizer(self._source)

    @property
    def model_config(self) -> Any:
        """The model's."""
        return self._source.config.get_text_config(decoder=True)


class Run:
    """A run whose input has been checked and whose folder is held. A context manager.

    Args:
        config: What to measure.
        selectors: Resolved configuration of each of `config.selectors`, in order.
        out: Folder of the results.
        online: Whether the model, and a task's data, may be downloaded.
        shard: This process among those of the run; by default what torchrun says.

    Attributes:
        config: The same with absolute paths, the backend that runs and every field of its tasks, as written to
            `config.json`.
        points: Every point of the grid, in the order in which they are measured.
        store: The results so far; of a process that is not the first, its own.
        shard: This process.

    Raises:
        InputError: Anything that cannot work. No model has been loaded by then.
    """

    def __init__(
        self,
        config: RunConfig,
        selectors: Mapping[str, AnyConfig],
        out: Path,
        *,
        online: bool = False,
        shard: Shard | None = None,
    ) -> None:
        # First what can be refused without loading transformers, which takes seconds.
        self.shard = shard or Shard.from_environment()
        texts = load_texts(config.texts, config.skip_chars)
        check_folder(out)
        self._tasks = {name: registry().make_task(name, fields) for name, fields in config.tasks.items()}
        self._given = dict(selectors)
        self._selectors: dict[str, dict[str, AnyConfig]] = {}
        for name, task in self._tasks.items():
            with self._naming(name):
                self._selectors[name] = dict(task.selectors(self._given))
        self._source = resolve(config.model, online=online)
        limit = self._source.max_length
        reached = any(task.needs_model for task in self._tasks.values())
        if reached and limit is not None and max(config.contexts) > limit:
            raise InputError(
                "context",
                expected=f"at most {limit} tokens, the limit of {config.model}",
                got=max(config.contexts),
                remedy="Choose a smaller --context, or a model with a longer one.",
            )
        every = {str(one): one for chosen in self._selectors.values() for one in chosen.values()}
        for one in every.values():
            self._source.check_selector(one)
        self._calibrations = {str(one): _calibration_sha256(one) for one in (*every.values(), *selectors.values())}
        self._data = texts_sha256(texts)
        self._setting = RunSetting(config, texts, self._source, online=online)
        groups: list[Group] = []
        for name, task in self._tasks.items():
            with self._naming(name):
                specs = tuple(self._selectors[name])
                groups += [Group(name, *place, specs) for place in task.points(self._setting)]
        self.points = [point for group in groups for point in group.points]
        self.shard.join()
        self._device = default_device()
        self._dtype = str(self._source.dtype(self._device)).removeprefix("torch.")
        self._backend: BackendName = resolve_backend(config.backend, self._device)
        self.config = run_file.portable(config).model_copy(
            update={
                "model": self._source.name,
                "texts": tuple(os.path.abspath(path) for path in config.texts),
                "backend": self._backend,
                "tasks": {name: task.config.model_dump(mode="json") for name, task in self._tasks.items()},
            }
        )
        self._own: ResultStore | None = None
        if self.shard.is_first:
            self.store = ResultStore(out)
        else:
            self.shard.barrier()  # the first one holds the folder and has merged what was there
            self.store = ResultStore(out, self.shard.file)
        try:
            self._pending = self._continue(groups, out)
            self._check_cases()
        except BaseException:
            self.close()
            raise

    def _continue(self, groups: Sequence[Group], out: Path) -> list[Group]:
        """What this process is to measure, after what is there."""
        if self.shard.is_first:
            self.merged = merge(self.store, self._order)
            check_same(self.store.lines, self._expected, out)
            self.shard.barrier()
            if self.shard.world > 1:
                self._own = ResultStore(out, self.shard.file)
            lines = self.store.lines
        else:
            lines = read_results(out)
        self._known = {point_of(line) for line in lines}
        remaining = [
            Group(g.task, g.context, g.document, tuple(p.selector for p in g.points if p not in self._known))
            for g in groups
        ]
        self._open = any(group.specs for group in remaining)
        return self.shard.share([group for group in remaining if group.specs], self._units)

    def _check_cases(self) -> None:
        """Refuse what cannot be prepared: the first case of each task and context stands for the others."""
        checked: set[tuple[str, int]] = set()
        for group in self._pending:
            if (group.task, group.context) not in checked:
                checked.add((group.task, group.context))
                self._prepare(group)

    @property
    def done(self) -> int:
        """How many points are on the disk, as far as this process knows."""
        return len(set(self.points) & (self._known | {point_of(line) for line in self._target.lines}))

    @property
    def newest(self) -> dict[str, Any]:
        """The line that this process wrote last."""
        return self._target.lines[-1]

    def measure(self, progress: Progress) -> None:
        """Measure every point that is not on the disk; without any, the model is not loaded.

        Of several processes, each measures its share; the first one returns when all have, with the results merged.

        Raises:
            MeasurementError: A selector did not act, or the model's output is not finite.
            InputError: The model cannot be loaded or sparsified, or a result cannot be written.
        """
        if self.store.torn:
            progress.say(f"The last line of {self.store.folder} was incomplete; it was moved to results.jsonl.torn.")
        if self.shard.is_first and self._open:
            run_file.write(self.store, self.config)
        if self._pending:
            self._measure(progress)
        if self.shard.world > 1:
            self._target.close()  # before the first one takes it up
            self.shard.barrier()
            if self._own is not None:
                merge(self.store, self._order)
            self.shard.barrier()

    def _measure(self, progress: Progress) -> None:
        import torch

        total = len(self._known & set(self.points)) + sum(len(group.specs) for group in self._pending)
        if self.done:
            progress.say(f"{self.done} of {len(self.points)} points are there already.")
        model = None
        if any(self._tasks[group.task].needs_model for group in self._pending):
            once = "" if self._source.is_prepared else ", unpacking its weights this first time"
            progress.say(f"Loading {self.config.model}{once} …")
            model = load_model(self._source, device=self._device)
        progress.start(sum(map(self._units, self._pending)))
        meter = _Meter(progress)
        for group in self._pending:
            case = self._prepare(group)
            where = f"{group.task}, context {group.context}, document {group.document}"
            bench = RunBench(
                model=model,
                tokenizer=None if model is None else self._setting.tokenizer,
                selectors=self._selectors[group.task],
                device=self._device,
                backend=self._backend,
                seed=self.config.seed,
                meter=meter,
                doing=lambda text, where=where: progress.doing(f"{text}, {where}"),
            )
            steps = self._tasks[group.task].steps(group.context, group.document)
            meter.begin(self._units(group))
            waiting = list(group.specs)
            torch.manual_seed(self.config.seed)
            with quiet(), torch.no_grad():
                for spec, metrics in self._tasks[group.task].measure(bench, case, group.specs):
                    waiting.remove(spec)
                    point = Point(group.task, spec, group.context, group.document)
                    self._append(point, metrics, case, model)
                    meter.leave(len(waiting) * steps)
                    progress.measured(point, metrics, self.done, total)
            if waiting:
                from sparsesel.eval.decode import MeasurementError

                raise MeasurementError(f"task {group.task} gave no result for {', '.join(waiting)} at {where}")
            meter.leave(0)

    def close(self) -> None:
        """Let other processes have the folder."""
        self._target.close()
        self.store.close()
        self.shard.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _target(self) -> ResultStore:
        """Where this process writes."""
        return self.store if self._own is None else self._own

    @functools.cached_property
    def _order(self) -> dict[Point, int]:
        return {point: place for place, point in enumerate(self.points)}

    @contextlib.contextmanager
    def _naming(self, task: str) -> Iterator[None]:
        """Let what a task refuses say which of several refused it."""
        try:
            yield
        except InputError as error:
            if len(self._tasks) == 1:
                raise
            raise error.within(f"task {task}") from error

    def _prepare(self, group: Group) -> Case:
        with quiet(), self._naming(group.task):
            return self._tasks[group.task].prepare(self._setting, group.context, group.document)

    def _units(self, group: Group) -> float:
        """How long a group takes, in decode steps."""
        steps = self._tasks[group.task].steps(group.context, group.document)
        return _PREFILL_WEIGHT * max(0, group.context - steps) + steps * len(group.specs)

    def _parameters(self, task: "Task[Any]", context: int, document: int) -> dict[str, Any]:
        """As they come back from a line."""
        return json.loads(json.dumps(dict(task.parameters(self._setting, context, document))))

    def _expected(self, line: dict[str, Any]) -> dict[str, Any]:
        """What an earlier line must say for its folder to be continued by this run."""
        point = point_of(line)
        expected: dict[str, Any] = {
            "provenance.model": self._source.identity,
            "provenance.dtype": self._dtype,
            "provenance.backend": self._backend,
            "provenance.device": self._device,
            "provenance.seed": self.config.seed,
        }
        if line["provenance"].get("data_sha256") is not None:  # otherwise no text was used
            expected["provenance.data_sha256"] = self._data
        task, selectors = self._tasks.get(point.task), self._selectors.get(point.task, self._given)
        if point.selector in selectors:
            config = selectors[point.selector]
            expected["config"] = config.model_dump(mode="json")
            if calibration := self._calibrations[str(config)]:
                expected["provenance.calibration_sha256"] = calibration
                if line["provenance"].get("calibration_sha256") == calibration:  # whatever the file's path is
                    expected["config"] = _calibrated_as(expected["config"], line["config"])
        if task is not None:
            parameters = self._parameters(task, point.context, point.document)
            expected |= {f"provenance.parameters.{name}": value for name, value in parameters.items()}
        return expected

    def _append(self, point: Point, metrics: Mapping[str, Any], case: Case, model: Any) -> None:
        config = self._selectors[point.task][point.selector]
        line = {
            **point._asdict(),
            "metrics": dict(metrics),
            "config": config.model_dump(mode="json"),
            "provenance": self._provenance(point, metrics, case, config, model),
        }
        try:
            self._target.append(line)
        except NoResultError as error:
            from sparsesel.eval.decode import MeasurementError

            raise MeasurementError(f"{point.task} with {point.selector} gave no result: {error}") from error

    @staticmethod
    def _cost(model: Any, config: AnyConfig, context: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What the selector's own account says of a step; it is no part of what is measured, so it stops nothing."""
        try:
            return model_cost(model, config, context, metrics)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _provenance(
        self, point: Point, metrics: Mapping[str, Any], case: Case, config: AnyConfig, model: Any
    ) -> dict[str, Any]:
        bos = self._setting.tokenizer.bos_token_id if case.tokens else None
        task = registry().get_task(point.task)
        parameters = {
            **self._parameters(self._tasks[point.task], point.context, point.document),
            "skip_chars": self.config.skip_chars,
            **case.details,
        }
        return {
            "model": self._source.identity,
            "backend": self._backend,
            "device": self._device,
            "device_name": provenance.device_name(self._device),
            "dtype": self._dtype,
            "parameters": parameters,
            "data_sha256": self._data if case.from_texts else None,
            "calibration_sha256": self._calibrations[str(config)],
            "cost": None if model is None else self._cost(model, config, point.context, metrics),
            "prompt_sha256": hashlib.sha256(json.dumps(case.tokens).encode()).hexdigest(),
            "bos_count": case.tokens.count(bos) if bos is not None else 0,
            "truncation": case.truncation,
            "seed": self.config.seed,
            "selector_from": _origins(config),
            "task_from": f"{task.distribution} {task.version}",
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "time": provenance.now(),
        }


class RunBench:
    """The model as a task sees it; see `sparsesel.eval.task.Bench`."""

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        selectors: Mapping[str, AnyConfig],
        device: str,
        backend: BackendName,
        seed: int,
        meter: "_Meter",
        doing: Callable[[str], None],
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.selectors = selectors
        self.device = device
        self.backend: BackendName = backend
        self.seed = seed
        self._meter = meter
        self._doing = doing

    def doing(self, text: str) -> None:
        """Say what is being done now."""
        self._doing(text)

    def advance(self, units: float = 1) -> None:
        """Say that decode steps were done."""
        self._meter.advance(units)

    def tensor(self, tokens: Sequence[int]) -> "Tensor":
        """Tokens as `[T]` int64 on the model's device."""
        import torch

        return torch.tensor(tokens, device=self.model.device)

    def prefill(
        self,
        tokens: "Sequence[int] | Tensor",
        specs: Iterable[str],
        *,
        wrap: "Callable[[Selector], Selector] | None" = None,
    ) -> "Prefill":
        """Prefill `[P]` tokens densely, once for all of `specs`, each layer's selector in what `wrap` makes of it."""
        import torch

        from sparsesel.eval.decode import Prefill
        from sparsesel.hf.inject import selectors_by_layer

        self.doing("prefill")
        selectors: dict[str, Selection] = {spec: self.selectors[spec] for spec in specs}
        if wrap is not None:
            by_layer = {spec: selectors_by_layer(self.model, selector) for spec, selector in selectors.items()}
            selectors = {spec: {i: wrap(one) for i, one in chosen.items()} for spec, chosen in by_layer.items()}
        prefill = Prefill(
            self.model,
            torch.as_tensor(tokens, dtype=torch.int64),
            selectors,
            backend=self.backend,
            seed=self.seed,
            advance=self.advance,
            begin=self.doing,
        )
        self.advance(_PREFILL_WEIGHT * prefill.length)
        return prefill


class _Meter:
    """Keeps what tasks say of their progress within what was announced."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._left = 0.0

    def begin(self, units: float) -> None:
        """A group begins, `units` long."""
        self._left = units

    def advance(self, units: float = 1) -> None:
        """That much of it is done."""
        units = min(units, self._left)
        self._left -= units
        self._progress.advance(units)

    def leave(self, units: float) -> None:
        """No more than that is left of it."""
        self.advance(max(0.0, self._left - units))


def _origins(config: AnyConfig) -> str:
    """Distributions and versions that a configuration's selectors come from."""
    plugins = [registry().get(one.name) for one in _configs(config)]
    return ", ".join(dict.fromkeys(f"{plugin.distribution} {plugin.version}" for plugin in plugins))


def _calibrated_as(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that names its calibration as another does, in each range of layers."""
    if "layers" in config:
        known = other.get("layers") or {}
        return {"layers": {key: _calibrated_as(one, known.get(key, {})) for key, one in config["layers"].items()}}
    return {name: other.get(name) if name == CALIBRATION else value for name, value in config.items()}


def _calibration_sha256(config: AnyConfig) -> str:
    """SHA-256 of the calibration files that a configuration's selectors read, empty if they read none.

    By convention the field `calibration` names the file, or says how to do without one.
    """
    calibrated = [one for one in _configs(config) if registry().get(one.name).plugin.calibrate]
    paths = [Path(str(getattr(one, CALIBRATION, ""))) for one in calibrated]
    return ", ".join(dict.fromkeys(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()))


def _configs(config: AnyConfig) -> Sequence[SelectorConfig]:
    """One configuration, or that of each range of layers."""
    return list(config.layers.values()) if isinstance(config, LayeredConfig) else [config]
