"""What a decode step costs by design: every selector's own account of itself, side by side at one geometry.

Nothing is run. `Selector.cost` says what one layer must read and compute; here that is summed over the layers of a
model and held against the bandwidth of a device. A decode step does few operations per byte it reads (G, the query
heads that share a key-value head, for dense attention), so bandwidth bounds it on any of the devices named.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from sparsesel.config import MAX_COUNT, AnyConfig, SelectorConfig
from sparsesel.eval.paths import Geometry, configs_by_layer, step_bytes
from sparsesel.registry import registry

if TYPE_CHECKING:
    from sparsesel.selector import LayerSpec, Selector

BANDWIDTHS = {
    "l4": 300,
    "a10": 600,
    "l20": 864,
    "l40s": 864,
    "rtx4090": 1008,
    "rtx5090": 1792,
    "a100": 2039,
    "h100": 3350,
    "h200": 4800,
    "mi300x": 5300,
    "b200": 8000,
}
"""Memory bandwidth in GB/s (10⁹ bytes) that vendors state: the 80 GB SXM form of A100 and H100."""

_SLOWEST = 1e-6  # GB/s; below it times could overflow

STRICT = "strict"
"""Preset of the budget that comparisons are made at."""


def strict_specs() -> list[str]:
    """Every selector installed at the budget of comparisons: its preset `strict` if it has one."""
    names = list(registry().selectors)
    return [f"{name}:{STRICT}" if STRICT in registry().presets(name) else name for name in names]


def bandwidth_of(value: Any) -> Any:
    """A name or a number as GB/s."""
    text = str(value).strip().lower()
    try:
        number = float(BANDWIDTHS.get(text, text))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= _SLOWEST):
        raise ValueError(f"a number of at least {_SLOWEST:g} or one of {', '.join(BANDWIDTHS)}")
    return number


class CostConfig(BaseModel):
    """What is modelled."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    kv_heads: int = Field(ge=1, le=MAX_COUNT, description="Hkv: key-value heads of a layer.")
    heads: int = Field(ge=1, le=MAX_COUNT, description="Hq: query heads of a layer, a multiple of the key-value heads.")
    head_dim: int = Field(ge=1, le=MAX_COUNT, description="D: channels of a head.")
    layers: int = Field(ge=1, le=10_000, description="Layers with attention.")
    contexts: tuple[int, ...] = Field(
        strict=False, min_length=1, description="Visible keys, the current token's included."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Type of queries, keys and values."
    )
    bandwidth: Annotated[float, BeforeValidator(bandwidth_of)] = Field(
        default=BANDWIDTHS["l20"], description="Memory bandwidth in GB/s."
    )

    @field_validator("heads")
    @classmethod
    def _heads_share_evenly(cls, heads: int, info: ValidationInfo) -> int:
        kv_heads = info.data.get("kv_heads", 1)
        if heads % kv_heads:
            raise ValueError(f"a multiple of kv_heads={kv_heads}")
        return heads

    @field_validator("contexts")
    @classmethod
    def _contexts_are_lengths(cls, contexts: tuple[int, ...]) -> tuple[int, ...]:
        if min(contexts) < 1 or len(set(contexts)) < len(contexts):
            raise ValueError("positive lengths, each once")
        if max(contexts) > MAX_COUNT:
            raise ValueError(f"at most {MAX_COUNT}")
        return contexts


@dataclass(frozen=True)
class CostRow:
    """One selector at one context: one decode step of one sequence, summed over layers.

    Attributes:
        selector: As it was named.
        context: Visible keys L.
        attended: Keys attended per query head, the mean over layers.
        dense_layers: Layers that attend to everything although the budget is smaller.
        key_bytes: Bytes of keys read.
        value_bytes: Bytes of values read.
        metadata_bytes: Bytes of the selector's own state read.
        score_bytes: Bytes of intermediate scores written and read back.
        bytes_read: All of these.
        flops: Floating-point operations.
        state_bytes: Bytes kept beside the KV cache.
        milliseconds: `bytes_read` at the bandwidth.
        speedup_full: Bytes that `full` reads over these.
        speedup_exact: Bytes that `exact_topk` reads, at the same budget in each layer, over these.
        assumes: What kind of step it is, where the selector has several; see `StepCost`.
    """

    selector: str
    context: int
    attended: float
    dense_layers: int
    key_bytes: float
    value_bytes: float
    metadata_bytes: float
    score_bytes: float
    bytes_read: float
    flops: float
    state_bytes: float
    milliseconds: float
    speedup_full: float
    speedup_exact: float
    assumes: str


def cost_rows(config: CostConfig, selectors: Mapping[str, AnyConfig]) -> list[CostRow]:
    """The cost of each selector at each context, contexts in the order given.

    Args:
        config: The geometry and the bandwidth.
        selectors: Resolved configuration of each selector, by the name to show; layers that one leaves out are dense.

    Raises:
        InputError: A selector cannot be made, or not for such layers.
    """
    geometry = Geometry(config.heads, config.kv_heads, config.head_dim, tuple(range(config.layers)), config.dtype)
    layers = geometry.specs()
    configs = {name: configs_by_layer(one, geometry.layers) for name, one in selectors.items()}
    made = {name: _each(registry().make_selector, per_layer) for name, per_layer in configs.items()}
    exact = {name: _each(_exact_like, per_layer) for name, per_layer in configs.items()}
    full = [registry().make_selector("full")] * config.layers
    rows = []
    for context in config.contexts:
        dense = _total(full, layers, context)["bytes_read"]
        for name, per_layer in made.items():
            total = _total(per_layer, layers, context)
            read = total["bytes_read"]
            rows.append(
                CostRow(
                    selector=name,
                    context=context,
                    **total,
                    milliseconds=read / (config.bandwidth * 1e6),
                    speedup_full=dense / read,
                    speedup_exact=_total(exact[name], layers, context)["bytes_read"] / read,
                )
            )
    return rows


def model_cost(model: Any, config: AnyConfig, context: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The cost of one decode step in a loaded model, over the layers that a selector may serve; nothing is run.

    What is written beside each result: `attended`, `bytes_read` and `state_bytes` as in `CostRow`, of the step that
    `StepCost.assumes` names; `step_bytes`, read with the paths and candidates that were counted; `full_bytes` and
    `exact_bytes`, what dense attention and exact Top-K at the same budget read; how many `layers` there are, and how
    many `dense_layers` among them attend to everything.

    Args:
        model: A Hugging Face model.
        config: The selector's; layers that it leaves out are dense.
        context: Visible keys.
        metrics: What the run counted, as `sparsesel.eval.paths.step_bytes` takes it.

    Raises:
        InputError: The selector does not fit the model.
    """
    geometry = Geometry.of(model.config, str(model.dtype).removeprefix("torch."))
    layers, configs = geometry.specs(), configs_by_layer(config, geometry.layers)
    full = [registry().make_selector("full")] * len(layers)
    made = _each(registry().make_selector, configs)
    own = _total(made, layers, context)
    attended = [selector.cost(layer, context).attended for selector, layer in zip(made, layers, strict=True)]
    return {
        "layers": len(layers),
        "dense_layers": sum(one >= context for one in attended),
        "attended": own["attended"],
        "bytes_read": own["bytes_read"],
        "step_bytes": step_bytes(config, layers, context, metrics),
        "state_bytes": own["state_bytes"],
        "full_bytes": _total(full, layers, context)["bytes_read"],
        "exact_bytes": _total(_each(_exact_like, configs), layers, context)["bytes_read"],
    }


def _each(make: "Callable[[SelectorConfig], Selector]", configs: Sequence[SelectorConfig]) -> "list[Selector]":
    """A selector for each configuration, one for those that are equal."""
    made = {config: make(config) for config in set(configs)}
    return [made[config] for config in configs]


def _exact_like(config: SelectorConfig) -> "Selector":
    """Exact Top-K at the budget of `config`, at its own default where that has none."""
    topk = getattr(config, "topk", None)
    return registry().make_selector("exact_topk", {} if topk is None else {"topk": topk})


def _total(selectors: "Sequence[Selector]", layers: "Sequence[LayerSpec]", context: int) -> dict[str, Any]:
    """Costs summed over layers; `attended` is a mean."""
    costs = [selector.cost(layer, context) for selector, layer in zip(selectors, layers, strict=True)]
    parts = [dataclasses.asdict(cost) for cost in costs]
    assumed = dict.fromkeys(part.pop("assumes") for part in parts)
    total: dict[str, Any] = {name: math.fsum(part[name] for part in parts) for name in parts[0]}
    total["attended"] /= len(costs)
    total["assumes"] = "; ".join(filter(None, assumed))
    dense = sum(cost.attended >= context for cost in costs)
    return {
        **total,
        "bytes_read": math.fsum(cost.bytes_read for cost in costs),
        "dense_layers": dense if dense < len(costs) else 0,
    }
