"""All tasks on one page: quality, speed and cost of each selector, as in the paper's table 1."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsesel.eval.figures import Marks
from sparsesel.eval.report import Line, Row, about, budget_of, ordered, rankable, reference_of, rows_by_context
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.tasks.perplexity import perplexity, ratio

TASKS = ("perplexity", "latency", "niah", "longbench")
"""Whose lines the summary is made of, where there are any."""

# Parameters whose combinations a task's score is the plain mean over.
_CELLS = {"niah": ("variant", "haystack"), "longbench": ("subset",)}
_NAMES = {"niah": "needles", "longbench": "LongBench"}


@dataclass(frozen=True)
class StepCost:
    """A decode step by design, with the paths and candidates that were counted.

    Attributes:
        attended: Keys attended per query head, measured where a line says so.
        bytes_read: In all layers.
        state_bytes: Kept beside the KV cache.
        dense_layers: How many attend to everything.
        over_full: What dense attention reads over `bytes_read`.
        over_exact: What exact Top-K reads at the same budget over `bytes_read`.
    """

    attended: float
    bytes_read: float
    state_bytes: float
    dense_layers: int
    over_full: float
    over_exact: float


def step_cost(lines: Sequence[Line]) -> StepCost | None:
    """What the lines of one selector at one context say of its cost, None if they say nothing."""
    known = [cost for line in lines if "step_bytes" in (cost := line["provenance"].get("cost") or {})]
    if not known:
        return None
    cost = known[0]  # but for the paths that were counted, they are the same
    bytes_read = statistics.fmean(one["step_bytes"] for one in known)
    attended = _mean([line["metrics"].get("attended") for line in lines])
    return StepCost(
        attended=cost["attended"] if attended is None else attended,
        bytes_read=bytes_read,
        state_bytes=cost["state_bytes"],
        dense_layers=cost["dense_layers"],
        over_full=cost["full_bytes"] / bytes_read,
        over_exact=cost["exact_bytes"] / bytes_read,
    )


def summary(lines: Sequence[Line]) -> list[Section]:
    """One section over all of `TASKS`: quality and speed, cost, and one against the other; none without such lines."""
    own = [line for line in lines if line["task"] in TASKS]
    if not own:
        return []
    rows = ordered({line["selector"]: Row(line["selector"], line["config"]) for line in own}.values())
    contexts = sorted({line["context"] for line in own})
    results = {context: _Results([line for line in own if line["context"] == context], rows) for context in contexts}
    columns = [
        column
        for group in (_Results.perplexities, _Results.speedups, _Results.needles, _Results.longbench)
        for result in results.values()
        for column in group(result)
    ]
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    tables = [Table("Quality and speed", names, columns, references)] if columns else []
    tables += [result.cost_table(names, references) for result in results.values() if any(result.costs)]
    figures = [figure for result in results.values() for figure in result.frontiers(names)]
    notes = [note for result in results.values() for note in result.notes()]
    return [Section("Summary", tables, about(own), tuple(dict.fromkeys(notes)), figures)]


class _Results:
    """What was measured at one context, by the rows of the summary."""

    def __init__(self, lines: Sequence[Line], rows: Sequence[Row]) -> None:
        self._lines = lines
        self._context = lines[0]["context"]
        self._label = f"{self._context // 1024}K" if self._context % 1024 == 0 else str(self._context)
        self._rows = rows
        # Of the paths that tasks counted, those of perplexity: every selector decodes the same tokens there. What
        # `latency` times may have another geometry than the model.
        counted = [line for line in lines if line["task"] == "perplexity"]
        modelled = counted or [line for line in lines if line["task"] != "latency"]
        self.costs = [step_cost([line for line in modelled if line["selector"] == row.selector]) for row in rows]

    def perplexities(self) -> list[Column]:
        rows = self._of("perplexity")
        values = self._each(rows, lambda row: perplexity(row.lines.values()))
        return self._column("PPL", values, digits=2, better="less", ranked=rankable(rows.values()))

    def needles(self) -> list[Column]:
        return self._answers("niah")

    def longbench(self) -> list[Column]:
        return self._answers("longbench")

    def _answers(self, task: str) -> list[Column]:
        options = {"percent": True, "better": "more", "detail": True, "ranked": rankable(self._of(task).values())}
        return self._column(_NAMES[task], self._scores(task), digits=1, **options)

    def speedups(self) -> list[Column]:
        measured = self._measured_speedups()
        if any(value is not None for value in measured):
            return self._column("×exact", measured, self._device, better="more", digits=2)
        return self._column("×exact", self._over_exact(), "modelled", better="more", digits=2)

    def cost_table(self, names: Sequence[str], references: int) -> Table:
        def values(pick: Callable[[StepCost], float]) -> list[float | None]:
            return [None if cost is None else pick(cost) for cost in self.costs]

        columns = [
            Column("tokens\nattended", values(lambda cost: cost.attended), 0),
            Column("MB read\nper step", values(lambda cost: cost.bytes_read / 1e6), 2, better="less"),
            Column("MB of\nstate", values(lambda cost: cost.state_bytes / 1e6), 2, better="less", detail=True),
            Column("dense\nlayers", values(lambda cost: cost.dense_layers), 0, detail=True),
            Column("×full\nmodelled", values(lambda cost: cost.over_full), 2, better="more", detail=True),
            Column("×exact\nmodelled", self._over_exact(), 2, better="more"),
        ]
        return Table(f"Cost of a decode step at context {self._context}, modelled", names, columns, references)

    def _over_exact(self) -> list[float | None]:
        """Modelled speedups to exact Top-K: at a row's own budget, or for one without a budget the row there is."""
        return [self._ratio_to_exact(row, cost) for row, cost in zip(self._rows, self.costs, strict=True)]

    def _ratio_to_exact(self, row: Row, cost: StepCost | None) -> float | None:
        if cost is None or budget_of(row.config) is not None:
            return cost and cost.over_exact
        exact = reference_of(row, self._rows, "exact_topk")
        other = None if exact is None else self.costs[self._rows.index(exact)]
        return other and other.bytes_read / cost.bytes_read

    def frontiers(self, names: Sequence[str]) -> list[Marks]:
        """Quality against bytes, for each kind of quality that was measured."""
        rows = self._of("perplexity")
        ratios = self._each(rows, lambda row: ratio(row, reference_of(row, rows.values(), "full")))
        caption = (
            f"Context {self._context}. Quality is measured; bytes are modelled: every selector's own account of a "
            "step, with the paths and candidates that were counted. The line joins what nothing else beats in both."
        )
        kinds = [
            ("Perplexity against bytes read", "perplexity ÷ full", ratios, False),
            ("Needles found against bytes read", "share of numbers found", self._scores("niah"), True),
            ("LongBench against bytes read", "F1", self._scores("longbench"), True),
        ]
        figures: list[Marks] = []
        for title, label, values, more in kinds:
            groups = [
                (name, [(cost.bytes_read / 1e6, value)])
                for name, cost, value in zip(names, self.costs, values, strict=True)
                if cost is not None and value is not None
            ]
            if len(groups) > 1:
                figures.append(
                    Marks(
                        f"{title}, context {self._context}",
                        "MB read per step, modelled",
                        label,
                        groups,
                        connect=True,
                        more_is_better=more,
                        log_x=True,
                        caption=caption,
                    )
                )
        return figures

    def notes(self) -> list[str]:
        known = [
            ("perplexity", "PPL: perplexity of the tokens decoded through the selector."),
            ("niah", "needles: % of hidden numbers found, the mean over variants and haystacks."),
            ("longbench", "LongBench: F1 in %, the mean over its subsets."),
        ]
        notes = [text for task, text in known if self._of(task)]
        if any(value is not None for value in self._measured_speedups()):
            eager = "; eager PyTorch, no measure of what kernels reach" * ("eager" in self._place)
            where = f"measured by latency ({self._place}{eager})"
            notes.append(f"×exact: attention's time with exact_topk over the selector's, {where}.")
        if any(self.costs):
            notes.append(
                "modelled: ratios of the bytes that a step reads by the selectors' own accounts, with the paths and "
                "candidates that were counted; nothing is timed."
            )
        broken = [
            f"The cost of {line['selector']} is not known: {cost['error']}."
            for line in self._lines
            if "error" in (cost := line["provenance"].get("cost") or {})
        ]
        return notes + broken

    def _column(self, heading: str, values: Sequence[float | None], mark: str = "", **options: object) -> list[Column]:
        """A column of this context, none without a value."""
        if all(value is None for value in values):
            return []
        label = f"{self._label}\n{mark}" if mark else self._label
        return [Column(f"{heading}\n{label}", values, **options)]  # pyright: ignore[reportArgumentType]

    def _of(self, task: str) -> Mapping[str, Row]:
        lines = [line for line in self._lines if line["task"] == task]
        return {row.selector: row for rows in rows_by_context(lines).values() for row in rows}

    def _each(self, rows: Mapping[str, Row], value: Callable[[Row], float | None]) -> list[float | None]:
        """A value for each row of the summary, None where this task has none."""
        return [value(rows[row.selector]) if row.selector in rows else None for row in self._rows]

    def _scores(self, task: str) -> list[float | None]:
        return self._each(self._of(task), lambda row: macro_score(list(row.lines.values()), _CELLS[task]))

    def _measured_speedups(self) -> list[float | None]:
        rows = self._of("latency")

        def speedup(row: Row) -> float | None:
            exact = reference_of(row, rows.values(), "exact_topk")
            times = row.mean("attention_ms"), exact and exact.mean("attention_ms")
            return times[1] / times[0] if times[0] and times[1] else None

        return self._each(rows, speedup)

    @property
    def _device(self) -> str:
        return "/".join(dict.fromkeys(place.rpartition(" ")[2] for place in self._place.split("/")))

    @property
    def _place(self) -> str:
        """Where times were measured."""
        lines = [line["provenance"] for line in self._lines if line["task"] == "latency"]
        return "/".join(dict.fromkeys(f"{one.get('backend', '?')} on {one.get('device', '?')}" for one in lines))


def macro_score(lines: Sequence[Line], names: Sequence[str]) -> float | None:
    """Mean over cells, which the task's parameters of these names tell apart, of the mean score in each."""
    cells: dict[tuple[object, ...], list[float]] = {}
    for line in lines:
        parameters = line["provenance"].get("parameters", {})
        cells.setdefault(tuple(parameters.get(name) for name in names), []).append(line["metrics"]["score"])
    return _mean([statistics.fmean(scores) for scores in cells.values()])


def _mean(values: Sequence[object]) -> float | None:
    known = [value for value in values if isinstance(value, float | int)]
    return statistics.fmean(known) if known else None
