"""What a step reads by design when its heads take different paths: some choose among few keys, some scan all.

A selector's own `cost` is that of one kind of step. How often the other one was taken, and how many candidates there
were, a run has counted; here both are put together. Nothing is run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from sparsesel.config import AnyConfig, LayeredConfig, SelectorConfig, spread_layers
from sparsesel.registry import registry

if TYPE_CHECKING:
    from sparsesel.selector import LayerSpec


@dataclass(frozen=True)
class Geometry:
    """The attention layers of a model.

    Attributes:
        heads: Hq, query heads of a layer.
        kv_heads: Hkv, key-value heads of a layer.
        head_dim: D, channels of a head.
        layers: Indices of the layers that attend to the whole context.
        dtype: Type of queries, keys and values: `"float32"`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, config: Any, dtype: str) -> Self:
        """That of a model's `transformers` configuration, running in `dtype`."""
        from sparsesel.hf import compat

        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return cls(
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            layers=tuple(i for i, kind in enumerate(compat.layer_types(config)) if kind == "full_attention"),
            dtype=dtype,
        )

    def specs(self, device: str = "meta") -> "list[LayerSpec]":
        """The layers as selectors know them."""
        import torch

        from sparsesel.selector import LayerSpec

        return [
            LayerSpec(
                layer_idx=layer_idx,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtype=getattr(torch, self.dtype),
                device=torch.device(device),
            )
            for layer_idx in self.layers
        ]

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} layers of {self.heads} query heads over {self.kv_heads} key-value heads of "
            f"{self.head_dim}, {self.dtype}"
        )


def configs_by_layer(config: AnyConfig, layers: Sequence[int]) -> list[SelectorConfig]:
    """The configuration that serves each layer; layers that `config` leaves out are dense."""
    if not isinstance(config, LayeredConfig):
        return [config] * len(layers)
    spread = spread_layers(config.layers, layers)
    return [spread.get(layer) or registry().make_config("full") for layer in layers]


def step_bytes(config: AnyConfig, layers: "Sequence[LayerSpec]", context: int, metrics: Mapping[str, Any]) -> float:
    """Bytes that one decode step reads in all of `layers` at `context` visible keys, by design.

    A selector that takes one path only reads what it says. Of one that reuses earlier choices, the heads that did read
    the candidates that were counted, and those that did not scan all keys as exact top-K does. Query heads that share
    a key-value head share its scan: it takes place if any of them is exact, and as counts do not say which of them are
    so together, they are taken to be so by chance, which is the most there can be for such counts; in a refresh, all
    are.

    Args:
        config: The selector's; layers that it leaves out are dense.
        layers: Those that may be served.
        context: Visible keys L.
        metrics: What a run counted, as tasks report it: `exact_share`, `refresh_share`, `reuse_share`, `candidates`; of
            TokenSelect, `miss_share`.

    Raises:
        InputError: A selector cannot serve such layers.
    """
    configs = configs_by_layer(config, [layer.layer_idx for layer in layers])
    made = {one: registry().make_selector(one) for one in set(configs)}
    return sum(_layer_bytes(made[one], layer, context, metrics) for one, layer in zip(configs, layers, strict=True))


def _layer_bytes(selector: Any, layer: "LayerSpec", context: int, metrics: Mapping[str, Any]) -> float:
    own = selector.cost(layer, context)
    if not hasattr(selector.config, "similarity_threshold"):  # it never asks whether to reuse
        return own.bytes_read
    everything = registry().make_selector("exact_topk").cost(layer, context)
    miss, exact = metrics.get("miss_share"), metrics.get("exact_share")
    if miss is not None:  # all heads together
        return own.bytes_read + miss * (everything.key_bytes + everything.score_bytes)
    if exact is None:
        return own.bytes_read
    row = layer.batch_size * layer.num_attention_heads * layer.head_dim * layer.dtype.itemsize
    most = own.key_bytes / row  # candidates that its own cost counts
    fewer = 1.0 if metrics.get("candidates") is None else min(1.0, metrics["candidates"] / most)
    refresh = metrics.get("refresh_share") or 0.0
    alone = (exact - refresh) / (1 - refresh) if refresh < 1 else 0.0
    scanned = refresh + (1 - refresh) * (1 - (1 - alone) ** layer.group_size)
    return (
        own.value_bytes
        + own.metadata_bytes
        + (1 - exact) * fewer * (own.key_bytes + own.score_bytes)
        + scanned * everything.key_bytes
        + exact * everything.score_bytes
    )


@dataclass(frozen=True)
class PathMix:
    """How often heads cannot reuse what they chose before.

    Attributes:
        fallback: Share of (head, step) pairs in which a head by itself is unlike its past.
        refresh: Share of steps in which all heads scan everything.
        together: Whether the heads of a layer are unlike their past together, as for a selector that keeps one choice
            for all of them.
    """

    fallback: float = 0.0
    refresh: float = 0.0
    together: bool = False

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`"0.875/0.119/0.006"`, shares of reuse, fallback and refresh; None if it is no three numbers.

        Raises:
            ValueError: Shares that are none, or that do not add up to 1.
        """
        parts = text.split("/")
        try:
            reuse, fallback, refresh = map(float, parts)
        except ValueError:
            return None
        if min(reuse, fallback, refresh) < 0 or not abs(reuse + fallback + refresh - 1) <= 0.005 or refresh == 1:
            raise ValueError("shares of reuse, fallback and refresh that add up to 1")
        return cls(fallback, refresh)

    @classmethod
    def counted(cls, metrics: Mapping[str, Any]) -> Self:
        """That of a result line's metrics; a selector with one path only has no such mix."""
        if metrics.get("miss_share") is not None:
            return cls(metrics["miss_share"], 0.0, together=True)
        if metrics.get("reuse_share") is None or metrics.get("exact_share") is None:
            return cls()
        refresh = metrics.get("refresh_share") or 0.0
        return cls(metrics["exact_share"] - refresh, refresh)

    def __str__(self) -> str:
        return f"{1 - self.fallback - self.refresh:.4g}/{self.fallback:.4g}/{self.refresh:.4g}"
