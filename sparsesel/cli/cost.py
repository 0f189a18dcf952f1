"""`sparsesel cost`: what each selector must read and compute per token, modelled."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from sparsesel.cli.console import out, print_json, safe
from sparsesel.config import build
from sparsesel.eval.cost import BANDWIDTHS, STRICT, CostConfig, cost_rows, strict_specs
from sparsesel.eval.selectors import resolve_selectors

if TYPE_CHECKING:
    from sparsesel.eval.cost import CostRow


def cost(
    heads: Annotated[int, typer.Option("--heads", help="Query heads of a layer.")],
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="Key-value heads of a layer; they divide the heads.")],
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels of a head.")],
    layers: Annotated[int, typer.Option("--layers", help="Layers with attention.")],
    contexts: Annotated[list[int], typer.Option("--context", help="Visible keys; repeatable.")],
    selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="name, name:preset or a config file, then optional ,field=value; repeatable. "
            f"[default: all installed, the preset {STRICT!r} of those that have one]",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field in every selector that has it; repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", help=f"GB/s of memory, or one of {', '.join(BANDWIDTHS)}.")
    ] = "l20",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Model what a decode step reads and computes with each selector, for one sequence and all layers.

    Nothing is run: every selector states its own cost. Time is bytes over bandwidth, so that the speedups are ratios
    of bytes.
    """
    values = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": layers,
        "contexts": contexts,
        "dtype": dtype,
        "bandwidth": bandwidth,
    }
    config = build(CostConfig, values, where="cost")
    resolved = resolve_selectors(selectors or strict_specs(), sets or [])
    rows = cost_rows(config, resolved)
    if as_json:
        configs = {spec: one.model_dump(mode="json") for spec, one in resolved.items()}
        print_json(
            {
                **config.model_dump(mode="json"),
                "rows": [{**dataclasses.asdict(row), "config": configs[row.selector]} for row in rows],
            }
        )
        return
    for context in config.contexts:
        here = [row for row in rows if row.context == context]
        out.print(
            f"One decode step at context {context}: {layers} layers, {heads} query heads over {kv_heads} KV heads of "
            f"{head_dim}, {dtype}",
            style="italic",
            soft_wrap=True,
        )
        out.print(_reads(here))
        out.print(_costs(here))
        for row in here:
            if row.assumes:
                out.print(safe(f"{row.selector}: {row.assumes}."), soft_wrap=True)
            if row.dense_layers:
                out.print(safe(f"{row.selector}: {row.dense_layers} of {layers} layers are dense."), soft_wrap=True)
        out.print()
    out.print(
        f"MB and GFLOP per token; ms are the bytes read at {config.bandwidth:g} GB/s. Speedups are ratios of the bytes "
        "read, over exact top-k at the same budget.",
        style="dim",
    )


def _reads(rows: "Sequence[CostRow]") -> Table:
    """What is read, in MB."""
    table = _table("reads keys values metadata scores all")
    for row in rows:
        parts = (row.key_bytes, row.value_bytes, row.metadata_bytes, row.score_bytes, row.bytes_read)
        table.add_row(Text(safe(row.selector)), *(f"{value / 1e6:.1f}" for value in parts))
    return table


def _costs(rows: "Sequence[CostRow]") -> Table:
    """What that comes to."""
    table = _table("comes~to attended GFLOP state ms over~full over~exact")
    for row in rows:
        table.add_row(
            Text(safe(row.selector)),
            f"{row.attended:.0f}",
            f"{row.flops / 1e9:.2f}",
            f"{row.state_bytes / 1e6:.1f}",
            f"{row.milliseconds:.3f}",
            f"{row.speedup_full:.2f}×",
            f"{row.speedup_exact:.2f}×",
        )
    return table


def _table(headings: str) -> Table:
    """Two tables, as all columns in one would not fit into a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    first, *others = (heading.replace("~", " ") for heading in headings.split(" "))
    table.add_column(first, overflow="fold", min_width=14)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
