"""What LayerSpec says of a layer's rotary embedding is what the model does."""

from types import SimpleNamespace

import pytest
import torch

from sparsesel import make_config, sparsify
from sparsesel.selector import SelectorState, Support, discover_and_aggregate

PAIRS = {"partial_rotary_factor": 0.5, "rope_theta": 1000.0, "rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 64,
}
KNOWN = {
    "llama": {},
    "llama, yarn": {"rope_parameters": YARN},
    "llama, llama3": {"rope_parameters": LLAMA3},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "phi3": {"rope_parameters": PAIRS},
    "granite": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_neox": {"rope_parameters": PAIRS},
    "gemma3_text": {},
    "cohere": {},
    "glm": {"rope_parameters": PAIRS},
}
UNKNOWN = {
    "gpt2": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
}


class Recorder:
    """A dense selector that keeps the queries of a prompt and the layer they came from."""

    config = make_config("full")

    def __init__(self):
        self.seen = {}

    def init_state(self, layer):
        return SelectorState(layer)

    def observe_prefill(self, query, kv, state, *, scale):
        self.seen[state.layer.layer_idx] = SimpleNamespace(rotary=state.layer.rotary, query=query.clone())

    def discover(self, query, kv, state, *, scale):
        return Support.everything(kv)

    def aggregate(self, query, kv, support, state, *, scale):
        return torch.zeros_like(query)

    def attend(self, query, kv, state, *, scale):
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer, length):
        raise NotImplementedError


def record(model):
    """Queries of every layer where all positions hold the same token: attention averages equal values, so hidden
    states are equal at all positions and nothing but their rotation tells queries apart."""
    recorder = Recorder()
    with sparsify(model, recorder), torch.no_grad():
        model(torch.full((2, 9), 5), use_cache=True)
    return recorder.seen


@pytest.mark.parametrize("family", KNOWN)
def test_queries_turn_as_the_layer_says(tiny, family):
    seen = record(tiny(family.split(",")[0], **KNOWN[family]))
    assert len(seen) == (2 if family == "gemma3_text" else 3)
    for layer in seen.values():
        assert layer.rotary is not None
        for start, offset in ((0, 8), (2, 5), (7, -7)):
            turned = layer.rotary.rotate(layer.query[:, :, start : start + 1], torch.tensor([offset, offset]))
            expected = layer.query[:, :, start + offset : start + offset + 1]
            torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-4)
            moves = layer.rotary.inv_freq.numel() > 0
            assert moves == (not torch.allclose(layer.query[:, :, start : start + 1], expected, rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize("family", UNKNOWN)
def test_what_is_not_known_is_not_claimed(tiny, family):
    assert all(layer.rotary is None for layer in record(tiny(family, **UNKNOWN[family])).values())
