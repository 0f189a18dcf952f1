"""A ReTopK decode step in Triton: what is launched, in which order, with what scratch.

Scratch is no part of the state: all layers share it, since that of the scan is as long as the context, and nothing has
to follow the rows of a batch when they move.
"""

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import indexed_qk, reference, softmax_values, workspace
from sparsesel.ops.launch import block_channels, block_tokens, kv_arguments, launch, query_arguments, topk_arguments
from sparsesel.ops.split_k import num_splits
from sparsesel.selector import Support
from sparsesel_retopk import kernels
from sparsesel_retopk.config import ReTopKConfig
from sparsesel_retopk.stages import Budget, Candidates, Level, best_candidates, build_supports, choose_paths, count_step
from sparsesel_retopk.state import ReTopKState, inverse_norm

# What `kernels.recall` counts, in its order; the paths among them by their numbers there, from 1 at "refresh".
NAMES = ("steps", "selected", "visible", "refresh", "cold", "fallback", "underfull", "exact", "reuse", "candidates")

# Positions or scores, and numbers of a tile of rows, that a head's program looks at in one go. Whatever the
# configuration, so that few kernels are compiled, none of which keeps more than the registers hold.
_BLOCK = 1 << 11
_TILE = 1 << 14


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    state: ReTopKState,
    config: ReTopKConfig,
    level: Level,
    *,
    scale: float,
) -> Float[Tensor, "B Hq 1 Dv"]:
    """One decode step; updates `state`."""
    query = query.detach()
    arguments = _prepare(query, kv, state, config, scale=scale)
    if level < 4:
        output = _separate(query, kv, state, config, level, arguments, scale=scale)
    else:
        output = query.new_empty(*query.shape[:3], kv.values.shape[3])
        _fused(level, arguments | {"p_out": output})
    _exact(arguments | {"p_out": output})
    return output


def discover(
    query: Float[Tensor, "B Hq 1 D"],
    kv: KVView,
    state: ReTopKState,
    config: ReTopKConfig,
    level: Level,
    *,
    scale: float,
) -> Support:
    """The support of one decode step; updates `state` as `attend` does."""
    query = query.detach()
    arguments = _prepare(query, kv, state, config, scale=scale)
    indices = torch.empty(*query.shape[:2], 1, arguments["widest"], dtype=torch.int32, device=kv.device)
    arguments["p_support"] = indices
    if level < 4:
        _separate(query, kv, state, config, level, arguments, scale=scale)
    else:
        _fused(level, arguments)
    _exact(arguments)
    return Support.of(indices)


def _prepare(query: Tensor, kv: KVView, state: ReTopKState, config: ReTopKConfig, *, scale: float) -> dict[str, Any]:
    """Every parameter of every kernel by name, after what a first step has to make good."""
    batch, num_heads, _, dim = query.shape
    queries = query_arguments(query, kv)
    widest = min(resolve_topk(config.topk, kv.max_length), kv.max_length)
    state.widen(widest)
    if state.has_unbuilt:
        build_supports(state, kv, config, widest, scale=scale)

    # Distinct positions below L, of R supports and the window; in whole cache lines.
    most = min(config.recall_size * widest + config.window_size, kv.max_length)
    most = -(-most // 16) * 16
    longest = -(-kv.max_length // 16) * 16
    splits = num_splits(batch * kv.num_heads, kv.max_length)
    block_d, block_dv = block_channels(dim), block_channels(kv.values.shape[3])
    rows = (batch, num_heads)
    scratch = {
        "p_rho": (torch.float32, (*rows, config.cache_size)),
        "p_paths": (torch.int32, rows),
        # Candidates.
        "p_runs": (torch.int32, (*rows, 2, config.recall_size * widest)),
        "p_ids": (torch.int32, (*rows, most)),
        "p_counts": (torch.int32, rows),
        "p_scores": (torch.float32, (*rows, most)),
        # What is kept of them.
        "p_kept": (torch.float32, (*rows, widest)),
        # The scan of exact heads.
        "p_bounds": (torch.int32, rows),
        "p_found": (torch.int32, (*rows, longest)),
        "p_found_scores": (torch.float32, (*rows, longest)),
        "p_found_counts": (torch.int32, (*rows, splits)),
    }
    return {
        **queries,
        **kv_arguments(kv),
        **topk_arguments(config.topk, kv),
        "scale": scale,
        "DIM_V": kv.values.shape[3],
        # The ring.
        "p_entries": state.queries,
        "p_norms": state.inverse_norms,
        "p_supports": state.supports,
        "p_stamps": state.stamps,
        "p_unbuilt": state.unbuilt.view(torch.uint8),
        "p_prefill_end": state.prefill_end,
        "slots": state.stamps.shape[1],
        "width": state.supports.shape[3],
        # Matching and the path.
        "cache_size": config.cache_size,
        "recall_size": config.recall_size,
        "window_size": config.window_size,
        "threshold": config.similarity_threshold,
        "refresh_interval": config.refresh_interval,
        "FALLBACK": config.fallback,
        "SCOPE": config.fallback_scope,
        "RECENT": config.retrieval == "recent",
        "p_sums": state.counters.table(NAMES, num_heads, kv.device),
        **workspace.scratch(kv.device, scratch),
        "s_ids": most,
        "half": 1 << (widest.bit_length() - 1),
        "LEVELS": (config.recall_size - 1).bit_length(),
        "widest": widest,
        "p_out": None,
        "p_support": None,
        "s_found": longest,
        "num_splits": splits,
        "PART": block_tokens(kv.keys),
        # Tiles.
        "BLOCK": _BLOCK,
        "BLOCK_C": min(32, _TILE // 2 // block_d),
        "BLOCK_DV": block_dv,
        "BLOCK_K": _TILE // block_d,
        "BLOCK_N": _TILE // block_dv,
        "BLOCK_S": 1 << (splits - 1).bit_length(),
    }


def _fused(level: Level, arguments: dict[str, Any]) -> None:
    """The heads that reuse, and the bounds of those that are exact."""
    if level == 5:
        # It keeps more at hand than the others, so more threads share its tiles.
        _run(kernels.reuse_kernel, arguments, num_warps=16)
        return
    _run(kernels.recall_kernel, arguments, max_registers=128)
    _score(arguments, reuse=True)
    _finish(arguments, reuse=True)


def _separate(
    query: Tensor,
    kv: KVView,
    state: ReTopKState,
    config: ReTopKConfig,
    level: Level,
    arguments: dict[str, Any],
    *,
    scale: float,
) -> Tensor:
    """The same as `_fused` stage by stage; the output, which exact heads have yet to write theirs into."""
    current, budget = query[:, :, 0], Budget.of(config.topk, kv, query.shape[1])
    norms = inverse_norm(current)
    if level == 3:
        _run(kernels.recall_kernel, arguments, max_registers=128)
        _score(arguments, reuse=True)
        candidates, scores = Candidates(arguments["p_ids"], arguments["p_counts"]), arguments["p_scores"]
    else:
        paths, candidates = choose_paths(current, norms, kv, state, config, budget, all_candidates=True)
        count_step(state, budget, paths, candidates)
        codes = (number * paths[name].int() for number, name in enumerate(NAMES[3:7], start=1))
        scores = (reference.indexed_qk if level == 1 else indexed_qk)(query, kv, candidates.indices, scale=scale)
        arguments |= {
            "p_paths": functools.reduce(torch.add, codes),
            "p_counts": candidates.counts.int(),
            "p_ids": candidates.indices.contiguous(),
            "s_ids": candidates.indices.shape[2],
            "p_scores": torch.empty_like(scores),
        }
        _score(arguments, reuse=False)
    ranked = best_candidates(scores, candidates, budget)
    state.insert_step(kv.lengths - 1, current, norms, ranked.indices)
    if arguments["p_support"] is not None:
        arguments["p_support"].copy_(ranked.indices[:, :, None])
    _finish(arguments, reuse=False)
    weigh = reference.softmax_values if level == 1 else softmax_values
    return weigh(ranked.scores, kv, ranked.indices).to(query.dtype)


def _exact(arguments: dict[str, Any]) -> None:
    """The exact heads; every program leaves at once where there are none."""
    paths, keys = arguments["p_paths"], arguments["p_k"]
    batch, kv_heads = paths.shape[0], keys.shape[1]
    grid = (arguments["num_splits"], kv_heads, batch)
    # Of float32 the assembler, left to choose, finds an order that needs fewer.
    registers = 168 if keys.element_size() < 4 else 0
    _run(
        kernels.scan_kernel,
        arguments | {"BLOCK_N": arguments["PART"]},
        grid=grid,
        num_warps=4,
        max_registers=registers,
    )
    _run(kernels.finish_exact_kernel, arguments | {"BLOCK_N": arguments["BLOCK_N"] // 2})


def _score(arguments: dict[str, Any], *, reuse: bool) -> None:
    """Scores of the candidates, or of exact heads' alone."""
    batch, num_heads = arguments["p_paths"].shape
    block = arguments["PART"]
    grid = (-(-arguments["s_ids"] // block), num_heads, batch)
    _run(kernels.score_kernel, arguments | {"REUSE": reuse, "BLOCK_N": block}, grid=grid, num_warps=4)


def _finish(arguments: dict[str, Any], *, reuse: bool) -> None:
    """What is kept of the candidates, and the output of heads that reuse."""
    # As many values at a time as `reuse_kernel` takes would not fit into registers on every device.
    options = {"REUSE": reuse, "BLOCK_N": arguments["BLOCK_N"] // 2}
    _run(kernels.finish_kernel, arguments | options, max_registers=168)


def _run(
    kernel: Any,
    arguments: dict[str, Any],
    *,
    grid: tuple[int, ...] | None = None,
    num_warps: int = 8,
    max_registers: int = 0,
) -> None:
    """Launch with those of the arguments that the kernel takes; by default one program per head and sequence."""
    launch(
        kernel,
        grid or arguments["p_paths"].shape[::-1],
        num_warps=num_warps,
        max_registers=max_registers,
        **{name: arguments[name] for name in _parameters(kernel)},
    )


@functools.cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)
