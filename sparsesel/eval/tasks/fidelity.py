"""Fidelity: every decode step of every layer and head beside exact top-K and full attention of the same query.

The steps are those of `perplexity`: teacher-forced, after a dense prefill, over the same windows of the texts. Each
query is also answered exactly and fully over the same cache; the model goes on with the selector's own output. Means
are over all (layer, head, step) pairs alike, those of exact paths among them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsesel.config import MAX_COUNT
from sparsesel.errors import InputError
from sparsesel.eval.binning import bin_means, bin_sums, middles, pooled
from sparsesel.eval.figures import Curves, Figure, HeatMap, Marks, Series
from sparsesel.eval.report import Line, Row, about, measured_on, rankable, rows_by_context, work_columns
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting
from sparsesel.eval.tasks.perplexity import Perplexity, PerplexityConfig, score

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.shadow import Step

SIMILARITY_BINS = (-1.0, 0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Edges of the bins of ρmax; each holds its lower one, the last both."""

MAP_STEPS = 256
"""Steps of which the support map holds the last."""

_MEASURES = {
    "recall": "support recall",
    "retained_mass": "retained mass",
    "output_cosine": "output cosine",
    "relative_error": "relative error",
    "distribution_cosine": "distribution cosine",
}
_PATHS = ("exact", "reuse", "fallback", "refresh")
_MARKS = 12_000  # of one support map that is drawn


class FidelityConfig(PerplexityConfig):
    """What is scored of how many documents, and whose support is shown."""

    layer: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Layer whose support map is kept.",
        json_schema_extra={"default": "the middle one"},
    )
    head: int = Field(default=0, ge=0, le=MAX_COUNT, description="Query head whose support map is kept.")


class Fidelity(Perplexity):
    """The windows and steps of `perplexity`."""

    config: FidelityConfig

    def __init__(self, config: FidelityConfig) -> None:
        super().__init__(config)
        self.config = config

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every document."""
        layers, heads = setting.model_config.num_hidden_layers, setting.model_config.num_attention_heads
        for name, given, count in (("layer", self.config.layer or 0, layers), ("head", self.config.head, heads)):
            if given >= count:
                raise InputError(
                    name,
                    expected=f"0 to {count - 1}, as the model has {count} {name}s",
                    got=given,
                    remedy="Choose one of them.",
                )
        return super().points(setting)

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """Those of `perplexity`, and whose support map is kept."""
        return {
            **super().parameters(setting, context, document),
            "layer": self._layer(setting.model_config),
            "head": self.config.head,
        }

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Decode the same tokens with each selector, and compare each of its steps."""
        from sparsesel.eval.shadow import Watched

        record = Record(self._layer(bench.model.config.get_text_config(decoder=True)), self.config.head)
        tokens = bench.tensor(case.tokens)
        prefill = bench.prefill(tokens[: case.prefill], specs, wrap=lambda selector: Watched(selector, record.take))
        for spec in specs:
            record.clear()
            known = score(prefill, spec, tokens[case.prefill :])
            del known["ms_per_step"]  # most of it went into the comparison
            yield spec, {**known, **record.metrics()}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """For each context, tables of means and of the reuse path alone; curves over ρmax; maps."""
        tables: list[Table] = []
        figures: list[Figure] = []
        for context, rows in rows_by_context(lines).items():
            tables += _tables(context, rows)
            figures += [*_curves(context, rows), *_maps(context, rows), *_support_maps(context, rows)]
        return [Section("Fidelity", tables, about(lines), _notes(lines), figures)] if lines else []

    def _layer(self, model_config: Any) -> int:
        return model_config.num_hidden_layers // 2 if self.config.layer is None else self.config.layer


class Record:
    """What was measured of each step of one selector.

    Args:
        layer: Layer whose support map is kept.
        head: Query head of it.
    """

    def __init__(self, layer: int, head: int) -> None:
        self._layer = layer
        self._head = head
        self.clear()

    def clear(self) -> None:
        """Forget everything: another selector begins."""
        self._measures: dict[int, list[Tensor]] = {}  # layer to `[measures, Hq]` of each step
        self._similarities: dict[int, list[Tensor]] = {}
        self._counted: dict[int, list[Mapping[str, Tensor]]] = {}
        self._supports: list[list[list[int]]] = []

    def take(self, step: "Step") -> None:
        """Compare a step and keep what that gives."""
        import torch

        from sparsesel.eval.shadow import compare

        found = compare(step)
        measures = torch.stack([getattr(found, name).double() for name in _MEASURES])
        self._measures.setdefault(step.layer_idx, []).append(measures)
        self._counted.setdefault(step.layer_idx, []).append(step.counted)
        if step.similarity is not None:
            self._similarities.setdefault(step.layer_idx, []).append(step.similarity)
        if step.layer_idx == self._layer:
            mask = step.support.as_mask(step.kv)[0, :, 0]
            shared = step.query.shape[1] // len(mask)
            self._supports.append(runs(mask[self._head // shared].nonzero()[:, 0].tolist()))
            del self._supports[:-MAP_STEPS]

    def metrics(self) -> dict[str, Any]:
        """Means over all pairs and over those that reused, binned by ρmax; maps `[L][Hq]`; the support map."""
        import torch

        layers = sorted(self._measures)
        values = torch.stack([torch.stack(self._measures[layer]) for layer in layers]).cpu()  # [L, S, measures, Hq]
        measures = dict(zip(_MEASURES, values.unbind(2), strict=True))  # each [L, S, Hq]
        paths = self._paths(layers, values.new_zeros(values[:, :, 0].shape))
        reuse = paths.get("reuse")
        means: dict[str, Any] = {name: float(each.mean()) for name, each in measures.items()}
        for name, each in measures.items():
            means[f"{name}_reuse"] = float(each[reuse > 0].mean()) if reuse is not None and reuse.any() else None
        return {
            **means,
            **self._by_similarity(layers, measures, reuse),
            "layers": layers,
            "recall_map": measures["recall"].mean(1).tolist(),
            **{f"{path}_map": taken.mean(1).tolist() for path, taken in paths.items()},
            "support_map": self._supports,
        }

    def _paths(self, layers: Sequence[int], nothing: "Tensor") -> "dict[str, Tensor]":
        """`[L, S, Hq]` of each path that the selector counts, 1 where it was taken."""
        paths: dict[str, Tensor] = {}
        for row, layer in enumerate(layers):
            for step, counted in enumerate(self._counted[layer]):
                for path in counted.keys() & set(_PATHS):
                    paths.setdefault(path, nothing.clone())[row, step] = counted[path]
        return {path: paths[path] for path in _PATHS if path in paths}

    def _by_similarity(
        self, layers: Sequence[int], measures: "Mapping[str, Tensor]", reuse: "Tensor | None"
    ) -> dict[str, Any]:
        """Pairs that reused, by their ρmax; nothing for selectors without one."""
        import torch

        # The layers of a selector by layers that have no ρmax are left out.
        rows = [row for row, layer in enumerate(layers) if layer in self._similarities]
        if not rows or reuse is None:
            return {}
        similarity = torch.stack([torch.stack(self._similarities[layers[row]]) for row in rows]).cpu()
        reused = reuse[rows] > 0
        counts = bin_sums(similarity[reused], SIMILARITY_BINS)
        sums = {
            name: bin_sums(similarity[reused], SIMILARITY_BINS, each[rows][reused]) for name, each in measures.items()
        }
        return {
            "similarity_bins": list(SIMILARITY_BINS),
            "pairs_by_similarity": bin_sums(similarity, SIMILARITY_BINS),
            "reuse_by_similarity": counts,
            **{f"{name}_by_similarity": bin_means(total, counts) for name, total in sums.items()},
        }


def runs(positions: Sequence[int]) -> list[list[int]]:
    """Ascending positions as `[first, last]` of each run of neighbours."""
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][1] == position - 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return found


def _weighted(row: Row, metric: str, weight: str) -> float | None:
    """Mean of a metric over documents, each by how many pairs it stands for."""
    known = [
        (metrics[metric], metrics["tokens"] * (1.0 if weight == "tokens" else metrics[weight]))
        for metrics in (line["metrics"] for line in row.lines.values())
        if metrics.get(metric) is not None
    ]
    total = sum(size for _, size in known)
    return sum(value * size for value, size in known) / total if total else None


def _tables(context: int, rows: Sequence[Row]) -> list[Table]:
    names, references = [row.selector for row in rows], sum(row.is_reference for row in rows)
    documents = max(len(row.lines) for row in rows)
    scored = next(iter(rows[0].lines.values()))["metrics"]["tokens"]
    where = f"context {context}, {documents} document{'s' * (documents > 1)} of {scored} steps"

    def columns(suffix: str, weight: str) -> list[Column]:
        return [
            Column(
                title.replace(" ", "\n"),
                [_weighted(row, name + suffix, weight) for row in rows],
                4,
                better="less" if name == "relative_error" else "more",
                ranked=rankable(rows),
            )
            for name, title in _MEASURES.items()
        ]

    work = [column for column in work_columns(rows) if any(v is not None for v in column.values)]
    tables = [
        Table(f"Fidelity, all pairs: {where}", names, columns("", "tokens"), references),
        Table(f"Work in these steps: {where}; shares in %", names, work, references),
    ]
    if reusing := [row for row in rows if row.values("recall_reuse")]:
        rows = reusing
        tables.insert(
            1,
            Table(f"Fidelity, reuse path alone: {where}", [r.selector for r in rows], columns("_reuse", "reuse_share")),
        )
    return tables


def _curves(context: int, rows: Sequence[Row]) -> list[Curves]:
    """Fidelity of reuse against ρmax."""
    figures: list[Curves] = []
    for name, title in _MEASURES.items():
        series: list[Series] = []
        for row in rows:
            found = [metrics for line in row.lines.values() if "similarity_bins" in (metrics := line["metrics"])]
            if found and any(sum(metrics["reuse_by_similarity"]) for metrics in found):
                means = pooled(
                    [metrics[f"{name}_by_similarity"] for metrics in found],
                    [metrics["reuse_by_similarity"] for metrics in found],
                )
                series.append(Series(row.selector, middles(found[0]["similarity_bins"]), means))
        if series:
            figures.append(
                Curves(
                    f"{title.capitalize()} by ρmax, context {context}",
                    "ρmax, cosine to the nearest cached query (middle of its bin)",
                    title,
                    series,
                    caption="Pairs of layer, head and step that took the reuse path, of all documents.",
                )
            )
    return figures


def _maps(context: int, rows: Sequence[Row]) -> list[HeatMap]:
    """Recall and shares of paths by layer and head, means over documents."""
    titles = {"recall": "Support recall", **{path: f"Share of {path}" for path in _PATHS}}
    figures: list[HeatMap] = []
    for row in (row for row in rows if not row.is_reference):
        for name in titles:
            found = [metrics for line in row.lines.values() if f"{name}_map" in (metrics := line["metrics"])]
            if not found:
                continue
            maps = [metrics[f"{name}_map"] for metrics in found]
            figures.append(
                HeatMap(
                    f"{titles[name]}: {row.selector}, context {context}",
                    "query head",
                    "layer",
                    [str(head) for head in range(len(maps[0][0]))],
                    [str(layer) for layer in found[0]["layers"]],
                    [
                        [sum(cells) / len(cells) for cells in zip(*heads, strict=True)]
                        for heads in zip(*maps, strict=True)
                    ],
                    low=0.0,
                    high=1.0,
                    caption="Of all steps of a head; mean over documents.",
                )
            )
    return figures


def _support_maps(context: int, rows: Sequence[Row]) -> list[Marks]:
    """Positions attended at each step, of the first document; not of what attends to everything."""
    figures: list[Marks] = []
    for row in rows:
        line = next(iter(row.lines.values()))
        metrics, parameters = line["metrics"], line["provenance"]["parameters"]
        steps: list[list[list[int]]] = metrics["support_map"]
        if not steps or metrics["density"] == 1.0:
            continue
        first = metrics["tokens"] - len(steps)
        size = sum(last - begin + 1 for spans in steps for begin, last in spans)
        every = max(1, math.ceil(size / _MARKS))
        marks = [
            (float(position), float(first + step))
            for step in range(0, len(steps), every)
            for begin, last in steps[step]
            for position in range(begin, last + 1)
        ]
        shown = "" if every == 1 else f" Every {every}th step is drawn."
        figures.append(
            Marks(
                f"Support of layer {parameters['layer']}, head {parameters['head']}: {row.selector}, context {context}",
                "position attended, in tokens",
                "decode step",
                [(row.selector, marks)],
                dots=True,
                caption=f"Document {line['document']}, the last {len(steps)} steps.{shown}",
            )
        )
    return figures


def _notes(lines: Sequence[Line]) -> list[str]:
    places, _ = measured_on(lines)
    return [
        "Means over all pairs of layer, query head and step, exact paths among them. Support recall: |S ∩ E| / |E|, E "
        "being the exact top-K of the same query over the same cache; K is the selector's budget, or |S| without one. "
        "Retained mass: full attention's mass on S. Output cosine and relative error: against full attention's output "
        "of that layer and head. Distribution cosine: softmax over S alone against full attention's. Measured on "
        f"{places}; nothing is modelled."
    ]
