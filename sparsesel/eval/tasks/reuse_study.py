"""Why supports can be recalled: similar queries have similar exact supports. Measured in dense decoding.

No selector is studied: the model decodes densely, teacher-forced, over the windows of `perplexity`. Queries are
post-RoPE; the support of each is its exact top-K over all that it sees. Pairs are of one layer and head.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from sparsesel.config import MAX_COUNT, AnyConfig
from sparsesel.errors import InputError
from sparsesel.eval.binning import bin_means, bin_names, bin_sums, middles, pooled
from sparsesel.eval.figures import Curves, Figure, HeatMap, Series
from sparsesel.eval.report import Line, Row, about, rows_by_context
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting
from sparsesel.eval.tasks.perplexity import Perplexity, PerplexityConfig, score
from sparsesel.registry import make_config

if TYPE_CHECKING:
    from torch import Tensor

    from sparsesel.eval.shadow import Step

MAX_RECALL = 16
"""Largest R, supports recalled at once."""

COSINE_BINS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Edges of the bins of cosine similarity."""

_MAP_RECALL = 4  # R of the map, ReTopK's


class ReuseStudyConfig(PerplexityConfig):
    """Which queries are compared, and what a support is."""

    topk: int = Field(default=128, ge=1, le=MAX_COUNT, description="K: keys in a support.")
    cache_size: int = Field(
        default=32,
        ge=MAX_RECALL,
        le=MAX_COUNT,
        description="C: a step's predecessors are those at most so many steps before it.",
    )


class ReuseStudy(Perplexity):
    """The windows and steps of `perplexity`, decoded densely."""

    needs_selectors: ClassVar[bool] = False
    config: ReuseStudyConfig

    def __init__(self, config: ReuseStudyConfig) -> None:
        super().__init__(config)
        self.config = config

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Dense decoding, whatever is named for other tasks."""
        return {"full": make_config("full")}

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context of every document."""
        points = super().points(setting)
        suffix, prefilled = self.config.suffix, min(setting.contexts) - self.config.suffix - 1
        if self.config.cache_size >= suffix:
            raise InputError(
                "cache_size",
                expected=f"less than the {suffix} steps of --suffix, so that some step has all its predecessors",
                got=self.config.cache_size,
                remedy="Decode more steps, or look back less far.",
            )
        if self.config.topk >= prefilled:
            raise InputError(
                "topk",
                expected=f"less than the {prefilled} tokens prefilled at the smallest context",
                got=self.config.topk,
                remedy="A support that holds nearly everything overlaps any other: choose fewer keys.",
            )
        return points

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """Those of `perplexity`, and what a support is."""
        own = {"topk": self.config.topk, "cache_size": self.config.cache_size}
        return {**super().parameters(setting, context, document), **own}

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Decode once, keeping every query and its exact support, then compare them."""
        from sparsesel.eval.shadow import Watched, exact_support

        queries: dict[int, list[Tensor]] = {}
        supports: dict[int, list[Tensor]] = {}

        def keep(step: "Step") -> None:
            queries.setdefault(step.layer_idx, []).append(step.query[0, :, 0].float().cpu())
            supports.setdefault(step.layer_idx, []).append(exact_support(step, self.config.topk).cpu())

        tokens = bench.tensor(case.tokens)
        prefill = bench.prefill(tokens[: case.prefill], specs, wrap=lambda selector: Watched(selector, keep))
        for spec in specs:
            queries.clear()
            supports.clear()
            known = score(prefill, spec, tokens[case.prefill :])
            bench.doing("comparing queries")
            decoded = {name: known[name] for name in ("perplexity", "nll", "tokens")}
            yield spec, {**decoded, **summary(queries, supports, self.config.cache_size)}

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """For each context: overlap by cosine similarity, coverage by R, and both by layer and head."""
        tables: list[Table] = []
        figures: list[Figure] = []
        for context, rows in rows_by_context(lines).items():
            for row in rows:
                shown = _tables(context, row)
                tables += shown[0]
                figures += shown[1]
        return [Section("Reuse study", tables, about(lines), _notes(lines), figures)] if lines else []


@dataclass(frozen=True)
class Pairs:
    """Queries of one head, T of them in the order of their steps, and how their supports overlap.

    Attributes:
        cosine: `[T, T]` float64.
        overlap: `[T, T]` float64, |E_i ∩ E_j| / K.
        coverage: `[T - C, R]` float64: of each step with C predecessors, the share of its support that the union of
            the supports of the 1 … R most similar ones holds.
        recent: `[T - C, R]` the same of the R latest.
        best: `[T - C]` int64, its most similar predecessor.
    """

    cosine: "Tensor"
    overlap: "Tensor"
    coverage: "Tensor"
    recent: "Tensor"
    best: "Tensor"


def compare_queries(queries: "Tensor", supports: "Tensor", cache_size: int) -> Pairs:
    """Compare the queries of one head, and their supports.

    Args:
        queries: `[T, D]`.
        supports: `[T, K]` positions, none of them padding.
        cache_size: C, how far back predecessors go; less than T.
    """
    import torch
    import torch.nn.functional as F

    count, topk = supports.shape
    normalised = F.normalize(queries.double(), dim=-1)
    cosine = normalised @ normalised.T
    # Over the positions that some support holds, however long the context.
    positions, columns = supports.unique(return_inverse=True)
    holds = torch.zeros(count, len(positions), dtype=torch.bool).scatter_(1, columns, True)
    overlap = (holds.float() @ holds.float().T).double() / topk

    steps = torch.arange(cache_size, count)
    latest_first = steps[:, None] - torch.arange(1, cache_size + 1)  # [T - C, C]
    order = cosine[steps[:, None], latest_first].sort(dim=1, descending=True, stable=True).indices
    similar_first = latest_first.gather(1, order)

    def covered(chosen: "Tensor") -> "Tensor":
        union = torch.zeros(len(steps), len(positions), dtype=torch.bool)
        shares: list[Tensor] = []
        for recalled in chosen[:, :MAX_RECALL].T:
            union |= holds[recalled]
            shares.append((union & holds[steps]).sum(1).double() / topk)
        return torch.stack(shares, dim=1)

    return Pairs(cosine, overlap, covered(similar_first), covered(latest_first), similar_first[:, 0])


def summary(
    queries: "Mapping[int, Sequence[Tensor]]", supports: "Mapping[int, Sequence[Tensor]]", cache_size: int
) -> dict[str, Any]:
    """What all layers' and heads' pairs say together.

    Args:
        queries: Layer to `[Hq, D]` of each step.
        supports: Layer to `[Hq, K]` of each step.
        cache_size: C.
    """
    import torch

    bins = len(COSINE_BINS) - 1
    totals = {name: [0.0] * bins for name in ("pairs", "overlap", "best_pairs", "best_overlap")}
    layers = sorted(queries)
    maps: dict[str, list[list[float]]] = {"best_overlap_map": [], "coverage_map": []}
    coverage: list[Tensor] = []
    recent: list[Tensor] = []
    best: list[Tensor] = []

    def add(name: str, cosine: "Tensor", overlap: "Tensor") -> None:
        for key, weights in (("pairs", None), ("overlap", overlap)):
            found = bin_sums(cosine, COSINE_BINS, weights)
            totals[name + key] = [a + b for a, b in zip(totals[name + key], found, strict=True)]

    for layer in layers:
        by_head = zip(torch.stack(list(queries[layer]), 1), torch.stack(list(supports[layer]), 1), strict=True)
        for row in maps.values():
            row.append([])
        for own, chosen in by_head:
            pairs = compare_queries(own, chosen, cache_size)
            later, earlier = torch.tril_indices(len(own), len(own), -1)
            add("", pairs.cosine[later, earlier], pairs.overlap[later, earlier])
            steps = torch.arange(cache_size, len(own))
            nearest = torch.stack([pairs.cosine[steps, pairs.best], pairs.overlap[steps, pairs.best]])
            add("best_", *nearest)
            maps["best_overlap_map"][-1].append(float(nearest[1].mean()))
            maps["coverage_map"][-1].append(float(pairs.coverage[:, _MAP_RECALL - 1].mean()))
            coverage.append(pairs.coverage.mean(0))
            recent.append(pairs.recent.mean(0))
            best.append(nearest.mean(1))
    best_cosine, best_overlap = torch.stack(best).mean(0).tolist()
    return {
        "cosine_bins": list(COSINE_BINS),
        "pairs_by_cosine": totals["pairs"],
        "overlap_by_cosine": bin_means(totals["overlap"], totals["pairs"]),
        "best_pairs_by_cosine": totals["best_pairs"],
        "best_overlap_by_cosine": bin_means(totals["best_overlap"], totals["best_pairs"]),
        "overlap": sum(totals["overlap"]) / sum(totals["pairs"]),
        "best_cosine": best_cosine,
        "best_overlap": best_overlap,
        "coverage": torch.stack(coverage).mean(0).tolist(),
        "coverage_recent": torch.stack(recent).mean(0).tolist(),
        "layers": layers,
        **maps,
    }


def _tables(context: int, row: Row) -> tuple[list[Table], list[Figure]]:
    """What the documents at one context say together."""
    found = [line["metrics"] for line in row.lines.values()]
    parameters = next(iter(row.lines.values()))["provenance"]["parameters"]
    topk, cache_size = parameters["topk"], parameters["cache_size"]
    documents = f"{len(found)} document{'s' * (len(found) > 1)} of {found[0]['tokens']} steps"
    where = f"context {context}, {documents}, K={topk}"
    caption = f"Dense decoding, {documents}; supports are exact top-{topk}, pairs are of one layer and head."

    edges = found[0]["cosine_bins"]
    counts = {name: [metrics[f"{name}_by_cosine"] for metrics in found] for name in ("pairs", "best_pairs")}
    overlap = pooled([metrics["overlap_by_cosine"] for metrics in found], counts["pairs"])
    best = pooled([metrics["best_overlap_by_cosine"] for metrics in found], counts["best_pairs"])
    by_cosine = Table(
        f"Overlap of exact supports by cosine similarity of their queries: {where}",
        [*bin_names(edges), "all"],
        [
            Column("pairs", [*(sum(c) for c in zip(*counts["pairs"], strict=True)), _total(counts["pairs"])], 0),
            Column("overlap", [*overlap, _mean(found, "overlap")], 3),
            Column(
                "pairs with\nbest one",
                [*(sum(c) for c in zip(*counts["best_pairs"], strict=True)), _total(counts["best_pairs"])],
                0,
            ),
            Column("overlap\nwith it", [*best, _mean(found, "best_overlap")], 3),
        ],
        kind="cosine",
    )
    similar, latest = (
        [sum(values) / len(found) for values in zip(*(metrics[name] for metrics in found), strict=True)]
        for name in ("coverage", "coverage_recent")
    )
    by_recalled = Table(
        f"Share of an exact support that R predecessors' supports hold: {where}",
        [str(recalled) for recalled in range(1, MAX_RECALL + 1)],
        [Column("most similar", similar, 3, better="more"), Column("latest", latest, 3, better="more")],
        kind="R",
    )
    places = middles(edges)
    figures: list[Figure] = [
        Curves(
            f"Overlap of exact supports by similarity of queries, context {context}",
            "cosine similarity of two queries (middle of its bin)",
            "overlap |E ∩ E'| / K",
            [Series("all pairs", places, overlap), Series(f"best of the last {cache_size}", places, best)],
            caption=f"{caption} Counterpart of the paper's figure 2.",
        ),
        Curves(
            f"Coverage of an exact support by R recalled ones, context {context}",
            "R, supports recalled",
            "share of the exact support",
            [
                Series(name, [float(r) for r in range(1, MAX_RECALL + 1)], values)
                for name, values in ((f"most similar of the last {cache_size}", similar), ("latest", latest))
            ],
            caption=f"{caption} Counterpart of the paper's figure 3.",
        ),
    ]
    titles = {
        "best_overlap_map": "Overlap with the support of the most similar query",
        "coverage_map": f"Coverage by the {_MAP_RECALL} most similar queries' supports",
    }
    for name, title in titles.items():
        maps = [metrics[name] for metrics in found]
        figures.append(
            HeatMap(
                f"{title}, context {context}",
                "query head",
                "layer",
                [str(head) for head in range(len(maps[0][0]))],
                [str(layer) for layer in found[0]["layers"]],
                [[sum(cells) / len(cells) for cells in zip(*heads, strict=True)] for heads in zip(*maps, strict=True)],
                low=0.0,
                high=1.0,
                caption=f"{caption} Means over steps and documents.",
            )
        )
    return [by_cosine, by_recalled], figures


def _total(counts: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, counts))


def _mean(found: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean over documents, which have as many pairs each."""
    return sum(metrics[name] for metrics in found) / len(found)


def _notes(lines: Sequence[Line]) -> list[str]:
    parameters = lines[0]["provenance"]["parameters"]
    places = dict.fromkeys(f"{line['provenance']['backend']} on {line['provenance']['device']}" for line in lines)
    return [
        "Pairs: two decode steps of one layer and query head; best one: each step with its most similar predecessor "
        f"among the {parameters['cache_size']} before it. Steps with fewer count among all pairs alone. "
        f"Queries are post-RoPE and come from dense decoding on {', '.join(places)}; nothing is modelled."
    ]
