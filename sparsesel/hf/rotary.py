"""How the layers of a model rotate queries and keys, for the families that this is known of."""

import torch
from transformers import PreTrainedModel

from sparsesel.hf.layers import AttentionLayer, decoder_of
from sparsesel.rotary import Rotary

# Model types, and whether pairs of channels are neighbours. A family belongs here when all its full-attention layers
# apply the decoder's `rotary_emb`, or say in `use_rope` that they do not; tests/hf/test_rotary.py holds each to it.
_INTERLEAVED = {
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "qwen2": False,
    "qwen3": False,
    "qwen3_moe": False,
    "phi3": False,
    "granite": False,
    "olmo2": False,
    "smollm3": False,
    "gpt_neox": False,
    "gemma3_text": False,
    "cohere": True,
    "glm": True,
}
# Of these, the frequencies depend on the length seen so far, so that cached keys may have been turned by others.
_CHANGING = ("dynamic", "longrope")


def rotary_of(model: PreTrainedModel, layer: AttentionLayer) -> Rotary | None:
    """Rotary embedding of a full-attention layer, None where it is not known for sure."""
    family = model.config.get_text_config(decoder=True).model_type
    embedding = getattr(decoder_of(model), "rotary_emb", None)
    if family not in _INTERLEAVED or embedding is None:
        return None
    if not getattr(layer.module, "use_rope", True):
        return Rotary(torch.zeros(0))
    rope_type, inv_freq = embedding.rope_type, getattr(embedding, "inv_freq", None)
    if isinstance(rope_type, dict):  # by type of layer
        rope_type = rope_type.get("full_attention")
        inv_freq = getattr(embedding, "full_attention_inv_freq", None)
    if inv_freq is None or rope_type in _CHANGING:
        return None
    return Rotary(inv_freq.detach().float(), interleaved=_INTERLEAVED[family])
