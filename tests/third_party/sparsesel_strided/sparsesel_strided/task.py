"""A task: how often each selector's choice of the next token is that of dense attention, on the same text.

It imports torch nowhere itself, so that listing tasks, their options and their reports stay fast.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from sparsesel import TaskConfig
from sparsesel.eval.report import rows_by_context
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Line, Metrics, Setting, Task
from sparsesel.eval.texts import cut_windows


class AgreementConfig(TaskConfig):
    """Its options: `sparsesel eval agreement --steps 16`."""

    steps: int = Field(default=32, ge=1, description="Tokens decoded at the end of a text.")


class Agreement(Task[AgreementConfig]):
    """One document: the beginning of the first text."""

    def points(self, setting: Setting) -> list[tuple[int, int]]:
        """One document at each context."""
        return [(context, 0) for context in setting.contexts]

    def steps(self, context: int, document: int) -> int:
        """For the time left."""
        return self.config.steps

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """The first tokens; a text that is too short is refused by name."""
        (window,) = cut_windows(setting.texts[:1], setting.tokenizer, size=context, documents=1)
        return Case(tokens=window.tokens, prefill=context - self.config.steps, steps=self.config.steps)

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Choices of dense attention once, then those of each selector."""
        dense = bench.model(bench.tensor(case.tokens)[None]).logits[0, case.prefill :].argmax(-1).tolist()
        prefill = bench.prefill(case.tokens[: case.prefill], specs)
        for spec in specs:
            with prefill.decoder(spec) as decoder:
                chosen = [int(decoder.step(token).argmax()) for token in case.tokens[case.prefill :]]
                work = decoder.metrics()  # refuses a run in which the selector did not act
            yield spec, {"agreement": sum(map(int.__eq__, dense, chosen)) / len(dense), **work}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """A table for each context."""
        tables: list[Table] = []
        for context, rows in rows_by_context(lines).items():
            shares: list[Any] = [row.mean("agreement") for row in rows]
            columns = [Column("agree", shares, 1, percent=True, better="more")]
            references = sum(row.is_reference for row in rows)
            tables.append(Table(f"Agreement in %, context {context}", [r.selector for r in rows], columns, references))
        return [Section("Agreement with dense attention", tables)]
