"""What there is to compile: every launch of every kernel of the operations and of the selectors that ship.

A launch's configuration follows from the selector's variant and from the geometry it serves. Of all combinations, as
many are traced (on tensors without content) as it takes for every pair of values to occur together.
"""

import ast
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsesel import KVView, LayerSpec, make_selector, ops
from sparsesel.explain import meta_view, trace
from sparsesel.ops import backend
from sparsesel.ops.launch import Launch, recording
from sparsesel.registry import registry
from sparsesel.rotary import Rotary

ROOT = Path(__file__).parent.parent

# The lengths: less than a budget or not much more; some thousands, odd as most lengths are; many.
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_dim": (64, 80, 96, 128, 256),
    "group_size": (1, 4, 7, 16),
    "layout": ("dense", "left-padded", "paged"),
    "length": (515, 4099, 131072),
    "batch_size": (1, 8),
}
# A usual one, and one that asks much of registers and shared memory.
STARTS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16, "head_dim": 128, "group_size": 7, "layout": "dense", "length": 131072, "batch_size": 1},
    {"dtype": torch.float32, "head_dim": 256, "group_size": 4, "layout": "paged", "length": 4099, "batch_size": 8},
)
# What asks the most of them, and pairs of values alone may leave out: wide heads, many to a key-value head.
CORNERS: tuple[dict[str, Any], ...] = tuple(
    {"dtype": dtype, "head_dim": 256, "group_size": 16, "layout": "paged", "length": 131072, "batch_size": 1}
    for dtype in (torch.bfloat16, torch.float32)
)
PAGE = 16
BUDGET = 512
KV_HEADS = {1: 8, 4: 8, 7: 4, 16: 2}

# Beside the defaults: what else changes a selector's kernels.
VARIANTS: dict[str, tuple[str, ...]] = {
    "exact_topk": ("exact_topk,topk=6.25%",),
    "retopk": ("retopk:group", "retopk,topk=6.25%", "retopk,retrieval=recent"),
    "streaming_llm": ("streaming_llm,positions=cache", "streaming_llm,topk=6.25%"),
    "quest": ("quest,page_size=4", "quest,topk=6.25%"),
    "sparq": ("sparq,rank=64", "sparq,reallocate=false"),
    "loki": ("loki,rank=32",),
}
# As small as numbers get: what is 1 is a constant to Triton. These and presets are traced at `STARTS` and `CORNERS`.
SMALLEST = {
    "exact_topk": ("exact_topk,topk=1",),
    "retopk": ("retopk,topk=1", "retopk,topk=1,cache_size=1,recall_size=1,window_size=1,refresh_interval=1"),
    "streaming_llm": ("streaming_llm,topk=2,sink_size=1", "streaming_llm,topk=2,sink_size=1,positions=cache"),
    "quest": ("quest,topk=1,page_size=1",),
    "sparq": ("sparq,topk=1,rank=1", "sparq,topk=1,rank=1,local_size=1"),
    "loki": ("loki,topk=1,rank=1",),
    "tokenselect": ("tokenselect,topk=3,sink_size=1,local_size=1",),
}
# As large as numbers get; traced at `CORNERS` alone.
LARGEST = {"sparq": ("sparq,rank=256",), "loki": ("loki,rank=256",)}
LEVELS = (1, 2, 3, 5)  # stages of fusion that retopk has beside its own choice


def kernels() -> set[str]:
    """`module:function` of every kernel in the sources."""
    found = set()
    for path in [*ROOT.glob("sparsesel/ops/*.py"), *ROOT.glob("plugins/*/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("plugins.")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
                if "triton.jit" in decorators:
                    found.add(f"{module}:{node.name}")
    return found


def pairwise(axes: Mapping[str, Sequence[Any]], first: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Combinations, `first` leading, in which every value of every axis occurs with every value of every other."""
    names = list(axes)

    def pairs(combination: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, combination[a], b, combination[b]) for a, b in itertools.combinations(names, 2)}

    chosen = [dict(one) for one in first]
    candidates = [
        (one, pairs(one)) for one in (dict(zip(names, v, strict=True)) for v in itertools.product(*axes.values()))
    ]
    missing = set().union(*(covered for _, covered in candidates)).difference(*map(pairs, chosen))
    while missing:
        best, covered = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen


@dataclass(frozen=True)
class Found:
    """What tracing gave.

    Attributes:
        launches: One launch of each configuration, in a fixed order.
        sample: One of each kernel.
        failures: What could not be traced, and why.
    """

    launches: list[Launch]
    sample: list[Launch]
    failures: list[str]


def collect() -> Found:
    """Trace everything."""
    found: dict[Any, Launch] = {}
    sample: dict[str, Launch] = {}
    failures: dict[str, str] = {}
    groups = {"operations": _operations(), **_selectors()}
    largest = _largest()
    named = {variant for variants in VARIANTS.values() for variant in variants}
    brief = {variant for variants in groups.values() for variant in variants if ":" in variant} - named
    brief |= {variant for variants in SMALLEST.values() for variant in variants}
    for name, variants in groups.items():
        starts = [{"variant": variant, **geometry} for geometry in STARTS for variant in variants]
        varied = [variant for variant in variants if variant not in brief]
        variants = variants | largest.get(name, {})
        corners = [{"variant": variant, **geometry} for geometry in CORNERS for variant in variants]
        for combination in [*pairwise({"variant": varied, **AXES}, starts), *corners]:
            geometry = dict(combination)
            variant = geometry.pop("variant")
            try:
                launches = variants[variant](**geometry)
            except Exception as error:  # whatever stops a trace: the others go on
                reason = f"{name} {variant} cannot be traced at {geometry}: {type(error).__name__}: {error}"
                failures.setdefault(f"{name} {variant}", reason)
                continue
            for launch in launches:
                found.setdefault(launch.configuration, launch)
                sample.setdefault(launch.kernel, launch)
    return Found(list(found.values()), list(sample.values()), list(failures.values()))


Tracer = Callable[..., list[Launch]]
"""From a geometry, an item of each of `AXES`, to launches."""


def _selectors() -> dict[str, dict[str, Tracer]]:
    """Every variant of every selector that ships with sparsesel."""
    found: dict[str, dict[str, Tracer]] = {}
    for name, registered in registry().selectors.items():
        if registered.distribution != "sparsesel":
            continue
        specs = [name, *VARIANTS.get(name, ()), *SMALLEST.get(name, ())]
        specs += [f"{name}:{preset}" for preset in registry().presets(name)]
        found[name] = {spec: functools.partial(_of_selector, spec, {}) for spec in specs}
        if name == "retopk":
            found[name] |= {f"level {n}": functools.partial(_of_selector, name, {"level": n}) for n in LEVELS}
    return found


def _largest() -> dict[str, dict[str, Tracer]]:
    """What is traced at `CORNERS` alone."""
    found: dict[str, dict[str, Tracer]] = {
        name: {spec: functools.partial(_of_selector, spec, {}) for spec in specs} for name, specs in LARGEST.items()
    }
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    found["operations"] = {
        f"float32 queries of {name}, lists per {per}": functools.partial(_of_mixed_operations, per, kv_dtype)
        for name, kv_dtype in types.items()
        for per in ("query head", "KV head")
    }
    return found


def _of_selector(spec: str, attributes: dict[str, Any], *, length: int, layout: str, **geometry: Any) -> list[Launch]:
    layer, where = _layer(**geometry), _layout(layout)
    selectors: list[Any] = [make_selector(spec)]
    if attributes:
        selectors = [dataclasses.replace(selectors[0], **attributes)]
    name = selectors[0].config.name
    if registry().get(name).plugin.calibrate:
        selectors = [_Fitted(selectors[0]), make_selector(spec, calibration=_calibration(name, layer))]
    launches = []
    for selector, fused in itertools.product(selectors, (True, False)):
        found = trace(selector, layer, length, **where, fused=fused)
        launches += found.launches
    return launches


class _Fitted:
    """A selector that learns from the prompt, as it is when it has: learning waits for the device, once."""

    def __init__(self, selector: Any) -> None:
        self._selector = selector

    def init_state(self, layer: LayerSpec) -> Any:
        state = self._selector.init_state(layer)
        state.is_fitted = True
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@functools.cache
def _calibrations() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _calibration(name: str, layer: LayerSpec) -> str:
    """File of a calibration on random keys; it is gone when the process ends."""
    path = Path(_calibrations().name) / f"{name}-{layer.num_key_value_heads}-{layer.head_dim}.safetensors"
    if not path.exists():
        calibrator = registry().make_calibrator(name)
        numbers = torch.randn(3, 1, layer.num_key_value_heads, 2 * layer.head_dim, layer.head_dim)
        calibrator.observe(layer, numbers[0], KVView.dense(numbers[1], numbers[2]))
        calibrator.save(path, {})
    return str(path)


def _operations() -> dict[str, Tracer]:
    """The operations themselves, on lists of positions for each query head, for each key-value head and for all."""
    return {f"lists per {per}": functools.partial(_of_operations, per) for per in ("query head", "KV head", "layer")}


def _of_mixed_operations(per: str, kv_dtype: torch.dtype, *, dtype: torch.dtype, **geometry: Any) -> list[Launch]:
    """With queries of float32, whatever the type asked for."""
    return _of_operations(per, query_dtype=torch.float32, dtype=kv_dtype, **geometry)


def _of_operations(
    per: str, *, length: int, layout: str, query_dtype: torch.dtype | None = None, **geometry: Any
) -> list[Launch]:
    layer = _layer(**geometry)
    kv = meta_view(layer, length, length, **_layout(layout))
    batch, heads = layer.batch_size, layer.num_attention_heads
    lists = {"query head": heads, "KV head": layer.num_key_value_heads, "layer": 1}[per]
    with backend.using("triton"), recording() as launches:
        query = torch.empty(batch, heads, 1, layer.head_dim, dtype=query_dtype or layer.dtype, device="meta")
        indices = torch.empty(batch, lists, BUDGET, dtype=torch.int32, device="meta")
        ops.dense_attention(query, kv, scale=1.0)
        scores = ops.qk_scores(query, kv, scale=1.0)
        lengths = kv.lengths[:, None].expand(batch, heads)
        ops.topk_indices(scores, BUDGET, lengths)
        ops.topk_indices(scores, lengths.clamp(max=BUDGET), lengths, widest=BUDGET)
        chosen = ops.indexed_qk(query, kv, indices, scale=1.0)
        ops.softmax_values(chosen, kv, indices)
        ops.sparse_attention(query, kv, indices[:, :, None], scale=1.0)
    return launches


def _layer(*, dtype: torch.dtype, head_dim: int, group_size: int, batch_size: int) -> LayerSpec:
    kv_heads = KV_HEADS[group_size]
    # Not one of the first layers: those are dense in some selectors.
    heads, rotary = kv_heads * group_size, Rotary(torch.empty(head_dim // 2, device="meta"))
    return LayerSpec(8, heads, kv_heads, head_dim, dtype, torch.device("meta"), batch_size, rotary=rotary)


def _layout(layout: str) -> dict[str, Any]:
    return {"page_size": PAGE if layout == "paged" else 0, "left_padded": layout == "left-padded"}
