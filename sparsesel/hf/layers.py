"""Which layers of a model a selector can serve, and why the others cannot be."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from sparsesel.errors import UnsupportedModelError
from sparsesel.hf import compat

_LEFT_ALONE = {
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "dummy",
    "moe",
    "mlp",
}


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module of the decoder and whether it attends to the whole context."""

    layer_idx: int
    module: nn.Module
    is_full: bool


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """The decoder's attention modules, by layer.

    Raises:
        UnsupportedModelError: The model has attention that replacing its key selection would compute wrongly.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(name, "an encoder-decoder: its cross-attention does not decode token by token")
    if not getattr(model, "_supports_attention_backend", False):
        raise _refusal(name, "its attention cannot be exchanged through transformers' AttentionInterface")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        raise _refusal(name, "layers share one another's keys and values")
    implementation = config._attn_implementation
    if implementation not in compat.DENSE_IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"model {name}",
            expected=f"attention implementation {' or '.join(compat.DENSE_IMPLEMENTATIONS)}",
            got=repr(implementation),
            remedy='Load it with attn_implementation="sdpa", which uses flash kernels where they apply.',
        )
    kinds = compat.layer_types(model.config)
    layers: list[AttentionLayer] = []
    for layer_idx, kind in enumerate(kinds):
        if kind != "full_attention" and kind not in _LEFT_ALONE:
            raise _refusal(f"{name}, layer {layer_idx}", f"attention of kind {kind!r}")
    for module in decoder_of(model).modules():
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or "Attention" not in type(module).__name__:
            continue
        if layer_idx >= len(kinds) or kinds[layer_idx] not in (
            "full_attention",
            "sliding_attention",
            "chunked_attention",
        ):
            continue
        is_full = kinds[layer_idx] == "full_attention"
        reason = _unsupported(module, config) if is_full else None
        if reason is not None:
            raise _refusal(f"{name}, layer {layer_idx} ({type(module).__name__})", reason)
        layers.append(AttentionLayer(layer_idx, module, is_full))
    full = [layer.layer_idx for layer in layers if layer.is_full]
    if not full:
        raise _refusal(name, "no layer attends to the whole context")
    if len(set(full)) != len(full) or len(full) != kinds.count("full_attention"):
        raise _refusal(name, f"expected one attention module for each full layer, found them for layers {full}")
    return layers


def _unsupported(module: nn.Module, config: object) -> str | None:
    """Why a selector cannot serve this module, None if it can."""
    if hasattr(module, "kv_lora_rank") or hasattr(module, "kv_a_proj_with_mqa"):
        return "latent attention (MLA): its cache holds compressed keys"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks as learned logits, which a support does not contain"
    for owner in (module, config):
        if getattr(owner, "attn_logit_softcapping", None) is not None:
            return "soft-capped attention logits"
    if getattr(module, "is_cross_attention", False) or getattr(module, "is_causal", True) is False:
        return "attention that is not causal self-attention"
    return None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of the model that holds its attention layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model


def _refusal(model: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model {model}",
        expected="causal softmax attention over a cache of keys and values",
        got=reason,
        remedy="Use it without sparsify, or select layers of another model.",
    )
