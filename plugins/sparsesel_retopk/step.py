"""A ReTopK decode step in Triton: what is launched, in which order, with what scratch.

Scratch is allocated in every step. The allocator hands all layers the same memory, of which the scan's, as long as
the context, would be much to keep per layer; in a captured CUDA graph it belongs to the graph; and nothing has to
follow the rows of a batch when they move.
"""

import functools
import inspect
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import indexed_qk, reference, softmax_values
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
    ints = partial(torch.empty, dtype=torch.int32, device=kv.device)
    floats = partial(torch.empty, dtype=torch.float32, device=kv.device)
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
        "p_rho": floats(*rows, config.cache_size),
        "p_paths": ints(rows),
        "p_sums": state.counters.table(NAMES, num_heads, kv.device),
        # Candidates.
        "p_runs": ints(*rows, 2, config.recall_size * widest),
        "p_ids": ints(*rows, most),
        "s_ids": most,
        "p_counts": ints(rows),
        "p_scores": floats(*rows, most),
        "half": 1 << (widest.bit_length() - 1),
        "LEVELS": (config.recall_size - 1).bit_length(),
        # What is kept of them.
        "p_kept": floats(*rows, widest),
        "widest": widest,
        "p_out": None,
        "p_support": None,
        # The scan of exact heads.
        "p_bounds": ints(rows),
        "p_found": ints(*rows, longest),
        "p_found_scores": floats(*rows, longest),
        "s_found": longest,
        "p_found_counts": ints(*rows, splits),
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
    _run(kernels.recall_kernel, arguments)
    _score(arguments, reuse=True)
    _run(kernels.finish_kernel, arguments | {"REUSE": True})


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
        _run(kernels.recall_kernel, arguments)
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
    _run(kernels.finish_kernel, arguments | {"REUSE": False})
    weigh = reference.softmax_values if level == 1 else softmax_values
    return weigh(ranked.scores, kv, ranked.indices).to(query.dtype)


def _exact(arguments: dict[str, Any]) -> None:
    """The exact heads; every program leaves at once where there are none."""
    paths, keys = arguments["p_paths"], arguments["p_k"]
    batch, kv_heads = paths.shape[0], keys.shape[1]
    grid = (arguments["num_splits"], kv_heads, batch)
    _run(kernels.scan_kernel, arguments | {"BLOCK_N": arguments["PART"]}, grid=grid, num_warps=4)
    # As many values at a time as others take would not fit into registers on every device.
    _run(kernels.finish_exact_kernel, arguments | {"BLOCK_N": arguments["BLOCK_N"] // 2})


def _score(arguments: dict[str, Any], *, reuse: bool) -> None:
    """Scores of the candidates, or of exact heads' alone."""
    batch, num_heads = arguments["p_paths"].shape
    block = arguments["PART"]
    grid = (-(-arguments["s_ids"] // block), num_heads, batch)
    _run(kernels.score_kernel, arguments | {"REUSE": reuse, "BLOCK_N": block}, grid=grid, num_warps=4)


def _run(kernel: Any, arguments: dict[str, Any], *, grid: tuple[int, ...] | None = None, num_warps: int = 8) -> None:
    """Launch with those of the arguments that the kernel takes; by default one program per head and sequence."""
    launch(
        kernel,
        grid or arguments["p_paths"].shape[::-1],
        num_warps=num_warps,
        **{name: arguments[name] for name in _parameters(kernel)},
    )


@functools.cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)
