"""How long a token takes in the whole model, and how much of that is not attention.

What no memory holds is modelled: attention grows with the bytes that it reads, the rest of the model stays as it is.
"""

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from sparsesel.config import MAX_COUNT, TaskConfig
from sparsesel.errors import InputError
from sparsesel.eval.figures import Bars, Curves, Figure, Series
from sparsesel.eval.paths import Geometry, step_bytes
from sparsesel.eval.report import Line, Row, about, measured_on, reference_of, rows_by_context
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task
from sparsesel.eval.texts import cut_windows


class E2eConfig(TaskConfig):
    """What is decoded, and what is modelled."""

    steps: int = Field(
        default=32, ge=1, le=MAX_COUNT, description="Steps timed at the end of each context; their median counts."
    )
    warmup: int = Field(default=2, ge=0, le=MAX_COUNT, description="Steps before them, not timed.")
    prompt: Literal["random", "text"] = Field(
        default="random", description="What fills the context: random tokens, or the beginning of the first text."
    )
    modelled_contexts: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description="Contexts in tokens, beyond the memory for example, whose times are modelled from those measured.",
        json_schema_extra={"default": "none"},
    )

    @field_validator("modelled_contexts")
    @classmethod
    def _contexts_are_lengths(cls, contexts: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(contexts)) < len(contexts) or not all(1 <= context <= MAX_COUNT for context in contexts):
            raise ValueError(f"lengths from 1 to {MAX_COUNT}, each once")
        return tuple(sorted(contexts))


class E2e(Task[E2eConfig]):
    """One document at each context; the last step sees that many keys."""

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context."""
        decoded = self.config.steps + self.config.warmup
        if min(setting.contexts) < decoded + 2:
            raise InputError(
                "context",
                expected=f"at least {decoded + 2}: the steps, and a prompt",
                got=min(setting.contexts),
                remedy="Choose a larger --context, or fewer --steps.",
            )
        longest = max(setting.contexts)
        if self.config.modelled_contexts and min(self.config.modelled_contexts) <= longest:
            raise InputError(
                "modelled_contexts",
                expected=f"contexts beyond {longest}, the longest that is measured",
                got=min(self.config.modelled_contexts),
                remedy="Measure it instead, with --context.",
            )
        return [(context, 0) for context in setting.contexts]

    def steps(self, context: int, document: int) -> int:
        """Those timed and those before."""
        return self.config.steps + self.config.warmup

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """As many tokens as the context.

        Raises:
            InputError: The text is too short.
        """
        if self.config.prompt == "text":
            (window,) = cut_windows(setting.texts[:1], setting.tokenizer, size=max(setting.contexts), documents=1)
            tokens, text = window.tokens[:context], window.file
        else:
            generator = random.Random(f"{setting.seed} {context}")
            tokens, text = tuple(generator.choices(range(setting.model_config.vocab_size), k=context)), "random tokens"
        steps = self.steps(context, document)
        return Case(
            tokens=tokens,
            prefill=context - steps,
            steps=steps,
            details={"text": text},
            from_texts=self.config.prompt == "text",
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Decode the last tokens with each selector, teacher-forced.

        Raises:
            MeasurementError: A selector did not act in every step, layer and head.
            InputError: A selector leaves out layers, whose attention would not be told from the rest.
        """
        from sparsesel.eval.decode import clock
        from sparsesel.eval.timed import Timed

        geometry = Geometry.of(bench.model.config, str(bench.model.dtype).removeprefix("torch."))
        layers = geometry.specs()
        watch = clock(bench.model.device)
        tokens = bench.tensor(case.tokens)
        prefill = bench.prefill(tokens[: case.prefill], specs, wrap=lambda selector: Timed(selector, watch))
        done = 0
        for spec in specs:
            with prefill.decoder(spec) as decoder:
                if len(decoder.session.selectors) < len(layers):
                    raise InputError(
                        "selectors",
                        expected="a selector in every layer that attends to the whole context",
                        got=f"{spec}, which serves {len(decoder.session.selectors)} of {len(layers)} layers",
                        remedy='Name "full" for the others.',
                    )
                for token in tokens[case.prefill :]:
                    decoder.step(token)
                known = decoder.metrics()
                whole = [1000 * taken for taken in decoder.seconds()]
            taken = watch.seconds()[done:]
            done += len(taken)
            attention = [1000 * sum(taken[step * len(layers) : (step + 1) * len(layers)]) for step in range(len(whole))]
            yield spec, {**known, **self._times(whole, attention), **self._bytes(bench, spec, layers, known)}

    def _times(self, whole: Sequence[float], attention: Sequence[float]) -> dict[str, Any]:
        """Medians over the steps after the warm-up."""
        pairs = list(zip(whole, attention, strict=True))[self.config.warmup :]
        rest = statistics.median(total - part for total, part in pairs)
        total = statistics.median(total for total, _ in pairs)
        return {
            "ms_per_token": total,
            "attention_ms": statistics.median(part for _, part in pairs),
            "non_attention_ms": rest,
            "non_attention_share": rest / total,
        }

    def _bytes(self, bench: Bench, spec: str, layers: Sequence[Any], known: Mapping[str, Any]) -> dict[str, Any]:
        """What attention reads by design at the modelled contexts, with the paths that were taken."""
        config = bench.selectors[spec]
        modelled = self.config.modelled_contexts
        return {
            "modelled_contexts": list(modelled),
            "modelled_bytes": [step_bytes(config, layers, each, known) for each in modelled],
        }

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """Times and shares at each context measured; those modelled from the longest; both against context."""
        if not lines:
            return []
        by_context = rows_by_context(lines)
        tables = [_measured(context, rows) for context, rows in by_context.items()]
        models = _models(by_context)
        tables += _modelled(by_context, models)
        caption = _where(lines)
        notes = (caption, _NOTE, *_unmodelled(by_context, models))
        figures: list[Figure] = [
            *_curves(by_context, models, caption),
            *(_bars(c, rows, caption) for c, rows in by_context.items()),
        ]
        return [Section("Whole-model decoding", tables, about(lines), notes, figures)]


_NOTE = (
    "ms per token: median of steps of the whole model; attention: the part of it in which selectors find and read "
    "what they attend to, over all layers that attend to the whole context; outside attention: everything else, "
    "projections, MLPs, the output and, of the host, launching. MB modelled: what attention reads by design. "
    "Modelled contexts: outside attention as at the longest context measured; attention by the bytes that it reads "
    "there, with the same shares of paths and candidates, along the line through times and bytes of the two longest"
    " contexts measured; where one alone was measured, in proportion to bytes. An extrapolation, not a measurement."
)


@dataclass(frozen=True)
class Modelled:
    """What is modelled of one selector.

    Attributes:
        times: Context to (ms per token, share outside attention).
        problem: Why there are none, empty otherwise.
    """

    times: Mapping[int, tuple[float, float]]
    problem: str = ""


def modelled(measured: Mapping[int, Row], contexts: Sequence[int]) -> Modelled:
    """Times of one selector at the contexts that its longest one names, each in the same way as every selector's.

    Args:
        measured: Its row at each context measured.
        contexts: The longest two contexts that any selector was measured at, or the only one; ascending.
    """
    if missing := [context for context in contexts if context not in measured]:
        return Modelled({}, f"it was not measured at context {missing[0]}")
    rows = [measured[context] for context in contexts]
    last = next(iter(rows[-1].lines.values()))["metrics"]
    points = [(row.step_bytes, row.mean("attention_ms")) for row in rows]
    known = [(read, taken) for read, taken in points if read is not None and taken is not None]
    if not last["modelled_contexts"]:
        return Modelled({})
    if len(known) < len(points):
        return Modelled({}, "its cost is not known")
    fixed, slope = 0.0, known[-1][1] / known[-1][0]
    if len(known) > 1:
        (less, sooner), (read, taken) = known
        if less == read and set(last["modelled_bytes"]) == {read}:  # it reads as much at any length
            fixed, slope = taken, 0.0
        elif less >= read or sooner >= taken:
            what = "read no more" if less >= read else "took no longer"
            return Modelled({}, f"context {contexts[-1]} {what} than context {contexts[0]}")
        else:
            slope = (taken - sooner) / (read - less)
            fixed = taken - slope * read
            if fixed < 0:
                return Modelled({}, "the line through its times would begin below 0")
    found: dict[int, tuple[float, float]] = {}
    for context, read in zip(last["modelled_contexts"], last["modelled_bytes"], strict=True):
        total = last["non_attention_ms"] + fixed + slope * read
        found[context] = (total, last["non_attention_ms"] / total)
    return Modelled(found)


def _unmodelled(by_context: Mapping[int, Sequence[Row]], models: Mapping[str, Modelled]) -> list[str]:
    """Which selectors are not modelled, and why."""
    found = [f"{name}: {one.problem}" for name, one in models.items() if one.problem and not one.times]
    if not found or not any(row.values("modelled_contexts") for rows in by_context.values() for row in rows):
        return []
    return [f"Not modelled, {'; '.join(found)}. Measure longer contexts, or more --steps."]


def _models(by_context: Mapping[int, Sequence[Row]]) -> dict[str, Modelled]:
    """What is modelled of each selector measured."""
    contexts = sorted(by_context)[-2:]
    return {name: modelled(rows, contexts) for name, rows in _by_selector(by_context).items()}


def _where(lines: Sequence[Line]) -> str:
    places, eager = measured_on(lines, "device_name")
    return (
        f"Measured: {places}"
        + ", which tells how long these PyTorch operations take and is no measure of a kernel's speed" * eager
        + "."
    )


def _ratios(rows: Sequence[Row], values: Sequence[float | None], name: str) -> list[float | None]:
    """A reference's value over each row's."""
    by_spec = {row.selector: value for row, value in zip(rows, values, strict=True)}
    found: list[float | None] = []
    for row, own in zip(rows, values, strict=True):
        reference = reference_of(row, rows, name)
        other = by_spec[reference.selector] if reference is not None else None
        found.append(other / own if own and other else None)
    return found


def _measured(context: int, rows: Sequence[Row]) -> Table:
    times = [row.mean("ms_per_token") for row in rows]
    return Table(
        f"One token, context {context}, measured",
        [row.selector for row in rows],
        [
            Column("ms per\ntoken", times, 2, better="less"),
            Column("attention\nms", [row.mean("attention_ms") for row in rows], 2, better="less"),
            Column("outside\nattention", [row.mean("non_attention_share") for row in rows], 1, percent=True),
            Column("×exact", _ratios(rows, times, "exact_topk"), 2, better="more"),
            Column("×full", _ratios(rows, times, "full"), 2, better="more"),
            Column("exact", [row.mean("exact_share") for row in rows], 1, percent=True, detail=True),
            Column("candi-\ndates", [row.candidates for row in rows], 1, detail=True),
            Column("MB\nmodelled", [None if (read := row.step_bytes) is None else read / 1e6 for row in rows], 2),
        ],
        sum(row.is_reference for row in rows),
    )


def _by_selector(by_context: Mapping[int, Sequence[Row]]) -> dict[str, dict[int, Row]]:
    """Each selector's row at each context that it was measured at."""
    found: dict[str, dict[int, Row]] = {}
    for context, rows in by_context.items():
        for row in rows:
            found.setdefault(row.selector, {})[context] = row
    return found


def _modelled(by_context: Mapping[int, Sequence[Row]], models: Mapping[str, Modelled]) -> list[Table]:
    """One table for each context modelled."""
    rows = by_context[max(by_context)]
    results = [models[row.selector].times for row in rows]
    how = "along the line through two contexts" if len(by_context) > 1 else "in proportion to bytes"
    tables: list[Table] = []
    for context in sorted({context for result in results for context in result}):
        times = [result[context][0] if context in result else None for result in results]
        shares = [result[context][1] if context in result else None for result in results]
        tables.append(
            Table(
                f"One token, context {context}, modelled {how}",
                [row.selector for row in rows],
                [
                    Column("ms per\ntoken", times, 2, better="less"),
                    Column("outside\nattention", shares, 1, percent=True),
                    Column("×exact", _ratios(rows, times, "exact_topk"), 2, better="more"),
                    Column("×full", _ratios(rows, times, "full"), 2, better="more"),
                ],
                sum(row.is_reference for row in rows),
            )
        )
    return tables


def _curves(by_context: Mapping[int, Sequence[Row]], models: Mapping[str, Modelled], caption: str) -> list[Figure]:
    """Time and share outside attention, what is measured and, by a name that says so, what is modelled."""
    times: list[Series] = []
    shares: list[Series] = []
    for name, own in _by_selector(by_context).items():
        measured = [
            (context, row.mean("ms_per_token"), row.mean("non_attention_share")) for context, row in own.items()
        ]
        beyond = [(context, *pair) for context, pair in models[name].times.items()]
        curves = [(name, measured)] + [(f"{name} (modelled)", [measured[-1], *beyond])] * bool(beyond)
        for label, points in curves:
            places = [context for context, _, _ in points]
            times.append(Series(label, places, [total for _, total, _ in points]))
            shares.append(Series(label, places, [share for _, _, share in points]))
    if all(len(series.x) < 2 for series in times):
        return []
    label = "context (tokens)"
    text = f"{caption} Beyond {max(by_context)} tokens modelled, where a curve says so."
    return [
        Curves("Token against context", label, "ms per token", times, log_x=True, log_y=True, caption=text),
        Curves("Outside attention", label, "share of a token's time", shares, log_x=True, caption=text),
    ]


def _bars(context: int, rows: Sequence[Row], caption: str) -> Bars:
    return Bars(
        f"One token, context {context}",
        "ms per token",
        [row.selector for row in rows],
        [
            ("attention", [row.mean("attention_ms") or 0.0 for row in rows]),
            ("outside attention", [row.mean("non_attention_ms") or 0.0 for row in rows]),
        ],
        caption=caption,
    )
