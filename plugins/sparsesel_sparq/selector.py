"""SparQ: which keys matter is read off a few components of each; what is left out is stood for by a mean value.

"SparQ Attention: Bandwidth-Efficient LLM Inference" (arXiv 2312.04985). `topk` is the paper's k, `rank` r,
`local_size` l. The query heads g of a key-value head select together:

1. I = the r components with the largest sum_g |q_g|.
2. ŝ_g = softmax over all visible i of q_g[I] · k_i[I] · scale / sqrt(‖q_g[I]‖₁ / ‖q_g‖₁).
3. S = the newest l positions and those with the largest sum_g ŝ_g, K in all.
4. The output of head g is α_g · softmax(q_g · K_S · scale) · V_S + (1 - α_g) · v̄, where α_g is the mass of ŝ_g on S
   and v̄ the mean of all visible values.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import (
    backend,
    dense_attention,
    indexed_qk,
    row_topk,
    softmax_values,
    sparse_attention,
    topk_indices,
)
from sparsesel.selector import LayerSpec, StepCost, Support
from sparsesel_sparq.config import SparQConfig
from sparsesel_sparq.state import BLOCK, SparQState

if TYPE_CHECKING:
    from sparsesel_sparq.kernels import Approximation


@dataclass(frozen=True)
class SparQSelector:
    """The selector; everything that changes is in `SparQState`. The module's text says how it works."""

    config: SparQConfig

    def init_state(self, layer: LayerSpec) -> SparQState:
        """State that has seen nothing.

        Raises:
            InputError: `rank` is more than the layer's head_dim.
        """
        self._check_rank(layer)
        return SparQState.empty(layer)

    def observe_prefill(
        self, query: Float[Tensor, "B Hq Tq D"], kv: KVView, state: SparQState, *, scale: float
    ) -> None:
        """Copy the keys, add up the values."""
        state.record(kv, with_values=self.config.reallocate)

    def discover(self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SparQState, *, scale: float) -> Support:
        """The support of each key-value head, common to its query heads."""
        if backend.current(query.device) == "eager":
            return self._discover(query, kv, state, scale=scale)[0]
        from sparsesel_sparq import kernels

        found, indices = self._choose(query, kv, state, scale=scale)
        support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        if self.config.reallocate:
            state.counters.add("reallocated", kernels.mass_outside(found, indices, kv))
        return support

    def aggregate(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, support: Support, state: SparQState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """Softmax attention over the support and the mean value, each by its share of the approximate mass."""
        if support.indices is None:
            return dense_attention(query, kv, scale=scale)
        if backend.current(query.device) == "triton":
            if not self.config.reallocate:
                return sparse_attention(query, kv, support.indices, scale=scale)
            from sparsesel_sparq import kernels

            found = kernels.approximate(query, kv, state.components, rank=self.config.rank, scale=scale)
            indices = support.indices[:, :, 0]
            return kernels.reallocated_attention(query, kv, indices, found, state.value_sum, scale=scale)[0]
        left_out = None
        if self.config.reallocate:
            weights = approximate_weights(query, kv, state, self.config.rank, scale=scale)
            left_out = mass_outside(weights, support, kv)
        return self._combine(query, kv, support.indices[:, :, 0], left_out, state, scale=scale)

    def attend(
        self, query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SparQState, *, scale: float
    ) -> Float[Tensor, "B Hq 1 D"]:
        """One decode step; keys are scored approximately once."""
        if backend.current(query.device) == "triton":
            return self._attend(query, kv, state, scale=scale)
        _, indices, left_out = self._discover(query, kv, state, scale=scale)
        return self._combine(query, kv, indices, left_out, state, scale=scale)

    def cost(self, layer: LayerSpec, length: int) -> StepCost:
        """Of every key r components, K keys and values, and the mean value, once per key-value head.

        Raises:
            InputError: `rank` is more than the layer's head_dim.
        """
        self._check_rank(layer)
        config = self.config
        topk = min(resolve_topk(config.topk, length), length)
        size = layer.dtype.itemsize
        kv_heads = layer.batch_size * layer.num_key_value_heads
        heads = layer.batch_size * layer.num_attention_heads
        mean = 4 * layer.head_dim if config.reallocate else 0  # float32
        blocks = -(-length // BLOCK)
        return StepCost(
            key_bytes=kv_heads * topk * layer.head_dim * size,
            value_bytes=kv_heads * topk * layer.head_dim * size,
            metadata_bytes=kv_heads * (config.rank * length * size + mean),
            score_bytes=2 * 4 * (heads + kv_heads) * length,  # float32, written and read back: each and their sum
            flops=2 * heads * (config.rank * length + 2 * topk * layer.head_dim),
            state_bytes=kv_heads * (length * layer.head_dim * size + mean * (1 + blocks)) + 8 * layer.batch_size,
            attended=topk,
        )

    def _check_rank(self, layer: LayerSpec) -> None:
        if self.config.rank > layer.head_dim:
            raise InputError(
                "sparq.rank",
                expected=f"at most {layer.head_dim}, the head_dim of layer {layer.layer_idx}",
                got=self.config.rank,
                remedy=f"Set for example rank={max(1, layer.head_dim // 4)}.",
            )

    def _choose(self, query: Tensor, kv: KVView, state: SparQState, *, scale: float) -> "tuple[Approximation, Tensor]":
        """Approximate scores and the chosen positions `[B, Hkv, K]`, by the kernels."""
        from sparsesel_sparq import kernels

        config = self.config
        state.record(kv, with_values=config.reallocate)
        found = kernels.approximate(query, kv, state.components, rank=config.rank, scale=scale)
        return found, kernels.choose(found, kv, topk=config.topk, local_size=config.local_size)

    def _attend(self, query: Tensor, kv: KVView, state: SparQState, *, scale: float) -> Tensor:
        """One decode step, by the kernels."""
        from sparsesel_sparq import kernels

        found, indices = self._choose(query, kv, state, scale=scale)
        names, left_out = ("steps", "selected", "visible"), None
        if self.config.reallocate:
            names = (*names, "reallocated")
            output, left_out = kernels.reallocated_attention(query, kv, indices, found, state.value_sum, scale=scale)
        else:
            output = sparse_attention(query, kv, indices[:, :, None], scale=scale)
        counters = state.counters.table(names, query.shape[1], query.device)
        kernels.count(counters, kv, self.config.topk, left_out)
        return output

    def _discover(
        self, query: Tensor, kv: KVView, state: SparQState, *, scale: float
    ) -> tuple[Support, Tensor, Tensor | None]:
        """The support, its indices `[B, Hkv, K]` and, `[B, Hq]`, the mass outside of it, 1 - α."""
        config = self.config
        state.record(kv, with_values=config.reallocate)
        weights = approximate_weights(query, kv, state, config.rank, scale=scale)
        indices = choose(weights, kv, config)
        support = Support.of(indices[:, :, None])
        state.counters.add_step(support, kv, query.shape[1])
        if not config.reallocate:
            return support, indices, None
        left_out = mass_outside(weights, support, kv)
        state.counters.add("reallocated", left_out)
        return support, indices, left_out

    def _combine(
        self,
        query: Tensor,
        kv: KVView,
        indices: Tensor,
        left_out: Tensor | None,
        state: SparQState,
        *,
        scale: float,
    ) -> Tensor:
        """Attention over `indices` `[B, H, K]` and, by the share `left_out` `[B, Hq]`, the mean value."""
        output = softmax_values(indexed_qk(query, kv, indices, scale=scale), kv, indices)  # [B, Hq, 1, Dv]
        if left_out is not None:
            mean = state.mean_value(kv).repeat_interleave(query.shape[1] // kv.num_heads, dim=1)[:, :, None]
            share = left_out[..., None, None]
            output = (1 - share) * output + share * mean
        return output.to(query.dtype)


def approximate_weights(
    query: Float[Tensor, "B Hq 1 D"], kv: KVView, state: SparQState, rank: int, *, scale: float
) -> Float[Tensor, "B Hkv G L"]:
    """ŝ of every query head: float32, 0 at positions that a sequence does not have.

    A score that is no number, or infinite, counts as the lowest or highest finite one, so that weights always are
    numbers; a query of which no share can be told (‖q‖₁ zero or not finite) is scored with a share of 1.
    """
    batch, _, _, dim = query.shape
    grouped = query.float().view(batch, kv.num_heads, -1, dim)
    magnitudes = grouped.abs()
    # In exact arithmetic ties go to the lower component, as ties of scores go to the lower position.
    total = magnitudes.sum(2)
    dims = topk_indices(total, rank, torch.full_like(total[..., 0], dim, dtype=torch.int64))  # [B, Hkv, r]
    chosen = dims.long()[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    share = magnitudes.gather(3, chosen).sum(-1, keepdim=True) / magnitudes.sum(-1, keepdim=True)
    share = torch.where(share.isfinite() & (share > 0), share, 1.0)
    scores = torch.matmul(grouped.gather(3, chosen), state.rows(dims, kv.max_length).float())
    scores = scores.mul_(scale * share.rsqrt())
    limit = torch.finfo(torch.float32).max
    scores = scores.nan_to_num_(nan=-limit, posinf=limit, neginf=-limit)
    if kv.uniform:
        return scores.softmax(-1)
    hidden = ~kv.visible()[:, None, None]
    # A sequence without any position has no weights, rather than some that are no numbers.
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0)


def choose(weights: Float[Tensor, "B Hkv G L"], kv: KVView, config: SparQConfig) -> Tensor:
    """S of each key-value head, `[B, Hkv, K]` int32: ascending, padded with -1."""
    lengths = kv.lengths[:, None].expand(weights.shape[:2])  # [B, Hkv]
    topk = row_topk(config.topk, lengths)
    local = topk // 4 if isinstance(config.local_size, str) else config.local_size
    age = lengths[..., None] - 1 - torch.arange(weights.shape[3], device=kv.device)  # 0 for the current token
    newest = _below(age, local) & _below(age, topk)  # a percentage may come out below `local_size`
    merit = weights.sum(2).masked_fill(newest, float("inf"))
    return topk_indices(merit, topk, lengths, widest=resolve_topk(config.topk, kv.max_length))


def _below(ages: Tensor, count: int | Tensor) -> Tensor:
    return ages < (count if isinstance(count, int) else count[..., None])


def mass_outside(weights: Float[Tensor, "B Hkv G L"], support: Support, kv: KVView) -> Float[Tensor, "B Hq"]:
    """1 - α of every query head: the weight at positions outside the support, 0 exactly where there are none."""
    batch, kv_heads, group, length = weights.shape
    inside = support.as_mask(kv)[:, :, 0]  # [B, H, L]
    inside = inside.repeat_interleave(kv_heads * group // inside.shape[1], dim=1).view(batch, kv_heads, group, length)
    return weights.masked_fill(inside, 0.0).sum(-1).flatten(1)
