"""Measures a grid of selectors, contexts and documents, and takes up where an earlier run stopped."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from sparsesel.config import AnyConfig, BackendName, LayeredConfig, RunConfig, SelectorConfig
from sparsesel.errors import InputError
from sparsesel.eval import provenance
from sparsesel.eval.results import Point, ResultStore, check_folder, check_same, point_of
from sparsesel.eval.texts import Window, cut_windows, load_texts, place_of, texts_sha256
from sparsesel.hf.models import default_device, load_model, load_tokenizer, quiet, resolve, resolve_backend
from sparsesel.registry import registry

TASK = "perplexity"
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


class Run:
    """A perplexity run whose input has been checked and whose folder is held. A context manager.

    Args:
        config: What to measure.
        selectors: Resolved configuration of each of `config.selectors`, in order.
        out: Folder of the results.
        online: Whether the model may be downloaded.

    Attributes:
        config: The same with absolute paths and the backend that runs, as written to `config.json`.
        store: The results so far.

    Raises:
        InputError: Anything that cannot work. No model has been loaded by then.
    """

    def __init__(
        self, config: RunConfig, selectors: Mapping[str, AnyConfig], out: Path, *, online: bool = False
    ) -> None:
        # First what can be refused without loading transformers, which takes seconds.
        self._texts = load_texts(config.texts, config.skip_chars)
        check_folder(out)
        self._source = resolve(config.model, online=online)
        self._calibrations = {spec: _calibration_sha256(one) for spec, one in selectors.items()}
        self._size = max(config.contexts)
        limit = self._source.max_length
        if limit is not None and self._size > limit:
            raise InputError(
                "context",
                expected=f"at most {limit} tokens, the limit of {config.model}",
                got=self._size,
                remedy="Choose a smaller --context, or a model with a longer one.",
            )
        for one in selectors.values():
            self._source.check_selector(one)
        self._data = texts_sha256(self._texts)
        self._selectors = dict(selectors)
        self._device = default_device()
        self._dtype = str(self._source.dtype(self._device)).removeprefix("torch.")
        self._backend: BackendName = resolve_backend(config.backend, self._device)
        self.config = config.model_copy(
            update={
                "model": self._source.name,
                "texts": tuple(os.path.abspath(path) for path in config.texts),
                "backend": self._backend,
            }
        )
        self._documents = config.documents or 1
        self._bos_token_id: int | None = None
        self.store = ResultStore(out)
        try:
            check_same(self.store.lines, self._expected, out)
            known = {point_of(line) for line in self.store.lines}
            # Cut first: only texts that are long enough bound the number of points. That takes the tokenizer, which
            # a run without anything to measure does not need.
            complete = self._total <= len(known) and known.issuperset(self.points)
            self._windows = [] if complete else self._cut()
            self._pending = {} if complete else self._group(set(self.points) - known)
        except BaseException:
            self.store.close()
            raise

    @property
    def _total(self) -> int:
        return self._documents * len(self.config.contexts) * len(self._selectors)

    @property
    def points(self) -> list[Point]:
        """Every point of the grid, in the order in which they are measured."""
        return [
            Point(TASK, spec, context, document)
            for document in range(self._documents)
            for context in self.config.contexts
            for spec in self._selectors
        ]

    @property
    def done(self) -> int:
        """How many of them are on the disk."""
        return len(set(self.points) & {point_of(line) for line in self.store.lines})

    def measure(self, progress: Progress) -> None:
        """Measure every point that is not on the disk; without any, the model is not loaded.

        Raises:
            MeasurementError: A selector did not act, or the model's output is not finite.
            InputError: The model cannot be loaded or sparsified, or a result cannot be written.
        """
        if self.store.torn:
            progress.say(f"The last line of {self.store.folder} was incomplete; it was moved to results.jsonl.torn.")
        if not self._pending:
            return
        import torch

        from sparsesel.eval.perplexity import Prefilled

        self.store.write_beside("config.json", json.dumps(self.config.model_dump(mode="json"), indent=2) + "\n")
        total = len(self.points)
        if self.done:
            progress.say(f"{self.done} of {total} points are there already.")
        once = "" if self._source.is_prepared else ", unpacking its weights this first time"
        progress.say(f"Loading {self.config.model}{once} …")
        model = load_model(self._source, device=self._device)
        suffix = self.config.suffix
        progress.start(
            sum(self._prefill_units(context) + suffix * len(specs) for (_, context), specs in self._pending.items())
        )
        for (document, context), specs in self._pending.items():
            where = f"context {context}, document {document}"
            tokens = self._windows[document].tokens[:context]
            selectors = [self._selectors[spec] for spec in specs]
            progress.doing(f"prefill, {where}")
            torch.manual_seed(self.config.seed)
            with quiet():
                prefilled = Prefilled(model, torch.tensor(tokens), suffix, selectors, backend=self._backend)
            progress.advance(self._prefill_units(context))
            for index, spec in enumerate(specs):
                progress.doing(f"{spec}, {where}")
                torch.manual_seed(self.config.seed)
                with quiet():
                    metrics = prefilled.decode(index, advance=lambda: progress.advance(1))
                point = Point(TASK, spec, context, document)
                self.store.append(
                    {
                        **point._asdict(),
                        "metrics": metrics,
                        "config": self._selectors[spec].model_dump(mode="json"),
                        "provenance": self._provenance(model, point, tokens),
                    }
                )
                progress.measured(point, metrics, self.done, total)

    def close(self) -> None:
        """Let other processes have the folder."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill_units(self, context: int) -> float:
        return (context - self.config.suffix - 1) * _PREFILL_WEIGHT

    def _cut(self) -> list[Window]:
        tokenizer = load_tokenizer(self._source)
        self._bos_token_id = tokenizer.bos_token_id
        with quiet():
            return cut_windows(self._texts, tokenizer, size=self._size, documents=self._documents)

    def _group(self, points: set[Point]) -> dict[tuple[int, int], list[str]]:
        """The selectors that remain for each document and context: they share one prefill."""
        groups: dict[tuple[int, int], list[str]] = {}
        for point in self.points:
            if point in points:
                groups.setdefault((point.document, point.context), []).append(point.selector)
        return groups

    def _parameters(self, document: int) -> dict[str, Any]:
        file, start = place_of(document, len(self._texts), self._size)
        return {"suffix": self.config.suffix, "file": file, "start": start}

    def _expected(self, line: dict[str, Any]) -> dict[str, Any]:
        """What an earlier line must say for its folder to be continued by this run."""
        point = point_of(line)
        expected: dict[str, Any] = {
            "task": TASK,
            "provenance.model": self._source.identity,
            "provenance.data_sha256": self._data,
            "provenance.parameters.suffix": self.config.suffix,
            "provenance.dtype": self._dtype,
            "provenance.backend": self._backend,
            "provenance.device": self._device,
            "provenance.seed": self.config.seed,
        }
        if point.selector in self._selectors:
            expected["config"] = self._selectors[point.selector].model_dump(mode="json")
            if calibration := self._calibrations[point.selector]:
                expected["provenance.calibration_sha256"] = calibration
        # A longer largest context, or another number of files, moves the windows.
        parameters = self._parameters(point.document)
        expected["provenance.parameters.file"] = parameters["file"]
        expected["provenance.parameters.start"] = parameters["start"]
        return expected

    def _provenance(self, model: Any, point: Point, tokens: tuple[int, ...]) -> dict[str, Any]:
        bos = self._bos_token_id
        parameters = {
            **self._parameters(point.document),
            "skip_chars": self.config.skip_chars,
            "text": self._windows[point.document].file,
        }
        return {
            "model": self._source.identity,
            "backend": self._backend,
            "device": self._device,
            "device_name": provenance.device_name(model.device),
            "dtype": self._dtype,
            "parameters": parameters,
            "data_sha256": self._data,
            "calibration_sha256": self._calibrations[point.selector],
            "prompt_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "bos_count": tokens.count(bos) if bos is not None else 0,
            "truncation": "none",
            "seed": self.config.seed,
            "selector_from": _origins(self._selectors[point.selector]),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "time": provenance.now(),
        }


def _origins(config: AnyConfig) -> str:
    """Distributions and versions that a configuration's selectors come from."""
    plugins = [registry().get(one.name) for one in _configs(config)]
    return ", ".join(dict.fromkeys(f"{plugin.distribution} {plugin.version}" for plugin in plugins))


def _calibration_sha256(config: AnyConfig) -> str:
    """SHA-256 of the calibration files that a configuration's selectors read, empty if they read none.

    By convention the field `calibration` of a selector that can be calibrated names the file, or says how to do
    without one.
    """
    calibrated = [one for one in _configs(config) if registry().get(one.name).plugin.calibrate]
    paths = [Path(str(getattr(one, "calibration", ""))) for one in calibrated]
    return ", ".join(dict.fromkeys(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()))


def _configs(config: AnyConfig) -> Sequence[SelectorConfig]:
    """One configuration, or that of each range of layers."""
    return list(config.layers.values()) if isinstance(config, LayeredConfig) else [config]
