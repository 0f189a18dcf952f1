"""A model's fingerprint: the same for the same model, another for any other."""

import pytest
import torch

from sparsesel.hf.fingerprint import fingerprint
from sparsesel.hf.inject import sparsify
from sparsesel.hf.layers import attention_layers
from sparsesel.registry import make_selector


def of(model):
    return fingerprint(model, attention_layers(model))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "gpt2", "qwen3"])
def test_it_is_the_models_own(tiny, family):
    model = tiny(family)
    first = of(model)
    assert len(first) == 64
    assert of(tiny(family)) == first
    assert of(tiny(family, attn_implementation="eager")) == first
    with torch.no_grad():
        next(iter(attention_layers(model)[-1].module.parameters())).add_(0.5)
    assert of(model) != first


def test_it_survives_a_conversion_to_bfloat16(tiny):
    model = tiny("llama")
    first = of(model)
    assert of(model.to(torch.bfloat16)) == first


def test_rotary_parameters_count(tiny):
    parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    assert of(tiny("llama", rope_parameters=parameters)) != of(tiny("llama"))


def test_it_is_empty_where_weights_are_not_in_memory(tiny):
    assert of(tiny("llama").to("meta")) == ""


def test_selectors_are_told(tiny, prompt):
    seen = set()

    class Spy:
        """Exact Top-K that notes which model its layers are of."""

        def __init__(self):
            self.inner = make_selector("exact_topk")

        def init_state(self, layer):
            seen.add(layer.model)
            return self.inner.init_state(layer)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    model = tiny("llama")
    with torch.inference_mode(), sparsify(model, Spy()):
        model(prompt, use_cache=True)
    assert seen == {of(model)}
