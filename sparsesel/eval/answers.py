"""Answers to prompts: decoded greedily through a selector, and scored by cells of a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsesel.eval.report import FEWEST, Line, Row, bootstrap, work_columns
from sparsesel.eval.tables import Column, Table, Value
from sparsesel.eval.task import Bench

if TYPE_CHECKING:
    from sparsesel.eval.decode import Prefill

Cell = tuple[str, ...]


def answer(
    bench: Bench, prefill: "Prefill", spec: str, token: int, *, limit: int, done: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """Let a selector answer.

    Args:
        bench: The model.
        prefill: Of the prompt without its last token.
        spec: The selector.
        token: The prompt's last token: it, too, is decoded through the selector.
        limit: Tokens at most.
        done: Whether what follows an answer changes nothing, so that it may end there.

    Returns:
        `answer`, its length `tokens`, and what every task reports of a selector.

    Raises:
        MeasurementError: The selector did not act in every step.
    """
    ends = _end_tokens(bench)
    found: list[int] = []
    text = ""
    with prefill.decoder(spec) as decoder:
        while len(found) < limit:
            token = int(decoder.step(token).argmax())
            if token in ends:
                break
            found.append(token)
            text = bench.tokenizer.decode(found, skip_special_tokens=True)
            if done is not None and done(text):
                break
        return {"tokens": len(found), **decoder.metrics(), "answer": text}


def chat_frame(tokenizer: Any, before: str, mark: str, after: str, answer: str = "") -> tuple[str, str, bool]:
    """What comes before and after the long part of a prompt, in the chat template if the tokenizer has one.

    Args:
        tokenizer: Of the model.
        before: The user's words before the long part.
        mark: Stands for the long part while the template is filled; nothing else may have it.
        after: The user's words after it.
        answer: How the answer begins.

    Returns:
        Both parts, and whether they hold the special tokens already.
    """
    if not getattr(tokenizer, "chat_template", None):
        return before, f"{after}{answer}", False
    filled = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{before}{mark}{after}"}], tokenize=False, add_generation_prompt=True
    )
    first, _, last = filled.partition(mark)
    return first, f"{last}{answer}", True


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Tokens of a text of any length, with the tokenizer's special ones if asked for."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def mean_score(lines: Sequence[Line]) -> float | None:
    """Mean score, None without lines."""
    return _mean([line["metrics"]["score"] for line in lines])


def score_tables(
    rows: Sequence[Row],
    cell_of: Callable[[Mapping[str, Any]], Cell],
    *,
    title: str,
    overall: str,
    percent: bool = False,
) -> list[Table]:
    """Scores by cell with their mean, then over all cells with their interval and what the selectors did.

    Args:
        rows: Of one context.
        cell_of: From a line's parameters to its cell, whose parts are the lines of a heading.
        title: Of the first table.
        overall: Of the second.
        percent: Whether scores are shown in %.
    """
    by_cell: dict[Cell, list[list[Line]]] = {}
    for index, row in enumerate(rows):
        for line in row.lines.values():
            cell = cell_of(line["provenance"]["parameters"])
            by_cell.setdefault(cell, [[] for _ in rows])[index].append(line)
    scores = {cell: [mean_score(lines) for lines in groups] for cell, groups in by_cell.items()}
    means = [_mean([values[index] for values in scores.values()]) for index in range(len(rows))]
    digits = 1 if percent else 3

    def column(heading: str, values: Sequence[Value], *groups: Sequence[Line]) -> Column:
        ranked = all(len(lines) > 1 for lines in groups)
        return Column(heading, values, digits, percent=percent, better="more" if groups else "", ranked=ranked)

    every = [list(row.lines.values()) for row in rows]
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    intervals = [
        bootstrap(lines, lambda drawn: mean_score(drawn) or 0.0) or ("too few" if len(lines) < FEWEST else None, None)
        for lines in every
    ]
    return [
        Table(
            title,
            names,
            [
                *(column("\n".join(cell), values, *by_cell[cell]) for cell, values in scores.items()),
                column("mean", means, *every),
            ],
            references,
        ),
        Table(
            overall,
            names,
            [
                Column("of", [len(lines) for lines in every], 0),
                column("score", [row.mean("score") for row in rows], *every),
                column("from", [low for low, _ in intervals]),
                column("to", [high for _, high in intervals]),
                *work_columns(rows),
            ],
            references,
        ),
    ]


def _end_tokens(bench: Bench) -> set[int]:
    """Tokens that end an answer."""
    known = getattr(bench.model.generation_config, "eos_token_id", None)
    ends = known if isinstance(known, list) else [known]
    return {token for token in (*ends, bench.tokenizer.eos_token_id) if token is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
