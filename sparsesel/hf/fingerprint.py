"""A name for a model, by which what was derived from it is told from what was derived from another."""

import hashlib
import json
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sparsesel.hf.layers import AttentionLayer

_SAMPLES = 512  # numbers taken from each parameter


def fingerprint(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> str:
    """SHA-256 over the model's kind, its rotary parameters and a sample of every parameter of its attention.

    It takes milliseconds whatever the size. Numbers are rounded to bfloat16 first, so that a model has one
    fingerprint in float32 and in bfloat16. Empty where weights are not in memory, as under offloading.
    """
    config = model.config.get_text_config(decoder=True)
    about = {
        "model_type": config.model_type,
        "rope_parameters": getattr(config, "rope_parameters", None),
        "rope_scaling": getattr(config, "rope_scaling", None),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.is_meta:
                return ""
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].to(torch.bfloat16).contiguous().cpu()
            digest.update(f"{layer.layer_idx} {name} {tuple(parameter.shape)}".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
