"""`sparsesel explain`: which backend and kernels would serve a selector, and what they would take."""

import dataclasses
import importlib.util
import itertools
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from sparsesel.cli.console import err, out, print_json, safe
from sparsesel.config import AnyConfig, LayeredConfig, build, spread_layers
from sparsesel.errors import InputError
from sparsesel.eval.cost import CostConfig
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.registry import registry

if TYPE_CHECKING:
    from sparsesel.explain import Explanation
    from sparsesel.ops.compilation import Resources
    from sparsesel.ops.launch import Launch
    from sparsesel.selector import LayerSpec, Selector

_DEVICES = ("cuda", "cpu", "mps")
_LAYERS = 10_000
_PHASES = ("prefill", "first step", "later steps")
_PARTS = ("key_bytes", "value_bytes", "metadata_bytes", "score_bytes")
# Layers that are tried for one that is not dense; no method leaves as many of the first ones dense.
_FIRST_LAYERS = 64


class _Geometry(CostConfig):
    """What is explained."""

    batch: int = Field(ge=1, le=1 << 20, description="B: sequences.")
    page_size: int = Field(ge=0, le=1 << 20, description="Tokens of a block of a paged cache, 0 for a dense one.")
    layer: int | None = Field(ge=0, lt=_LAYERS, description="Index of the layer.")


def explain(
    selector: Annotated[
        str,
        typer.Argument(metavar="SELECTOR", help="name, name:preset or a config file, then optional ,field=value"),
    ],
    heads: Annotated[int, typer.Option("--heads", help="Query heads of a layer.")],
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="Key-value heads of a layer; they divide the heads.")],
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels of a head.")],
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    contexts: Annotated[
        list[int] | None, typer.Option("--context", help="Visible keys; repeatable. [default: 131072]")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cuda, cpu or mps, which need not be there, or a target to compile for, as sm_89 or gfx942. "
            "[default: cuda where torch sees one, else cpu]",
        ),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="auto, triton or eager.")] = "auto",
    batch: Annotated[int, typer.Option("--batch", help="Sequences.")] = 1,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a block of a paged cache; 0: dense.")] = 0,
    layer: Annotated[
        int | None, typer.Option("--layer", help="Index of the layer. [default: the first that is not dense]")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Explain what runs when a selector decodes: the backend and why, its kernels, memory, bytes read.

    Nothing is run, and no device is needed: steps are traced on tensors without content. With a target for a device,
    their kernels are compiled for it.
    """
    values = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": 1,
        "contexts": contexts or [131072],
        "dtype": dtype,
        "batch": batch,
        "page_size": page_size,
        "layer": layer,
    }
    geometry = build(_Geometry, values, where="explain")
    ((spec, config),) = resolve_selectors([selector], sets or []).items()
    if layer is None and isinstance(config, LayeredConfig):
        raise InputError(
            "--layer", expected="a layer, as the file names selectors by layers", got="none", remedy="Give its index."
        )

    from sparsesel import explain as library

    where, target = _where(device)
    spec_of_layer, made = _selector(config, geometry)
    found = {
        context: library.explain(made, spec_of_layer, context, name=backend, device=where, page_size=page_size)
        for context in geometry.contexts
    }
    report = {
        "selector": spec,
        "config": made.config.model_dump(mode="json"),
        **geometry.model_dump(mode="json", exclude={"layers", "contexts", "bandwidth"}),
        "layer": spec_of_layer.layer_idx,
        "device": where,
        "target": target,
        "backend": next(iter(found.values())).backend,
        "why": next(iter(found.values())).why,
        "contexts": [_context(context, one, _compiled(one, target)) for context, one in found.items()],
    }
    if as_json:
        print_json(report)
    else:
        _print(report)


def _where(device: str | None) -> tuple[str, str | None]:
    """The kind of device, and the target that kernels are to be compiled for if one is named."""
    import torch

    if device is None:
        return ("cuda" if torch.cuda.is_available() else "cpu"), None
    if device in _DEVICES:
        return device, None
    targets: tuple[str, ...] = ()
    if importlib.util.find_spec("triton") is not None:
        from sparsesel.ops.compilation import TARGETS

        targets = tuple(TARGETS)
    if device not in targets:
        raise InputError(
            "--device",
            expected=f"one of {', '.join((*_DEVICES, *targets))}",
            got=repr(device),
            remedy="Name one of them." if targets else "Install triton to compile for others.",
        )
    return "cuda", device


def _selector(config: AnyConfig, geometry: _Geometry) -> "tuple[LayerSpec, Selector]":
    """The layer that is explained, and its selector: by default the first layer that is not dense."""
    import torch

    from sparsesel.rotary import Rotary
    from sparsesel.selector import LayerSpec

    meta = torch.device("meta")
    layer = LayerSpec(
        layer_idx=geometry.layer or 0,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=getattr(torch, geometry.dtype),
        device=meta,
        batch_size=geometry.batch,
        rotary=Rotary(torch.empty(geometry.head_dim // 2, device=meta)),
    )
    if isinstance(config, LayeredConfig):
        config = spread_layers(config.layers, range(_LAYERS)).get(layer.layer_idx) or registry().make_config("full")
    selector = registry().make_selector(config)
    context = max(geometry.contexts)
    if geometry.layer is None:
        candidates = [dataclasses.replace(layer, layer_idx=index) for index in range(_FIRST_LAYERS)]
        layer = next((one for one in candidates if selector.cost(one, context).attended < context), layer)
    return layer, selector


def _compiled(found: "Explanation", target: str | None) -> "dict[Any, Resources | str]":
    """What every kernel takes on `target`, or why it does not compile, by configuration."""
    if target is None or found.trace is None:
        return {}
    from sparsesel.ops.compilation import compile_launch

    results: dict[Any, Resources | str] = {}
    with err.status(f"Compiling for {target}"):
        for launch in found.trace.launches:
            if launch.configuration in results:
                continue
            try:
                results[launch.configuration] = compile_launch(launch, target)
            except InputError:
                raise
            except Exception as error:  # Triton's compilers raise many kinds
                results[launch.configuration] = f"does not compile: {type(error).__name__}: {error}"
    return results


def _context(context: int, found: "Explanation", compiled: "dict[Any, Resources | str]") -> dict[str, Any]:
    """Everything about one context."""
    known = {
        "context": context,
        "refused": found.refused,
        "remark": found.remark,
        "attended": found.cost.attended,
        "state_bytes": found.cost.state_bytes,
        "bytes_read": found.cost.bytes_read,
        **{part: getattr(found.cost, part) for part in _PARTS},
    }
    if found.trace is None:
        return known | {"allocated_state_bytes": None, "torch_ops": None, "workspace_bytes": None, "kernels": None}
    took = found.trace
    phases = dict(zip(_PHASES, (took.prefill, took.first, took.step), strict=True))
    return known | {
        "allocated_state_bytes": took.state.nbytes(),
        "torch_ops": {name: phase.torch_ops for name, phase in phases.items()},
        "workspace_bytes": {name: phase.workspace for name, phase in phases.items()},
        "kernels": {name: [_launch(one, compiled) for one in phase.launches] for name, phase in phases.items()},
    }


def _launch(launch: "Launch", compiled: "dict[Any, Resources | str]") -> dict[str, Any]:
    module, _, kernel = launch.kernel.partition(":")
    took = compiled.get(launch.configuration)
    return {
        "kernel": kernel,
        "module": module,
        "grid": list(launch.grid),
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "max_registers": launch.max_registers,
        "constants": {name: value for name, value in launch.constants if name.isupper()},
        "compiled": took if took is None or isinstance(took, str) else dataclasses.asdict(took),
    }


def _print(report: dict[str, Any]) -> None:
    cache = f"a cache paged by {report['page_size']}" if report["page_size"] else "a dense cache"
    out.print(
        f"{safe(report['selector'])}, layer {report['layer']}: {report['heads']} query heads over {report['kv_heads']} "
        f"KV heads of {report['head_dim']}, {report['dtype']}, batch {report['batch']}, {cache}",
        style="bold",
        soft_wrap=True,
    )
    for refused, contexts in _refusals(report["contexts"]):
        at = "" if len(contexts) == len(report["contexts"]) else f" at {', '.join(str(one) for one in contexts)} keys"
        out.print(f"refused{at}: {safe(refused)}", style="bold red", soft_wrap=True)
    out.print(f"backend {report['backend']}: {safe(report['why'])}", soft_wrap=True)
    for one in report["contexts"]:
        out.print(f"\nContext {one['context']}", style="bold underline")
        parts = ", ".join(f"{part.removesuffix('_bytes')} {_size(one[part])}" for part in _PARTS)
        out.print(f"reads    {_size(one['bytes_read'])} a step by design: {parts}", soft_wrap=True)
        out.print(f"attends  {one['attended']:.0f} keys per query head", soft_wrap=True)
        state = f"state    {_size(one['state_bytes'])} beside the cache by design"
        if one["kernels"] is not None:
            state += f", {_size(one['allocated_state_bytes'])} allocated"
        out.print(state, soft_wrap=True)
        if one["remark"]:
            out.print(safe(one["remark"]), soft_wrap=True)
        if one["kernels"] is not None:
            _print_phases(one, report["target"])


def _refusals(contexts: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Every reason for which contexts are refused, and which those are."""
    found: dict[str, list[int]] = {}
    for one in contexts:
        if one["refused"] is not None:
            found.setdefault(one["refused"], []).append(one["context"])
    return list(found.items())


def _print_phases(context: dict[str, Any], target: str | None) -> None:
    """What each phase takes, and its kernels, each with its constants below it; no name or number is broken."""
    names = ("warps", "stages", *(("regs", "spilled", "shared") if target else ()))
    shown = None
    for phase, kernels in context["kernels"].items():
        is_repeated = phase == "later steps" and kernels == shown
        what = (
            "the same kernels" if is_repeated and kernels else _count(len(kernels), "kernel"),
            _count(context["torch_ops"][phase], "PyTorch operation"),
            f"{_size(context['workspace_bytes'][phase])} allocated",
        )
        out.print(f"\n{phase}: {', '.join(what)}", style="bold", soft_wrap=True)
        shown = kernels
        if is_repeated or not kernels:
            continue
        rows = [("kernel", "grid", *names)]
        runs = [(one, len(list(run))) for one, run in itertools.groupby(kernels)]
        rows += [_row(one, times, target) for one, times in runs]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, (one, _) in zip(rows, [(None, 0), *runs], strict=True):
            numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            line = "  ".join([f"  {row[0]:<{widths[0]}}", *numbers])
            out.print(safe(line), style="dim" if one is None else None, soft_wrap=True)
            if one is not None:
                _print_details(one)


def _row(launch: dict[str, Any], times: int, target: str | None) -> tuple[str, ...]:
    took = launch["compiled"]
    numbers = [launch["num_warps"], launch["num_stages"]]
    if target:
        parts = ("registers", "spilled", "shared")
        numbers += [took[part] for part in parts] if isinstance(took, dict) else ["-" for _ in parts]
    name = launch["kernel"].removesuffix("_kernel") + (f" ×{times}" if times > 1 else "")
    return name, "×".join(str(extent) for extent in launch["grid"]), *(str(number) for number in numbers)


def _print_details(launch: dict[str, Any]) -> None:
    """The constants of a launch, or why it does not compile."""
    took = launch["compiled"]
    text = (
        took if isinstance(took, str) else ", ".join(f"{name}={value}" for name, value in launch["constants"].items())
    )
    indent = " " * 6
    wrapped = textwrap.wrap(
        safe(text),
        out.width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapped:
        out.print(line, style="dim", soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _size(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
