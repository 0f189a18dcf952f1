"""What is checked and timed: the jobs of each section, and their smallest kind for a run without a GPU."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from gpu.inputs import LAYOUTS, Geometry
from gpu.latency import SCENARIOS, SDPA, named
from gpu.operations import KINDS
from gpu.pool import Job
from kernel_launches import LEVELS, VARIANTS, pairwise

from sparsesel.eval.cost import STRICT
from sparsesel.registry import registry
from sparsesel.testing.inputs import HOSTILE

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dim": (64, 80, 96, 128, 256),
    "group_size": (1, 4, 7, 16),
    "layout": tuple(LAYOUTS),
    "length": (63, 515, 4099, 70001),
}
"""Of the operations; every value of one meets every value of every other."""
USUAL = {"dtype": "bfloat16", "head_dim": 128, "group_size": 7, "layout": "dense", "length": 70001}

SCORES = (  # rows, length, K
    (3, 63, 512),
    (8, 4096, 512),
    (8, 4097, 64),
    (28, 131072, 512),
    (4, 70001, 512),
    (2, 70001, 70000),
    (4, 262144, 2048),
    (2, 1_000_003, 4096),
    (2, 5_000_000, 512),
)

GEOMETRIES = (  # of the selectors; every value of every axis is among them
    Geometry("bfloat16", 128, 7, "dense", 70001),
    Geometry("float32", 256, 4, "paged", 4099),
    Geometry("float16", 80, 1, "left-padded", 515),
    Geometry("bfloat16", 96, 16, "static", 4099),
    Geometry("float16", 64, 7, "paged", 20011),
    Geometry("float32", 128, 1, "left-padded", 63),
)
ALSO = {
    "retopk": (
        "cache_size=6,recall_size=2,refresh_interval=3",
        "similarity_threshold=2.0",
        "similarity_threshold=-1.0,window_size=0,cache_size=4",
        "fallback_scope=group-any",
    ),
    "tokenselect": ("similarity_threshold=2.0",),
}
"""Beside what else changes kernels: paths of a step that a short run would not take."""

TINY = {
    "full": ("",),
    "exact_topk": ("topk=8",),
    "retopk": ("topk=8,cache_size=4,window_size=3,recall_size=2,refresh_interval=2",),
    "streaming_llm": ("topk=12,sink_size=3", "topk=12,sink_size=3,positions=cache"),
    "quest": ("topk=16,page_size=4,dense_layers=0",),
    "sparq": ("topk=8,rank=4",),
    "loki": ("topk=8,rank=4",),
    "tokenselect": ("topk=12,sink_size=3,local_size=4",),
}
TINY_GEOMETRY = Geometry("bfloat16", 16, 2, "paged", 60, kv_heads=1)
TINY_LENGTHS = {"sparq": 300}
"""Of prompts that are taken in by several programs."""
GRAPHS = Geometry("bfloat16", 128, 4, "dense", 3000)
CONTEXTS = (131072, 65536, 32768, 16384)


def ours() -> list[str]:
    """Names of the selectors that ship."""
    return [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]


def _specs(name: str) -> list[tuple[str, int | None]]:
    """Everything that one selector can be, its defaults first, and the level of fusion where there are several."""
    presets = (f"{name}:{preset}" for preset in registry().presets(name))
    also = (f"{name},{change}" for change in ALSO.get(name, ()))
    found: dict[Any, tuple[str, int | None]] = {}
    for spec in (name, *VARIANTS.get(name, ()), *presets, *also):
        found.setdefault(registry().make_config(spec), (spec, None))  # a preset may be the defaults by another name
    return [*found.values(), *((name, level) for level in (LEVELS if name == "retopk" else ()))]


def _tiny_specs(name: str) -> list[tuple[str, int | None]]:
    specs = [",".join(part for part in (name, change) if part) for change in TINY[name]]
    found: list[tuple[str, int | None]] = [(spec, None) for spec in specs]
    return found + [(specs[0], level) for level in (LEVELS if name == "retopk" else ())]


def operations(device: str, *, tiny: bool) -> Iterator[Job]:
    """Every shared operation."""
    geometries = [Geometry(**one) for one in pairwise(AXES, [USUAL])]
    topk, scores, layouts, hostile = 512, SCORES, ("dense", "paged"), HOSTILE
    if tiny:
        geometries = [dataclasses.replace(TINY_GEOMETRY, layout="left-padded")]
        topk, scores, layouts, hostile = 8, ((1, 63, 7), (1, 4200, 5)), ("paged",), HOSTILE[:1]
    for geometry in geometries:
        if geometry.length * geometry.group_size * geometry.head_dim > 1 << 26:  # float64 needs room
            geometry = dataclasses.replace(geometry, kv_heads=1)
        arguments = {"geometry": geometry, "device": device, "topk": topk}
        yield Job(f"operations, {geometry}", "gpu.operations:check_attention", arguments)
    for rows, length, k in scores:
        arguments = {"kinds": KINDS[:2] if tiny else KINDS, "rows": rows, "length": length, "topk": k, "device": device}
        yield Job(f"top {k} of {rows} × {length} scores", "gpu.operations:check_topk", arguments)
    for kind, layout in itertools.product(hostile, layouts):
        arguments = {"kind": kind, "layout": layout, "device": device}
        yield Job(f"operations, {kind}, {layout}", "gpu.operations:check_hostile", arguments)


def selectors(device: str, *, tiny: bool) -> Iterator[Job]:
    """Every selector: its defaults in all geometries, everything else in two; all of them once before any twice."""
    rounds: list[list[Job]] = [[] for _ in GEOMETRIES]
    turn = 0
    for name in ours():
        for number, (spec, level) in enumerate(_tiny_specs(name) if tiny else _specs(name)):
            turn += 1
            for at in range(1 if tiny else len(GEOMETRIES) if number == 0 else 2):
                geometry = GEOMETRIES[(turn + at) % len(GEOMETRIES)]
                if tiny:
                    geometry = dataclasses.replace(TINY_GEOMETRY, length=TINY_LENGTHS.get(name, TINY_GEOMETRY.length))
                arguments = {"spec": spec, "level": level, "geometry": geometry, "steps": 2 if tiny else 6}
                function = "gpu.selectors:check_selector"
                rounds[at].append(Job(f"{named(spec, level)}, {geometry}", function, {**arguments, "device": device}))
    return itertools.chain(*rounds)


def graphs(device: str) -> Iterator[Job]:
    """Every selector's decode step in a graph, dense and paged."""
    paths = [("retopk,refresh_interval=5", None), ("retopk:group", None), ("streaming_llm,positions=cache", None)]
    levels = [("retopk", level) for level in LEVELS]
    for paged in (False, True):
        for spec, level in [*((name, None) for name in ours()), *paths, *levels]:
            arguments = {"spec": spec, "level": level, "geometry": GRAPHS, "steps": 12, "paged": paged}
            name = f"{named(spec, level)}, {'paged' if paged else 'dense'}"
            yield Job(name, "gpu.graphs:check_graph", {**arguments, "device": device})


def latency(device: str, bandwidth: float | None) -> Iterator[Job]:
    """Every selector at every context, the longest first."""
    for context in CONTEXTS:
        for name in SDPA:
            arguments = {"name": name, "context": context, "bandwidth": bandwidth, "device": device}
            yield Job(f"{name}, {context}", "gpu.latency:time_sdpa", arguments, watched=False)
        for scenario in SCENARIOS:
            for spec, level in _compared(scenario):
                arguments = {"spec": spec, "level": level, "context": context, "scenario": scenario}
                name = f"{named(spec, level)}, {context}, {scenario}"
                arguments |= {"bandwidth": bandwidth, "device": device}
                yield Job(name, "gpu.latency:time_selector", arguments, watched=False)


def _compared(scenario: str) -> Iterator[tuple[str, int | None]]:
    """Selectors at the budget of comparisons, ReTopK at every level."""
    for name in ours():
        if name == "retopk":
            spec = "retopk,refresh_interval=0" if scenario == "reuse" else "retopk"
            yield from ((spec, level) for level in sorted({*LEVELS, 4}))
        else:
            yield f"{name}:{STRICT}" if STRICT in registry().presets(name) else name, None
