"""How long the attention of one token takes, over all layers, with every selector on the same backend, side by side.

No model is run: queries, keys and values are random, of the model's own geometry or of one that is given. What decides
the time of a selector that reuses is how often it cannot; that is set, from other results or by numbers.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from sparsesel.config import AnyConfig, LayeredConfig, SelectorConfig, TaskConfig, absolute_path
from sparsesel.errors import InputError
from sparsesel.eval.cost import bandwidth_of
from sparsesel.eval.figures import Bars, Curves, Figure, Series
from sparsesel.eval.paths import Geometry, PathMix, configs_by_layer, step_bytes
from sparsesel.eval.report import Line, Row, measured_on, reference_of, rows_by_context
from sparsesel.eval.results import scan_results
from sparsesel.eval.tables import Column, Section, Table
from sparsesel.eval.task import Bench, Case, Metrics, Setting, Task

_PAPER = "0.875/0.119/0.006"
_COUNTING = ("perplexity", "fidelity", "sensitivity", "ablation")  # tasks whose paths are those of a text
_SHARES = ("exact_share", "reuse_share", "refresh_share", "miss_share")
_LEAST_PROMPT = 40
_WIDEST = 65_536  # heads of a layer, or channels of a head
_OTHER = "other"  # of stages: what nobody names
_PARTS = 7  # of a bar, beside the last
_UNTIMED = 6  # steps beside those of the field


class LatencyConfig(TaskConfig):
    """What is timed, and how often."""

    heads: int | None = Field(
        default=None,
        ge=1,
        le=_WIDEST,
        description="Query heads of a layer.",
        json_schema_extra={"default": "the model's"},
    )
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=_WIDEST,
        description="Key-value heads of a layer, a divisor of its query heads.",
        json_schema_extra={"default": "the model's"},
    )
    head_dim: int | None = Field(
        default=None, ge=2, le=_WIDEST, description="Channels of a head.", json_schema_extra={"default": "the model's"}
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Layers with attention.",
        json_schema_extra={"default": "the model's"},
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None,
        description="Type of queries, keys and values.",
        json_schema_extra={"default": "float32 on the CPU, bfloat16 elsewhere"},
    )
    path_mix: str = Field(
        default=_PAPER,
        description="Shares of reuse, fallback and refresh, as numbers (the paper's at 16K by default), or a folder of "
        "results of perplexity or fidelity with the same selectors, of which each gets its own.",
    )
    steps: int = Field(
        default=16, ge=1, le=100_000, description="Steps timed, each of them with new queries and one more key."
    )
    repeats: int = Field(default=5, ge=1, le=10_000, description="Times that every step is timed; its median counts.")
    similarity: float = Field(
        default=0.97, ge=0, le=1, description="Cosine of a query to the earlier ones that it is like."
    )
    bandwidth: Annotated[float, BeforeValidator(bandwidth_of)] | None = Field(
        default=None,
        description="Memory bandwidth in GB/s, or a device's name, that times are held against.",
        json_schema_extra={"default": "measured by copying"},
    )
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = Field(
        default=(),
        strict=False,
        description="Of selectors that have them, also each of these levels of fusion (retopk: 1 to 5); Triton only.",
        json_schema_extra={"default": "none"},
    )

    @field_validator("path_mix")
    @classmethod
    def _mix_adds_up(cls, value: str) -> str:
        return value if PathMix.parse(value) is not None else absolute_path(value)


class Latency(Task[LatencyConfig]):
    """One document at each context: the last step timed sees that many keys."""

    needs_model: ClassVar[bool] = False

    def __init__(self, config: LatencyConfig) -> None:
        super().__init__(config)
        self._mix = PathMix.parse(config.path_mix)
        self._counted: list[Line] = []
        self._levels: dict[str, int] = {}
        self._geometry: Geometry | None = None
        self._bandwidth = config.bandwidth

    def points(self, setting: Setting) -> Iterable[tuple[int, int]]:
        """Every context."""
        least = _LEAST_PROMPT + self.config.steps + _UNTIMED
        if min(setting.contexts) < least:
            raise InputError(
                "context",
                expected=f"at least {least}: {_LEAST_PROMPT} tokens of a prompt, and the steps",
                got=min(setting.contexts),
                remedy="Choose a larger --context, or fewer --steps.",
            )
        self._geometry = self._shape(setting)
        return [(context, 0) for context in setting.contexts]

    def parameters(self, setting: Setting, context: int, document: int) -> Mapping[str, Any]:
        """Everything but what selectors there are."""
        geometry = self._shape(setting)
        own = self.config.model_dump(mode="json", exclude={"levels"})
        return {
            **own,
            # Of a folder what it says, wherever it is.
            "path_mix": self.config.path_mix if self._mix is not None else f"results sha256:{_sha256(self._counted)}",
            "heads": geometry.heads,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "layers": len(geometry.layers),
            "dtype": geometry.dtype,
        }

    def steps(self, context: int, document: int) -> int:
        """Steps of all repeats."""
        return 1 + self.config.repeats * (self.config.steps + 2)

    def selectors(self, given: Mapping[str, AnyConfig]) -> Mapping[str, AnyConfig]:
        """Those named, and their levels.

        Raises:
            InputError: No selector has levels, or the folder of `path_mix` does not say what a selector did.
        """
        if self._mix is None:
            self._counted = _counted(self.config.path_mix)
            for spec, config in given.items():
                if _reuses(config):
                    self._mix_of(spec, config, 0)
        chosen: dict[str, AnyConfig] = {}
        for spec, config in given.items():
            chosen[spec] = config
            if self.config.levels and _has_levels(config):
                names = {f"{spec} L{level}": level for level in self.config.levels}
                self._levels |= names
                chosen |= dict.fromkeys(names, config)
        if self.config.levels and not self._levels:
            raise InputError(
                "levels", expected="a selector with levels of fusion", got=", ".join(given), remedy="Name retopk."
            )
        return chosen

    def prepare(self, setting: Setting, context: int, document: int) -> Case:
        """No prompt: everything is random."""
        details = {"context": context, **({} if self._mix is not None else {"path_mix_folder": self.config.path_mix})}
        return Case(tokens=(), prefill=0, steps=self.steps(context, document), details=details, from_texts=False)

    def measure(self, bench: Bench, case: Case, specs: Sequence[str]) -> Iterator[tuple[str, Metrics]]:
        """Time all selectors in turn, then say of each what was found.

        Raises:
            MeasurementError: A selector did not act in every step, layer and head.
            InputError: The memory does not suffice, or levels are asked for on another backend than Triton.
        """
        from sparsesel.eval.attention_step import AttentionSteps, Schedule, copy_bandwidth, counted, milliseconds

        if self._levels and bench.backend != "triton":
            raise InputError(
                "levels",
                expected="backend triton, whose steps are fused",
                got=f"backend {bench.backend}",
                remedy="Leave --levels out.",
            )
        config, geometry, context = self.config, self._geometry, case.details["context"]
        if geometry is None:
            raise RuntimeError("points is asked for first")
        if self._bandwidth is None:
            bench.doing("bandwidth")
            self._bandwidth = copy_bandwidth(bench.device)
        bandwidth = self._bandwidth
        schedule = Schedule(context, config.steps, config.repeats, config.similarity)
        bench.doing("random keys and values")
        attention = AttentionSteps(geometry, schedule, bench.device, bench.backend, bench.seed)
        chosen = {
            spec: (
                self._made(spec, bench.selectors[spec], geometry),
                self._mix_of(spec, bench.selectors[spec], context),
            )
            for spec in specs
        }
        bench.doing("attention")
        for spec, one in attention.time(chosen, bench.advance).items():
            middle, fastest, slowest = milliseconds(one, config.steps)
            shares = counted(one)
            read = step_bytes(bench.selectors[spec], attention.layers, context, shares)
            modelled = read / (bandwidth * 1e6)
            yield (
                spec,
                {
                    "attention_ms": middle,
                    "attention_ms_range": [fastest, slowest],
                    **shares,
                    "path_mix": str(one.mix),
                    "bytes_per_step": read,
                    "bandwidth": bandwidth,
                    "modelled_ms": modelled,
                    "roofline_share": modelled / middle,
                    "stage_ms": one.stages,
                },
            )

    @classmethod
    def report(cls, lines: Sequence[Line]) -> list[Section]:
        """Times, speedups and bytes at each context, where the time goes, and how it grows."""
        if not lines:
            return []
        tables: list[Table] = []
        bars: list[Figure] = []
        by_context = rows_by_context(lines)
        caption = _where(lines)
        for context, rows in by_context.items():
            tables += [_times(context, rows), _work(context, rows), _stages(context, rows)]
            bars.append(_bars(context, rows, caption))
        figures = [*_curves(by_context, caption), *bars]
        return [Section("Latency of attention", tables, _about(lines), (caption, _NOTE), figures)]

    def _shape(self, setting: Setting) -> Geometry:
        """What is timed: the model's layers, but for what is given."""
        from sparsesel.hf.models import default_device

        config = self.config
        dtype = config.dtype or ("float32" if default_device() == "cpu" else "bfloat16")
        own = None
        if None in (config.heads, config.kv_heads, config.head_dim, config.layers):
            own = Geometry.of(setting.model_config, dtype)
        heads = config.heads or (own.heads if own else 0)
        kv_heads = config.kv_heads or (own.kv_heads if own else 0)
        if heads % kv_heads:
            raise InputError(
                "kv_heads",
                expected=f"a divisor of the {heads} query heads",
                got=kv_heads,
                remedy="Give both heads and kv_heads.",
            )
        return Geometry(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.head_dim or (own.head_dim if own else 0),
            layers=tuple(range(config.layers)) if config.layers else (own.layers if own else ()),
            dtype=dtype,
        )

    def _made(self, spec: str, config: AnyConfig, geometry: Geometry) -> list[Any]:
        """The selector of each layer."""
        from sparsesel.registry import registry

        configs = configs_by_layer(config, geometry.layers)
        made = {one: registry().make_selector(one) for one in dict.fromkeys(configs)}
        if spec in self._levels:
            made = {one: dataclasses.replace(selector, level=self._levels[spec]) for one, selector in made.items()}  # pyright: ignore[reportArgumentType]
        return [made[one] for one in configs]

    def _mix_of(self, spec: str, config: AnyConfig, context: int) -> PathMix:
        """How often a selector's heads turn: as given, or as results with the same configuration say.

        Raises:
            InputError: They do not say.
        """
        if self._mix is not None:
            together = any(one.name == "tokenselect" for one in _configs(config))
            return dataclasses.replace(self._mix, together=together)
        same = [line for line in self._counted if line["config"] == config.model_dump(mode="json")]
        if not same:
            if not _reuses(config):
                return PathMix()
            raise InputError(
                "path_mix",
                expected=f"results of perplexity or fidelity with the selector {spec}, configured alike",
                got=f"none in {self.config.path_mix}",
                remedy="Measure it there, or give numbers such as " + _PAPER + ".",
            )
        nearest = min(abs(line["context"] - context) for line in same)
        here = [line["metrics"] for line in same if abs(line["context"] - context) == nearest]
        means = {
            name: sum(known) / len(known)
            for name in _SHARES
            if (known := [one[name] for one in here if one.get(name) is not None])
        }
        return PathMix.counted(means)


def _counted(folder: str) -> list[Line]:
    """Results of other tasks that counted paths.

    Raises:
        InputError: There is no such folder, or there are none in it.
    """
    problem = ""
    lines: list[Line] = []
    try:
        numbered, problems = scan_results(Path(folder))
        lines = [line for _, line in numbered if line["task"] in _COUNTING]
        problem = " ".join(problems) or ("" if lines else "no such results")
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise InputError(
            "path_mix",
            expected="a folder with results of perplexity or fidelity, or numbers such as " + _PAPER,
            got=f"{folder}: {problem}",
            remedy="Name the folder that such a run wrote to, or give shares of reuse, fallback and refresh.",
        )
    return lines


def _sha256(lines: Iterable[Line]) -> str:
    """Of what results say of paths, in whatever order they stand."""
    said = [
        json.dumps([line["config"], line["context"], [line["metrics"].get(name) for name in _SHARES]], sort_keys=True)
        for line in lines
    ]
    return hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()


def _configs(config: AnyConfig) -> list[SelectorConfig]:
    return list(config.layers.values()) if isinstance(config, LayeredConfig) else [config]


def _reuses(config: AnyConfig) -> bool:
    """Whether it asks in each step if it may reuse an earlier choice."""
    return any(hasattr(one, "similarity_threshold") for one in _configs(config))


def _has_levels(config: AnyConfig) -> bool:
    from sparsesel.registry import registry

    return isinstance(config, SelectorConfig) and hasattr(registry().make_selector(config), "level")


_NOTE = (
    "ms: attention of one token over all layers, the median of repeats for every step, the mean over steps; range: "
    "with the fastest and the slowest repeats instead. ×exact, ×full: speedups over these, by time where measured, "
    "by bytes where modelled. MB: what a step reads by design, with the paths taken and candidates counted; "
    "roofline: time that these bytes take at the bandwidth over the time measured. Stages are timed in steps of "
    "their own, in which timing every operation takes time too, so that they may add up to more; other is what no "
    "stage takes: operations beside them, Python, or gaps between kernels. On a GPU times are the device's own, "
    "without launching. Queries, keys and values are random; how often heads cannot reuse is set."
)


def _parameters(lines: Sequence[Line]) -> Mapping[str, Any]:
    return lines[0]["provenance"]["parameters"]


def _about(lines: Sequence[Line]) -> str:
    shapes = dict.fromkeys(
        "{layers} layers of {heads} query heads over {kv_heads} key-value heads of {head_dim}, {dtype}".format(
            **line["provenance"]["parameters"]
        )
        for line in lines
    )
    mixes = dict.fromkeys(str(line["provenance"]["parameters"]["path_mix"]) for line in lines)
    return f"{'; '.join(shapes)}; random data; reuse/fallback/refresh as set: {', '.join(mixes)}"


def _where(lines: Sequence[Line]) -> str:
    places, eager = measured_on(lines, "device_name")
    given = _parameters(lines).get("bandwidth") is not None
    speeds = dict.fromkeys(f"{line['metrics']['bandwidth']:.0f}" for line in lines)
    return (
        f"Measured: {places}"
        + ", which tells how long these PyTorch operations take and is no measure of a kernel's speed" * eager
        + f". Bandwidth {', '.join(speeds)} GB/s, {'given' if given else 'measured by copying'}."
    )


def _ratios(rows: Sequence[Row], metric: str, name: str) -> list[float | None]:
    """A reference's metric over each row's."""
    found: list[float | None] = []
    for row in rows:
        reference = reference_of(row, rows, name)
        own, other = row.mean(metric), reference.mean(metric) if reference is not None else None
        found.append(other / own if own and other else None)
    return found


def _times(context: int, rows: Sequence[Row]) -> Table:
    def range_of(row: Row) -> str:
        (low, high), *_ = row.values("attention_ms_range")  # pyright: ignore[reportGeneralTypeIssues]
        return f"{low:.3g}-{high:.3g}"

    return Table(
        f"Attention of one token, context {context}, measured",
        [row.selector for row in rows],
        [
            Column("ms", [row.mean("attention_ms") for row in rows], 3, better="less"),
            Column("range", [range_of(row) for row in rows]),
            Column("×exact", _ratios(rows, "attention_ms", "exact_topk"), 2, better="more"),
            Column("×full", _ratios(rows, "attention_ms", "full"), 2, better="more"),
            Column("roof-\nline", [row.mean("roofline_share") for row in rows], 1, percent=True, better="more"),
        ],
        sum(row.is_reference for row in rows),
    )


def _work(context: int, rows: Sequence[Row]) -> Table:
    def share(heading: str, metric: str) -> Column:
        return Column(heading, [row.mean(metric) for row in rows], 1, percent=True)

    return Table(
        f"Paths taken and what they read by design, context {context}, modelled",
        [row.selector for row in rows],
        [
            share("exact", "exact_share"),
            share("reuse", "reuse_share"),
            share("miss", "miss_share"),
            Column("candi-\ndates", [row.candidates for row in rows], 1),
            Column("MB", [_scaled(row.mean("bytes_per_step")) for row in rows], 2, better="less"),
            Column("ms", [row.mean("modelled_ms") for row in rows], 3, better="less"),
            Column("×exact", _ratios(rows, "bytes_per_step", "exact_topk"), 2, better="more"),
            Column("×full", _ratios(rows, "bytes_per_step", "full"), 2, better="more"),
        ],
        sum(row.is_reference for row in rows),
    )


def _scaled(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def stages_of(row: Row) -> dict[str, float]:
    """Milliseconds of each stage of a row; what is left of the whole is part of `other`."""
    (line,) = list(row.lines.values())[:1]
    stages = dict(line["metrics"]["stage_ms"])
    rest = line["metrics"]["attention_ms"] - sum(stages.values())
    return {**stages, _OTHER: stages.get(_OTHER, 0.0) + rest} if rest > 0 else stages


def _stage_names(rows: Sequence[Row]) -> list[str]:
    """Every stage, the longest first, `other` last."""
    total: dict[str, float] = {}
    for row in rows:
        for stage, taken in stages_of(row).items():
            total[stage] = total.get(stage, 0.0) + taken
    return sorted(total, key=lambda stage: (stage == _OTHER, -total[stage]))


def _stages(context: int, rows: Sequence[Row]) -> Table:
    columns = [
        Column(name.replace(" ", "\n"), [stages_of(row).get(name) for row in rows], 2) for name in _stage_names(rows)
    ]
    references = sum(row.is_reference for row in rows)
    return Table(f"Stages of a step in ms, context {context}", [row.selector for row in rows], columns, references)


def _bars(context: int, rows: Sequence[Row], caption: str) -> Bars:
    """The longest stages, all else in one part: more would not be told apart."""
    every = [name for name in _stage_names(rows) if name != _OTHER]
    names, dropped = every[:_PARTS], every[_PARTS:]
    parts = [(name, [stages_of(row).get(name, 0.0) for row in rows]) for name in names]
    others = [sum(taken for name, taken in stages_of(row).items() if name not in names) for row in rows]
    return Bars(
        f"Stages of a token's attention, context {context}",
        "ms per token, all layers",
        [row.selector for row in rows],
        [*parts, (_OTHER, others)],
        caption=caption + f" {', '.join(dropped)}: part of {_OTHER} here." * bool(dropped),
    )


def _curves(by_context: Mapping[int, Sequence[Row]], caption: str) -> list[Figure]:
    if len(by_context) < 2:
        return []
    names = dict.fromkeys(row.selector for rows in by_context.values() for row in rows)
    contexts = list(by_context)

    def series(values: Mapping[int, Mapping[str, float | None]]) -> list[Series]:
        return [Series(name, contexts, [values[context].get(name) for context in contexts]) for name in names]

    def per_row(value: Any) -> dict[int, dict[str, float | None]]:
        return {
            context: dict(zip([row.selector for row in rows], value(rows), strict=True))
            for context, rows in by_context.items()
        }

    def curves(title: str, label: str, value: Any, *, log_y: bool = False, modelled: bool = False) -> Curves:
        text = "Modelled, not measured: bytes by design, with the paths taken." if modelled else caption
        return Curves(title, "context (tokens)", label, series(per_row(value)), log_x=True, log_y=log_y, caption=text)

    figures: list[Figure] = [
        curves(
            "Attention against context",
            "ms per token, all layers",
            lambda rows: [row.mean("attention_ms") for row in rows],
            log_y=True,
        )
    ]
    if any(row.config.get("name") == "exact_topk" for rows in by_context.values() for row in rows):
        figures += [
            curves(
                "Speedup over exact top-K",
                "times as fast as exact_topk",
                lambda rows: _ratios(rows, "attention_ms", "exact_topk"),
                log_y=True,
            ),
            curves(
                "Speedup over exact top-K, modelled",
                "bytes of exact_topk over the selector's",
                lambda rows: _ratios(rows, "bytes_per_step", "exact_topk"),
                log_y=True,
                modelled=True,
            ),
        ]
    return figures
