"""`sparsesel cost`: what each selector must read and compute per token, modelled."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from sparsesel.cli.console import out, print_json, safe
from sparsesel.config import build
from sparsesel.eval.cost import BANDWIDTHS, STRICT, CostConfig, cost_rows, strict_specs
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.eval.tables import Column, Section, Table, renderables

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
        for table in renderables([Section("", _tables(here))], width=out.width):
            out.print(table)
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


def _tables(rows: "Sequence[CostRow]") -> list[Table]:
    """What is read, and what that comes to: all of it side by side would not fit into a terminal."""

    def megabytes(heading: str, values: Sequence[float]) -> Column:
        return Column(heading, [value / 1e6 for value in values], 1)

    names = [safe(row.selector) for row in rows]
    reads = [
        megabytes("keys", [row.key_bytes for row in rows]),
        megabytes("values", [row.value_bytes for row in rows]),
        megabytes("metadata", [row.metadata_bytes for row in rows]),
        megabytes("scores", [row.score_bytes for row in rows]),
        megabytes("all", [row.bytes_read for row in rows]),
    ]
    costs = [
        Column("attended", [row.attended for row in rows], 0),
        Column("GFLOP", [row.flops / 1e9 for row in rows], 2),
        megabytes("state", [row.state_bytes for row in rows]),
        Column("ms", [row.milliseconds for row in rows]),
        Column("over full", [f"{row.speedup_full:.2f}×" for row in rows]),
        Column("over exact", [f"{row.speedup_exact:.2f}×" for row in rows]),
    ]
    return [Table("", names, reads, kind="reads"), Table("", names, costs, kind="comes to")]
