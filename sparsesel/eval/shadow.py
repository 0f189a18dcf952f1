"""A selector watched while it decodes: at each step, what it attended to and what exact and full attention would have.

Full attention and the exact top-K are those of the same query over the same cache; the model goes on with the
selector's own output. Whatever follows the protocol can be watched: `discover` and `aggregate` are enough.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.config import SelectorConfig, resolve_topk
from sparsesel.kv import KVView
from sparsesel.ops import qk_scores, topk_indices
from sparsesel.selector import LayerSpec, Selector, StepCost, Support


@runtime_checkable
class ByMatching(Protocol):
    """A selector that compares the query with those of earlier steps, and can say how near the nearest is."""

    def best_similarity(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any) -> Float[Tensor, "B Hq"]:
        """The best cosine similarity that the coming step will find, -inf without any; leaves `state` alone."""
        ...


@dataclass(frozen=True)
class Step:
    """One decode step of one layer, of one sequence.

    Attributes:
        layer_idx: The layer.
        query: Post-RoPE.
        kv: What was visible, the current token included.
        support: What the selector attends to.
        output: What it made of it.
        counted: What the selector counted in this step, by name: 1 where a head took that path.
        similarity: ρmax of each head, before the step; None if the selector has no such thing.
        topk: Its budget at this length, None if it has none.
        scale: Factor of the scores.
    """

    layer_idx: int
    query: Float[Tensor, "1 Hq 1 D"]
    kv: KVView
    support: Support
    output: Float[Tensor, "1 Hq 1 Dv"]
    counted: Mapping[str, Float[Tensor, " Hq"]]
    similarity: Float[Tensor, " Hq"] | None
    topk: int | None
    scale: float


class Watched:
    """A selector that decodes as it would alone and shows each step to `watch`. Itself a selector.

    Args:
        selector: Any selector.
        watch: Called with each step, after it.
    """

    def __init__(self, selector: Selector, watch: Callable[[Step], object]) -> None:
        self._selector = selector
        self._watch = watch

    @property
    def config(self) -> SelectorConfig:
        """The selector's."""
        return self._selector.config

    def init_state(self, layer: LayerSpec) -> Any:
        """The selector's."""
        return self._selector.init_state(layer)

    def observe_prefill(self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: Any, *, scale: float) -> None:
        """The selector's."""
        self._selector.observe_prefill(query, kv, state, scale=scale)

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float) -> Support:
        """The selector's; not watched."""
        return self._selector.discover(query, kv, state, scale=scale)

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: Any, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """The selector's; not watched."""
        return self._selector.aggregate(query, kv, support, state, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: Any, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step in its two parts, watched."""
        selector = self._selector
        similarity = selector.best_similarity(query, kv, state)[0] if isinstance(selector, ByMatching) else None
        before = state.counters.read()
        support = selector.discover(query, kv, state, scale=scale)
        output = selector.aggregate(query, kv, support, state, scale=scale)
        topk = getattr(selector.config, "topk", None)
        self._watch(
            Step(
                layer_idx=state.layer.layer_idx,
                query=query,
                kv=kv,
                support=support,
                output=output,
                counted={name: sums - before.get(name, 0) for name, sums in state.counters.read().items()},
                similarity=similarity,
                topk=None if topk is None else min(resolve_topk(topk, kv.max_length), kv.max_length),
                scale=scale,
            )
        )
        return output

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """The selector's."""
        return self._selector.cost(layer, length)


@dataclass(frozen=True)
class Comparison:
    """One step beside exact and full attention, for each query head.

    Attributes:
        recall: |S ∩ E| / |E|, S the support and E the exact top-K: K is the selector's budget, or |S| if it has none.
        retained_mass: Full attention's mass on S.
        output_cosine: Cosine of the output and full attention's.
        relative_error: ‖o - o_full‖ / ‖o_full‖.
        distribution_cosine: Cosine of two distributions over all keys: the softmax over S alone, and full attention's.
    """

    recall: Float[Tensor, " Hq"]
    retained_mass: Float[Tensor, " Hq"]
    output_cosine: Float[Tensor, " Hq"]
    relative_error: Float[Tensor, " Hq"]
    distribution_cosine: Float[Tensor, " Hq"]


def compare(step: Step) -> Comparison:
    """A step beside exact and full attention of the same query over the same cache, in float32."""
    heads = step.query.shape[1]
    scores = qk_scores(step.query, step.kv, scale=step.scale)[0]  # [Hq, L]
    support = step.support.as_mask(step.kv)[0, :, 0]
    support = support.repeat_interleave(heads // len(support), dim=0)
    exact = _exact_mask(scores, support.sum(-1) if step.topk is None else step.topk)

    full = scores.softmax(-1)
    kept = full * support
    values = step.kv.logical_values()[0].float()  # [Hkv, L, Dv]
    expected = torch.matmul(full.view(len(values), -1, full.shape[1]), values).flatten(0, 1)
    output = step.output[0, :, 0].float()
    norm = torch.linalg.vector_norm
    return Comparison(
        recall=(support & exact).sum(-1) / exact.sum(-1).clamp_min(1),
        retained_mass=kept.sum(-1).clamp(max=1.0),
        output_cosine=F.cosine_similarity(output, expected, dim=-1),
        relative_error=norm(output - expected, dim=-1) / norm(expected, dim=-1),
        # One is the other on S, times a factor that a cosine does not see: p_S · p = ‖p_S‖².
        distribution_cosine=norm(kept, dim=-1) / norm(full, dim=-1),
    )


def exact_support(step: Step, topk: int) -> Int[Tensor, "Hq K"]:
    """The exact top-K of a step's query, ascending, padded with -1."""
    scores = qk_scores(step.query, step.kv, scale=step.scale)[0]
    return topk_indices(scores, topk, step.kv.lengths.expand(len(scores)), widest=topk)


def _exact_mask(scores: Float[Tensor, "Hq L"], topk: int | Int[Tensor, " Hq"]) -> Bool[Tensor, "Hq L"]:
    """Where the best keys of each head are, as many as it is allowed."""
    heads, length = scores.shape
    lengths = torch.full((heads,), length, device=scores.device)
    indices = topk_indices(scores, topk, lengths, widest=topk if isinstance(topk, int) else length).long()
    mask = torch.zeros(heads, length + 1, dtype=torch.bool, device=scores.device)
    return mask.scatter_(1, torch.where(indices < 0, length, indices), True)[:, :length]
