"""Every difference between the supported transformers versions, and nothing else.

The keyword for the cache changed from `past_key_values` to `cache` within the 5.x series, and a positive argument
of `crop` (once: the length to keep) became an error.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import __version__ as TRANSFORMERS_VERSION
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaModel

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
"""Keyword under which this version's models take their cache."""

POSITIVE_CROP_KEEPS = Version(TRANSFORMERS_VERSION) < Version("5.18")
"""Whether `crop(n)` with n > 0 still means "keep n tokens" rather than being an error."""

DENSE_IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention implementations that prefill can run through."""


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `function` selectable as attention implementation `name`, with the masks of sdpa.

    Without a mask function of the same name, models get no mask at all: causality and padding are silently lost.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def cache_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache among a call's arguments, whatever the model family calls it."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def cache_of(output: Any) -> Cache:
    """The cache of a model's output."""
    return output[CACHE_ARGUMENT]


def layer_types(config: Any) -> list[str]:
    """Kind of each decoder layer as the cache of such a model sees it: `full_attention`, `sliding_attention`, …"""
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]


def dense_attention(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `module` through the implementation it was loaded with.

    Args:
        implementation: One of `DENSE_IMPLEMENTATIONS`.
        module: The attention module.
        query: `[B, Hq, Tq, D]`.
        key: `[B, Hkv, Tk, D]`.
        value: As `key`.
        mask: What `sdpa_mask` made: `[B, 1, Tq, Tk]` bool, or None for plain causal attention.
        kwargs: Handed on.

    Returns:
        Output `[B, Tq, Hq, D]` and, from eager attention, the weights.
    """
    if implementation == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
        return function(module, query, key, value, _additive(mask, query, key), **kwargs)
    return AttentionInterface()[implementation](module, query, key, value, mask, **kwargs)


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The float mask that eager attention adds to its scores; it knows no implicit causality."""
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])[None, None]
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)
