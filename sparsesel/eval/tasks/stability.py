"""Stability: whether reusing what was reused before drifts over thousands of tokens, and what refreshing does for it.

After one long dense prefill each selector decodes the text's next tokens (teacher-forced), which gives its perplexity
by position beside that of exact top-K at the same budget. Then it decodes its own greedy choices, and exact top-K
consumes the same tokens after the same prefill, as a shadow: how far apart their next-token distributions are, by
position. Each selector that has the field is measured with several values of it.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsesel.config import MAX_COUNT, AnyConfig, LayeredConfig, TaskConfig, unknown_name
from sparsesel.errors import InputError
from sparsesel.eval.figures import Curves, Series
from sparsesel.eval.report import (
    Line,
    Row,
    about,
    budget_of,
    rankable,
    reference_of,
    rows_by_context,
    work_columns,
    work_note,
)
from sparsesel.eval.sweep import changed, varied
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task
from sparsesel.eval.tasks.perplexity import Perplexity, PerplexityConfig, perplexity, ratio
from sparsesel.registry import make_config

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.decode import Prefill

_EXACT = "exact_topk"
_LARGEST_NLL = math.log(sys.float_info.max)  # per token; a perplexity beyond is no number


class StabilityConfig(TaskConfig):
    """How long to decode, and which field to vary."""

    steps: int = Field(
        default=1024, ge=2, le=MAX_COUNT, description="Tokens decoded at the end of each context, twice."
    )
    documents: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Documents, taken from the texts in turn.",
        json_schema_extra={"default": "one of each text"},
    )
    bin_size: int = Field(
        default=64, ge=1, le=MAX_COUNT, description="Decode steps whose mean is one place of a curve."
    )
    field: str = Field(
        default="refresh_interval", description="Field to vary in every selector that has it; empty: none."
    )
    values: tuple[bool | int | float | str, ...] = Field(
        default=(0, 32, 128, 512), strict=False, min_length=1, description="Values that it takes in turn."
    )


class Stability(Task[StabilityConfig]):
    """Windows as those of `perplexity`, whose last `steps` tokens are decoded."""

    def __init__(self, config: StabilityConfig) -> None:
        super().__init__(config)
        self._windows = Perplexity(PerplexityConfig(suffix=config.steps, documents=config.documents))

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Exact top-K at each budget where it is not named, then variants of those that have the field, others once.

        Raises:
            InputError: A field other than the default that none of them has, or a value that one refuses.
        """
        field = self.config.field
        known = {name for config in given.values() if not isinstance(config, LayeredConfig) for name in _fields(config)}
        if field and field not in known and field != StabilityConfig.model_fields["field"].default:
            raise unknown_name("field", field, known, what="field")
        chosen: dict[str, AnyConfig] = {}
        for spec, config in given.items():
            if isinstance(config, LayeredConfig) or field not in _fields(config):
                chosen[spec] = config
                continue
            for value in self.config.values:
                variant = changed(config, field, value)
                if variant not in chosen.values():
                    chosen[varied(spec, field, value)] = variant
        budgets = dict.fromkeys(budget_of(config.model_dump()) for config in chosen.values())
        lacking = [budget for budget in budgets if budget is not None and _exact_at(budget, chosen) is None]
        return {**{f"{_EXACT},topk={budget}": make_config(_EXACT, topk=budget) for budget in lacking}, **chosen}

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every document."""
        shortest = min(setting.contexts)
        if self.config.steps > shortest - 3:
            # One token is consumed and not scored; a forward of fewer than two is no prefill.
            raise InputError(
                "steps",
                expected=f"at most {shortest - 3}, three less than the smallest context",
                got=self.config.steps,
                remedy="Decode fewer tokens, or choose a larger --context.",
            )
        return self._windows.points(setting)

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """What decides a line; the values that are varied are in its selector."""
        own = dict(self._windows.parameters(setting, context, document))
        return {"steps": own.pop("suffix"), "bin_size": self.config.bin_size, **own}

    def steps(self, context: int, document: int) -> int:
        """Of the text, of what the selector chooses, and of exact top-K beside that."""
        return 3 * self.config.steps

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """The first tokens of the window."""
        return self._windows.prepare(setting, context, document)

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Decode the text with each selector, then its own choices with exact top-K beside it."""
        shadows = {spec: self._shadow(spec, bench.selectors) for spec in specs}
        needed = dict.fromkeys([*specs, *(shadow for shadow in shadows.values() if shadow is not None)])
        tokens = bench.tensor(case.tokens)
        prefill = bench.prefill(tokens[: case.prefill], needed)
        rest = tokens[case.prefill :]
        for spec in specs:
            metrics = teacher_forced(prefill, spec, rest, self.config.bin_size)
            if (shadow := shadows[spec]) is not None:
                metrics |= autoregressive(prefill, spec, shadow, rest[0], len(rest) - 1, self.config.bin_size)
            yield spec, {**metrics, "bin_size": self.config.bin_size, "shadow": shadow, "field": self.config.field}

    @classmethod
    def varies_budgets_in(cls, lines: Sequence[Line]) -> bool:
        """Whether the field that was varied is the budget."""
        return all(line["metrics"].get("field") == "topk" for line in lines)

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """For each context a table, and curves by position."""
        if not lines:
            return []
        tables: list[Table] = []
        figures: list[Curves] = []
        for context, rows in rows_by_context(lines).items():
            tables += _tables(context, rows)
            figures += _curves(context, rows)
        return [Section("Stability", tables, about(lines), _notes(lines), figures)]

    def _shadow(self, spec: str, selectors: Mapping[str, AnyConfig]) -> str | None:
        """Name of exact top-K at a selector's budget; None if there is no such one, or it is that itself."""
        exact = _exact_at(budget_of(selectors[spec].model_dump()), selectors)
        return None if exact == spec else exact


def teacher_forced(prefill: "Prefill", spec: str, tokens: "Tensor", bin_size: int) -> dict[str, Any]:
    """Perplexity of all of `tokens` but the first, in all and as sums of NLL over bins of positions.

    Raises:
        MeasurementError: The selector did not act in every step, or the perplexity is not finite.
    """
    import torch

    from sparsesel.eval.decode import MeasurementError

    losses: list[Tensor] = []
    with prefill.decoder(spec) as decoder:
        for place in range(len(tokens) - 1):
            scores = decoder.step(tokens[place]).float().log_softmax(-1)
            losses.append(-scores.gather(0, tokens[place + 1 : place + 2])[0])  # an index would wait for the device
        known = decoder.metrics()
    values = torch.stack(losses).double().cpu()
    nll = float(values.sum())
    if not nll / len(values) < _LARGEST_NLL:  # nor is NaN
        raise MeasurementError(f"selector {spec}: the text has no finite perplexity")
    bins = values.split(bin_size)
    return {
        "perplexity": math.exp(nll / len(values)),
        "nll": nll,
        "tokens": len(values),
        "nll_by_position": [float(one.sum()) for one in bins],
        "tokens_by_position": [len(one) for one in bins],
        **known,
    }


def autoregressive(
    prefill: "Prefill", spec: str, shadow: str, first: "Tensor", steps: int, bin_size: int
) -> dict[str, Any]:
    """How far a selector's next-token distributions are from its shadow's, along its own greedy choices.

    Both decode the same tokens after the same prefill, each through its own cache. An end-of-text token ends nothing.

    Args:
        prefill: Of the tokens before.
        spec: The selector.
        shadow: Exact top-K, which consumes what the selector chose.
        first: The token that both consume first.
        steps: How many are consumed.
        bin_size: Steps of a bin.

    Returns:
        `kl`, KL(shadow ‖ selector) in nats, and `agreement`, the share of steps in which both would choose the same
        token: means over all steps and by position.
    """
    import torch

    chosen, logits = [first], []
    with prefill.decoder(spec) as decoder:
        for _ in range(steps):
            logits.append(decoder.step(chosen[-1]))  # kept in the model's type, [V] a step
            chosen.append(logits[-1].argmax())
        decoder.stats()  # refuses a run in which it did not act
    distances: list[Tensor] = []
    same: list[Tensor] = []
    with prefill.decoder(shadow) as decoder:
        for token, own in zip(chosen, logits, strict=False):
            exact = decoder.step(token)
            expected, found = exact.double().log_softmax(-1), own.double().log_softmax(-1)
            distances.append((expected.exp() * (expected - found)).sum().clamp_min(0))
            same.append((exact.argmax() == own.argmax()).double())
        decoder.stats()
    metrics: dict[str, Any] = {}
    for name, values in (("kl", distances), ("agreement", same)):
        measured = torch.stack(values).cpu()
        metrics[name] = float(measured.mean())
        metrics[f"{name}_by_position"] = [float(one.mean()) for one in measured.split(bin_size)]
    return metrics


def _fields(config: AnyConfig) -> set[str]:
    return set(type(config).model_fields) - {"name"}


def _exact_at(budget: int | str | None, selectors: Mapping[str, AnyConfig]) -> str | None:
    """Name of exact top-K at a budget; without one, the only exact top-K there is."""
    exact = {
        spec: budget_of(config.model_dump())
        for spec, config in selectors.items()
        if not isinstance(config, LayeredConfig) and config.name == _EXACT
    }
    fitting = [spec for spec, own in exact.items() if budget in (None, own)]
    return fitting[0] if len(fitting) == 1 else None


def _positions(row: Row, name: str) -> list[float | None]:
    """Mean over documents of a metric by position, which all have as many of; empty if the row has none."""
    found = [line["metrics"][name] for line in row.lines.values() if line["metrics"].get(name)]
    return [sum(values) / len(found) for values in zip(*found, strict=True)]


def _change(row: Row, reference: Row | None, *, running: bool = False) -> list[float | None]:
    """By position, a perplexity over the reference's minus 1, on the documents that both have.

    Args:
        row: The selector's.
        reference: Exact top-K's.
        running: Whether each place stands for all tokens up to it.
    """
    common = sorted(row.lines.keys() & reference.lines.keys()) if reference is not None else []
    if reference is None or not common:
        return []

    def sums(one: Row, name: str) -> list[float]:
        columns = zip(*(one.lines[document]["metrics"][name] for document in common), strict=True)
        values = [math.fsum(column) for column in columns]
        return [math.fsum(values[: place + 1]) for place in range(len(values))] if running else values

    mine, theirs, counts = (
        sums(one, name)
        for one, name in ((row, "nll_by_position"), (reference, "nll_by_position"), (row, "tokens_by_position"))
    )
    return [math.expm1((a - b) / count) for a, b, count in zip(mine, theirs, counts, strict=True)]


def _tables(context: int, rows: Sequence[Row]) -> list[Table]:
    exact = [reference_of(row, rows, _EXACT) for row in rows]
    changes = [_change(row, reference) for row, reference in zip(rows, exact, strict=True)]
    running = [_change(row, reference, running=True) for row, reference in zip(rows, exact, strict=True)]
    ratios = [ratio(row, reference) for row, reference in zip(rows, exact, strict=True)]
    documents = max(len(row.lines) for row in rows)
    metrics = next(iter(rows[0].lines.values()))["metrics"]
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    relative = [None if one is None else one - 1 for one in ratios]
    ranked = rankable(rows)
    columns = [
        Column("PPL", [perplexity(row.lines.values()) for row in rows], 3, better="less", ranked=ranked),
        Column("ΔPPL", relative, 2, percent=True, better="less", ranked=ranked),
        Column("worst\nup to", [_largest(one) for one in running], 2, percent=True, better="less", ranked=ranked),
        Column("last\nbin", [one[-1] if one else None for one in changes], 2, percent=True),
        Column("KL", [row.mean("kl") for row in rows], 4, better="less", ranked=ranked),
        Column("same\ntoken", [row.mean("agreement") for row in rows], 1, percent=True, better="more", ranked=ranked),
    ]
    work = [column for column in work_columns(rows) if any(value is not None for value in column.values)]
    where = f"context {context}, {documents} document{'s' * (documents > 1)}"
    decoded = f"the last {metrics['tokens']} tokens of each by bins of {metrics['bin_size']}"
    return [
        Table(f"Stability, {where}: {decoded}; changes and same tokens in %", names, columns, references),
        Table(f"Work in teacher-forced steps, {where}; shares in %", names, work, references),
    ]


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _curves(context: int, rows: Sequence[Row]) -> list[Curves]:
    """The counterparts of the paper's figure 8."""
    metrics = next(iter(rows[0].lines.values()))["metrics"]
    bin_size = metrics["bin_size"]
    ends = [float(end) for end in _running(metrics["tokens_by_position"])]
    compared = [(row, reference) for row in rows if (reference := reference_of(row, rows, _EXACT)) is not row]

    def curves(
        title: str, y_label: str, caption: str, values: Callable[[Row, Row | None], list[float | None]]
    ) -> Curves:
        series = [(row.selector, values(row, reference)) for row, reference in compared]
        return Curves(
            f"{title}, context {context}",
            f"decode steps since the prefill (end of bins of {bin_size})",
            y_label,
            [Series(name, ends, each) for name, each in series if each],
            caption=f"{caption} Counterpart of the paper's figure 8.",
        )

    figures = [
        curves(
            "Perplexity against exact top-K by position",
            "PPL / PPL of exact top-K - 1",
            "Teacher-forced, the tokens of each bin, against exact top-K of the same budget.",
            _change,
        ),
        curves(
            "Perplexity against exact top-K up to a position",
            "PPL / PPL of exact top-K - 1",
            "Teacher-forced, all tokens up to the position, against exact top-K of the same budget.",
            lambda row, reference: _change(row, reference, running=True),
        ),
        curves(
            "KL to an exact shadow by position",
            "KL(exact ‖ selector) in nats",
            "Along the selector's own greedy choices, which exact top-K consumes too.",
            lambda row, _: _positions(row, "kl_by_position"),
        ),
        curves(
            "Agreement with an exact shadow by position",
            "share of steps with the same top token",
            "Along the selector's own greedy choices, which exact top-K consumes too.",
            lambda row, _: _positions(row, "agreement_by_position"),
        ),
    ]
    return [figure for figure in figures if figure.series]


def _running(counts: Sequence[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


def _notes(lines: Sequence[Line]) -> list[str]:
    return [
        "ΔPPL: perplexity over that of exact top-K at the same budget, minus 1; worst up to: the largest of all tokens "
        "up to the end of a bin; last bin: of its tokens alone. KL and same token: along the selector's own greedy "
        "choices, beside exact top-K that consumes the same tokens after the same prefill; an end-of-text token ends "
        "nothing, and greedy text may repeat itself. Nothing is modelled.",
        work_note(lines),
    ]
