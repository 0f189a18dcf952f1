"""Decode-true perplexity: what is scored went through the selector, one token at a time.

For N tokens and a suffix of S: tokens 0 … N-S-2 are a dense prefill, then S single-token steps consume tokens
N-S-1 … N-2 (teacher-forced), each scoring the token after the one it consumed. A perplexity from one forward over
all tokens would never call the selector.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsesel.config import MAX_COUNT, TaskConfig
from sparsesel.errors import InputError
from sparsesel.eval.report import (
    FEWEST,
    TOO_FEW,
    Line,
    Row,
    about,
    bootstrap,
    rankable,
    reference_of,
    rows_by_context,
    work_columns,
    work_note,
)
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task
from sparsesel.eval.texts import Window, cut_windows, place_of

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.decode import Prefill

_LARGEST_NLL = math.log(sys.float_info.max)  # per token; a perplexity beyond is no number


class PerplexityConfig(TaskConfig):
    """What is scored of how many documents."""

    suffix: int = Field(default=512, ge=1, le=MAX_COUNT, description="Tokens scored at the end of each document.")
    documents: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Documents, taken from the texts in turn.",
        json_schema_extra={"default": "one of each text"},
    )


class Perplexity(Task[PerplexityConfig]):
    """Document i is window i of the texts, max(contexts) tokens long; a smaller context is its beginning."""

    def __init__(self, config: PerplexityConfig) -> None:
        super().__init__(config)
        self._windows: list[Window] = []

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every document."""
        suffix, shortest = self.config.suffix, min(setting.contexts)
        if suffix > shortest - 3:
            # One token is consumed and not scored; a forward of fewer than two is no prefill.
            raise InputError(
                "suffix",
                expected=f"at most {shortest - 3}, three less than the smallest context",
                got=suffix,
                remedy="Score fewer tokens, or choose a larger --context.",
            )
        documents, files = self._documents(setting), len(setting.texts)
        if documents < files:
            raise InputError(
                "documents",
                expected=f"at least {files}, one of each text file",
                got=documents,
                remedy="Ask for more documents, or give fewer texts.",
            )
        # No token is less than a byte: more documents than this cannot be, and might be too many to list.
        size = max(setting.contexts)
        most = sum(len(text.content.encode("utf-8", errors="surrogatepass")) // size + 2 for text in setting.texts)
        if documents > most:
            self._cut(setting)  # refuses them, and says how many there are
        return [(context, document) for document in range(documents) for context in setting.contexts]

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """A longer largest context, or another number of files, moves the windows."""
        file, start = place_of(document, len(setting.texts), max(setting.contexts))
        return {"suffix": self.config.suffix, "file": file, "start": start}

    def steps(self, context: int, document: int) -> int:
        """One for each token scored."""
        return self.config.suffix

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """The first tokens of the window.

        Raises:
            InputError: The texts are too short for all documents.
        """
        if not self._windows:
            self._windows = self._cut(setting)
        window = self._windows[document]
        return Case(
            tokens=window.tokens[:context],
            prefill=context - self.config.suffix - 1,
            steps=self.config.suffix,
            details={"text": window.file},
        )

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Score the same tokens with each selector."""
        tokens = bench.tensor(case.tokens)
        prefill = bench.prefill(tokens[: case.prefill], specs)
        for spec in specs:
            yield spec, score(prefill, spec, tokens[case.prefill :])

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """One table for each context (perplexity, ratios, path shares, cost), and intervals over documents."""
        if not lines:
            return []
        by_context = rows_by_context(lines)
        tables = [table for context, rows in by_context.items() for table in _tables(context, rows)]
        few = [row for rows in by_context.values() for row in rows if len(row.lines) < FEWEST]
        return [Section("Perplexity", tables, about(lines), (work_note(lines), *[TOO_FEW] * bool(few)))]

    def _documents(self, setting: Setting) -> int:
        return len(setting.texts) if self.config.documents is None else self.config.documents

    def _cut(self, setting: Setting) -> list[Window]:
        return cut_windows(
            setting.texts, setting.tokenizer, size=max(setting.contexts), documents=self._documents(setting)
        )


def score(prefill: "Prefill", spec: str, tokens: "Tensor") -> dict[str, float | None]:
    """Perplexity of all of `tokens` but the first, which is consumed only: each is decoded through selector `spec`.

    Args:
        prefill: Of the tokens before.
        spec: One of its selectors.
        tokens: `[S + 1]` int64.

    Raises:
        MeasurementError: The selector did not act in every step, or the perplexity is not finite.
    """
    import torch

    from sparsesel.eval.decode import MeasurementError

    tokens = tokens.to(prefill.model.device)
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    with prefill.decoder(spec) as decoder:
        for token, following in itertools.pairwise(tokens):
            scores = decoder.step(token).float().log_softmax(-1)
            total -= scores.gather(0, following[None])[0]  # an index would wait for the device
        known = decoder.metrics()
    nll, count = float(total), len(tokens) - 1
    if not nll / count < _LARGEST_NLL:  # nor is NaN
        raise MeasurementError(f"selector {spec}: the text has no finite perplexity")
    return {"perplexity": math.exp(nll / count), "nll": nll, "tokens": count, **known}


def perplexity(lines: Iterable[Line]) -> float:
    """`exp(total NLL / tokens)`."""
    metrics = [line["metrics"] for line in lines]
    return math.exp(math.fsum(m["nll"] for m in metrics) / sum(m["tokens"] for m in metrics))


def ratio(row: Row, reference: Row | None) -> float | None:
    """Perplexity over a reference's, on the documents that both have; None without any."""
    common = row.lines.keys() & reference.lines.keys() if reference is not None else ()
    if reference is None or not common:
        return None
    return perplexity(row.lines[d] for d in common) / perplexity(reference.lines[d] for d in common)


def _tables(context: int, rows: Sequence[Row]) -> list[Table]:
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    documents = max(len(row.lines) for row in rows)
    scored = next(iter(rows[0].lines.values()))["metrics"]["tokens"]
    several = f"{documents} document{'s' * (documents > 1)}"
    to_exact, to_full = ([ratio(row, reference_of(row, rows, name)) for row in rows] for name in ("exact_topk", "full"))
    ranked = rankable(rows)
    columns = [
        Column("PPL", [perplexity(row.lines.values()) for row in rows], 3, better="less", ranked=ranked),
        Column("÷exact", to_exact, 4, better="less", ranked=ranked),
        Column("÷full", to_full, 4, better="less", ranked=ranked),
        *work_columns(rows),
    ]
    if any(len(row.lines) != documents for row in rows):
        columns.insert(0, Column("docs", [len(row.lines) for row in rows], 0))
    title = f"Perplexity, context {context}: {several}, last {scored} tokens of each; shares in %"
    tables = [Table(title, names, columns, references)]
    intervals = [bootstrap(list(row.lines.values()), perplexity) for row in rows]
    if any(intervals):
        bounds = [interval or (None, None) for interval in intervals]
        tables.append(
            Table(
                f"95% interval of the perplexity at context {context}: bootstrap over {several}",
                names,
                [Column("from", [low for low, _ in bounds], 3), Column("to", [high for _, high in bounds], 3)],
                references,
            )
        )
    return tables
