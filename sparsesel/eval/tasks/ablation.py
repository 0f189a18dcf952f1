"""What each part of ReTopK contributes: one is taken away at a time, and perplexity measured (the paper's table 3)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from sparsesel.config import MAX_COUNT, SelectorConfig
from sparsesel.eval.figures import Figure, Marks
from sparsesel.eval.report import Line, Row, about, rows_by_context
from sparsesel.eval.sweep import Sweep, bases, common, cost_columns, cost_note, field_changed, unmoved_note
from sparsesel.eval.tables import Section, Table
from sparsesel.eval.tasks.perplexity import PerplexityConfig, perplexity

_FAR = 2  # times the base's perplexity


class AblationConfig(PerplexityConfig):
    """What is made smaller, and what is scored."""

    smaller_recall_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="The smaller R.",
        json_schema_extra={"default": "half of the selector's own"},
    )
    smaller_cache_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="The smaller C, in tokens.",
        json_schema_extra={"default": "half of the selector's own, and no less than its R"},
    )


class Ablation(Sweep):
    """Documents as in the task `perplexity`; variants of every `retopk` named, others beside them as they are."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        self._recall_size = config.smaller_recall_size
        self._cache_size = config.smaller_cache_size

    def changes(self, spec: str, config: SelectorConfig) -> Iterator[tuple[str, Any]]:
        """The paper's ablations, each one field of the selector."""
        if config.name != "retopk":
            return
        own = config.model_dump()
        yield "retrieval", "recent"
        yield "recall_size", self._recall_size or max(1, own["recall_size"] // 2)
        yield "cache_size", self._cache_size or max(own["recall_size"], own["cache_size"] // 2)
        yield "fallback", False
        yield "window_size", 0
        yield "refresh_interval", 0

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """One table for each context and selector ablated, and perplexity against what a step reads."""
        if not lines:
            return []
        tables: list[Table] = []
        figures: list[Figure] = []
        notes = [cost_note(lines)]
        for context, rows in rows_by_context(lines).items():
            named = bases(rows)
            for base in named:
                variants = [(name, row) for row in rows if (name := _name(row.config, base.config))]
                references = [row for row in named if row.is_reference]
                members = common([*references, base, *(row for _, row in variants)])
                if not variants or not members:
                    continue
                names = [row.selector for row in references] + ["retopk as given"] + [name for name, _ in variants]
                tables.append(_table(context, base, names, members, len(references)))
                figures.append(_figure(context, base, names, members))
                notes += unmoved_note(base, variants)
        return [Section("Ablation", tables, about(lines), notes, figures)]


def _name(config: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """What was taken away from `base`, empty if it is no ablation of it."""
    field = field_changed(config, base)
    if base.get("name") != "retopk" or field is None:
        return ""
    value = config[field]
    names = {
        ("retrieval", "recent"): "recent-R retrieval",
        ("fallback", False): "no fallback",
        ("window_size", 0): "W = 0",
        ("refresh_interval", 0): "Tr = 0",
    }
    if (field, value) in names:
        return names[field, value]
    smaller = {"recall_size": "R", "cache_size": "C"}
    return f"{smaller[field]} = {value}" if field in smaller and value < base[field] else ""


def _table(context: int, base: Row, names: Sequence[str], rows: Sequence[Row], references: int) -> Table:
    count = len(rows[0].lines)
    return Table(
        f"Ablation of {base.selector}, context {context}: {count} document{'s' * (count > 1)}",
        names,
        cost_columns(rows, rows[references]),
        references,
        kind="variant",
    )


def _figure(context: int, base: Row, names: Sequence[str], rows: Sequence[Row]) -> Figure:
    """Perplexity against bytes; what is far worse than the base is only named, so that the others can be told apart."""
    marks: list[tuple[str, list[tuple[float, float]]]] = []
    beyond: list[str] = []
    limit = _FAR * next(perplexity(row.lines.values()) for row in rows if row.selector == base.selector)
    for name, row in zip(names, rows, strict=True):
        score, read = perplexity(row.lines.values()), row.step_bytes
        if score > limit:
            beyond.append(f"{name}: perplexity {score:.1f}")
        elif read is not None:
            marks.append((name, [(read / 1e6, score)]))
    return Marks(
        f"Ablation of {base.selector}, context {context}",
        "MB read by attention in a step (modelled)",
        "perplexity",
        marks,
        log_x=True,
        caption="Perplexity measured, decode-true; bytes by design, with the path shares and candidates counted."
        + f" Not shown: {', '.join(beyond)}." * bool(beyond),
    )
