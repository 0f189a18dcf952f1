"""Every selector that is installed, ours and third parties', through the conformance suite."""

import dataclasses
from typing import ClassVar

import pytest
import torch

from sparsesel.registry import make_config, registry
from sparsesel.testing.conformance import SelectorConformance
from sparsesel.testing.tolerances import Expected, gamma, unit_roundoff

OURS = "sparsesel"

# Corners of a selector that its defaults do not reach at the suite's small sizes.
VARIANTS = {
    "retopk": [
        "retopk,cache_size=6,recall_size=2,window_size=3,refresh_interval=5",
        "retopk,window_size=0,refresh_interval=0",
        "retopk,similarity_threshold=2.0",
        "retopk,similarity_threshold=-1.0,retrieval=recent,cache_size=4",
    ],
    "sparq": ["sparq,reallocate=false,rank=6"],
    "loki": ["loki,rank=16", "loki,rank=1"],
    "quest": ["quest,page_size=4"],
}
# Specs whose query heads of one key-value head decide together.
GROUPED = ["retopk:group", "retopk,fallback_scope=group-any"]
# Specs whose output is attention over the support and a mean value for the rest.
MEAN_VALUE = ["sparq", "sparq,rank=6,local_size=0"]
# Specs with a fixed part that is too large for the suite's small budgets, so that it is made small.
FIXED_PARTS = [
    "tokenselect",
    "tokenselect,similarity_threshold=0.6",
    "tokenselect,similarity_threshold=2.0",
    "tokenselect,similarity_threshold=-1.0",
]
# Specs that score the first tokens at another distance than they have in the text.
CACHE_POSITIONS = ["streaming_llm:paper"]


def specs() -> list[str]:
    found = {}
    for name, registered in registry().selectors.items():
        ours = registered.distribution == OURS
        presets = [f"{name}:{preset}" for preset in registry().presets(name)] if ours else []
        for spec in (name, *presets, *VARIANTS.get(name, ())):
            found.setdefault(registry().make_config(spec), spec)  # a preset may be the defaults by another name
    apart = (*GROUPED, *CACHE_POSITIONS, *FIXED_PARTS, "tokenselect:paper")  # the last differs in its sizes alone
    return [s for config, s in found.items() if s not in apart and not getattr(config, "reallocate", False)]


@pytest.mark.parametrize("selector_spec", specs())
class TestEverySelector(SelectorConformance):
    pass


@pytest.mark.parametrize("selector_spec", GROUPED)
class TestGroupDecisions(SelectorConformance):
    decides_per = "group"


class MeanValueConformance(SelectorConformance):
    @pytest.fixture(autouse=True)
    def remember(self, selector_spec):
        self.rank = make_config(selector_spec).rank

    def expected(self, step):
        """In float64, from the selector's own support: (1 - ρ) · attention + ρ · mean value.

        ρ is the mass of the approximate weights outside the support. A weight is as far off as the exponent of its
        score, then ρ at most as much relative to itself.
        """
        batch, kv_heads, length, _ = step.keys.shape
        query = step.query.double().view(batch, kv_heads, -1, step.query.shape[3])
        keys, values = step.keys.double(), step.values.double()
        merit = query.abs().sum(2).nan_to_num(-1.0)
        dims = merit.sort(dim=-1, descending=True, stable=True).indices[..., : self.rank]
        part = query.gather(3, dims[:, :, None].expand(-1, -1, query.shape[2], -1))
        share = part.abs().sum(-1, keepdim=True) / query.abs().sum(-1, keepdim=True)
        factor = step.scale / torch.where(share.isfinite() & (share > 0), share, 1.0).sqrt()
        rows = keys.gather(3, dims[:, :, None].expand(-1, -1, length, -1)).transpose(2, 3)
        limit = torch.finfo(torch.float32).max
        scores = (part @ rows * factor).nan_to_num(-limit, limit, -limit)
        unseen = (torch.arange(length) >= step.lengths[:, None])[:, None, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outside = weights.masked_fill(step.mask.view(weights.shape), 0.0).sum(-1).view(batch, -1, 1, 1)

        error = gamma(self.rank + 8) * (part.abs() @ rows.abs() * factor).nan_to_num(0.0, 0.0, 0.0)
        spread = (scores - scores.amax(-1, keepdim=True)).abs().masked_fill(weights == 0, 0.0)
        exponent = 2 * error.amax(-1) + unit_roundoff(torch.float32) * spread.amax(-1)
        relative = 2 * (torch.expm1(exponent) + gamma(3 * length + 16)).view(outside.shape)
        group = query.shape[2]
        visible = step.lengths[:, None, None, None]
        mean, size = ((v.sum(2, keepdim=True) / visible).repeat_interleave(group, 1) for v in (values, values.abs()))
        attention = step.expected()
        output = (1 - outside) * attention.output + outside * mean
        bound = (1 - outside) * attention.bound + outside * gamma(length + 16) * size
        bound = bound + (outside * relative + gamma(8)) * (attention.output.abs() + mean.abs())
        if step.query.dtype != torch.float32:
            bound = bound + unit_roundoff(step.query.dtype) * output.abs()
        return Expected(output, bound)


@pytest.mark.parametrize("selector_spec", MEAN_VALUE)
class TestMeanValue(MeanValueConformance):
    pass


class FixedPartsConformance(SelectorConformance):
    overrides: ClassVar = {"topk": 16, "sink_size": 3, "local_size": 4}


@pytest.mark.parametrize("selector_spec", FIXED_PARTS)
class TestFixedParts(FixedPartsConformance):
    pass


class CachePositionsConformance(SelectorConformance):
    @pytest.fixture(autouse=True)
    def remember(self, selector_spec):
        self.sink_size = make_config(selector_spec).sink_size

    def expected(self, step):
        """Attention over the support, the sinks' keys turned forward by as many positions as were left out."""
        dim = step.keys.shape[3]
        inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        left_out = step.lengths - step.mask[:, 0].sum(-1)
        angles = (left_out[:, None] * inv_freq.double())[:, None, None]  # [B, 1, 1, D / 2]
        sinks, others = step.keys[:, :, : self.sink_size].double(), step.keys[:, :, self.sink_size :].double()
        turned = torch.complex(*sinks.chunk(2, dim=3)) * torch.polar(torch.ones_like(angles), angles)
        keys = torch.cat([torch.cat([turned.real, turned.imag], dim=3), others], dim=2)
        attention = dataclasses.replace(step, keys=keys).expected()
        return Expected(attention.output, 2 * attention.bound)  # turning the query rounds as well


@pytest.mark.parametrize("selector_spec", CACHE_POSITIONS)
class TestCachePositions(CachePositionsConformance):
    pass


def test_nothing_installed_is_broken():
    assert registry().broken == []
