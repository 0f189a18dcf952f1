"""Tiny random models of many families, and prompts for them."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "gpt_neox": {"hidden_act": "gelu"},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """Makes a tiny random model of a family, the same one every time."""

    def make(family: str = "llama", attn_implementation: str = "sdpa", **changes: object) -> PreTrainedModel:
        config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **changes})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
        for parameter in model.parameters():
            # Wider than the usual initialisation, so that attention is peaked and what it attends to matters.
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        return model.eval()

    return make


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, 128, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def padded() -> dict[str, torch.Tensor]:
    """Three prompts of 30, 23 and 17 tokens, padded on the left."""
    ids = torch.randint(1, 128, (3, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 7, 13)):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}
