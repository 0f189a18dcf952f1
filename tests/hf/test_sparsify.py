"""sparsify refuses what it cannot do right and leaves no trace."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from sparsesel import InputError, sparsify
from sparsesel.errors import UnsupportedModelError
from sparsesel.hf import compat

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
REFUSED = {
    "deepseek_v3": (
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        "MLA",
    ),
    "gpt_oss": ({"num_local_experts": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2}, "sinks"),
    "gemma2": ({"head_dim": 16, "layer_types": ["full_attention"] * 2}, "soft-capped"),
    "mistral": ({"sliding_window": 8}, "no layer attends to the whole context"),
    "bloom": ({"n_head": 2, "n_layer": 2}, "AttentionInterface"),
}


def hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_served_are_refused_by_name_and_reason(family):
    changes, reason = REFUSED[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        sparsify(model, "full")
    assert type(model).__name__ in str(error.value)
    assert hooks_of(model) == 0


def test_encoder_decoders_are_refused():
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        sparsify(AutoModelForSeq2SeqLM.from_config(config), "full")


def test_an_attention_implementation_that_prefill_cannot_run_is_refused(tiny):
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="flex_attention"):
        sparsify(model, "full")


def test_the_model_is_restored_on_exit_and_after_an_exception(tiny, prompt):
    model = tiny()
    before = model(prompt).logits
    with pytest.raises(KeyError, match="mine"), sparsify(model, "full"):
        raise KeyError("mine")
    session = sparsify(model, "full")
    assert hooks_of(model) == 6
    session.close()
    session.close()
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(prompt).logits, before)


def test_the_model_is_restored_when_installing_fails_midway(tiny, monkeypatch):
    model = tiny()
    last = model.model.layers[-1].self_attn

    def refuse(*_, **__):
        raise RuntimeError("no hook today")

    monkeypatch.setattr(last, "register_forward_pre_hook", refuse)
    with pytest.raises(RuntimeError, match="no hook today"):
        sparsify(model, "full")
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == "sdpa"


def test_a_sparsified_model_is_not_sparsified_again(tiny):
    model = tiny()
    with sparsify(model, "full"), pytest.raises(InputError, match="Close the other session"):
        sparsify(model, "exact_topk")
    with sparsify(model, "exact_topk"):
        pass


def test_a_model_that_shares_the_configuration_object_is_served_as_before(tiny, prompt):
    model = tiny()
    other = type(model)(model.config).eval()
    expected = other.generate(prompt, max_new_tokens=5, do_sample=False)
    with sparsify(model, "exact_topk,topk=2"):
        assert torch.equal(other.generate(prompt, max_new_tokens=5, do_sample=False), expected)


def test_a_module_that_keeps_its_keyword_arguments_to_itself_is_found_out(tiny, prompt):
    model = tiny()
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args, **kwargs):
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith("sparsesel")}
        return original(*args, **kwargs)

    attention.forward = forward
    with sparsify(model, "full"), pytest.raises(RuntimeError, match="layer 1: LlamaAttention"):
        model(prompt)


def test_a_module_that_attends_twice_is_refused(tiny, prompt):
    model = tiny("diffllama")
    with sparsify(model, "full"), pytest.raises(UnsupportedModelError, match="second attention"):
        model.generate(prompt, max_new_tokens=2)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "StaticLayer"),
        ({"attention_mask": torch.tensor([[1] * 38 + [0] * 2])}, "left"),
        ({"attention_mask": torch.tensor([[1] * 10 + [0] * 2 + [1] * 28])}, "left"),
    ],
)
def test_a_generation_it_cannot_serve_is_refused(tiny, prompt, kwargs, match):
    model = tiny()
    with sparsify(model, "full"), pytest.raises(InputError, match=match):
        model.generate(prompt, max_new_tokens=4, do_sample=False, **kwargs)


def test_a_forgotten_padding_mask_is_refused(tiny, padded):
    model = tiny()
    with sparsify(model, "full"), torch.no_grad():
        output = model(**padded, use_cache=True)
        cache = {compat.CACHE_ARGUMENT: compat.cache_of(output)}
        with pytest.raises(InputError, match="left padding"):
            model(padded["input_ids"][:, -1:], **cache)


def test_padding_that_changes_is_refused(tiny, padded, prompt):
    model = tiny()
    longer = torch.nn.functional.pad(padded["attention_mask"], (0, 1), value=1)
    with sparsify(model, "full"), torch.no_grad():
        cache = {compat.CACHE_ARGUMENT: compat.cache_of(model(**padded, use_cache=True))}
        with pytest.raises(InputError, match="left padding"):
            model(padded["input_ids"][:, -1:], attention_mask=longer.flip(0), **cache)
        cache = {compat.CACHE_ARGUMENT: compat.cache_of(model(prompt, use_cache=True))}
        hidden = torch.ones(1, 41, dtype=torch.long)
        hidden[0, :3] = 0
        with pytest.raises(InputError, match="left padding"):
            model(prompt[:, -1:], attention_mask=hidden, **cache)


@pytest.mark.parametrize(
    ("selector", "kwargs", "match"),
    [
        ("retok", {}, "Did you mean 'retopk'"),
        ("retopk:papr", {}, "Did you mean 'paper'"),
        ("retopk", {"top_k": 5}, "Did you mean 'topk'"),
        (3, {}, "a spec, a SelectorConfig or a Selector"),
        ({}, {}, "some layer"),
        ({"0-1": "full", 1: "retopk"}, {}, "each layer once"),
        ({"7": "full"}, {}, "Correct the range"),
        ({"1-9": "full"}, {}, "Correct the range"),
        ({"a": "full"}, {}, "first-last"),
        ("full", {"multi_token": "both"}, "multi_token"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_touched(tiny, selector, kwargs, match):
    model = tiny()
    with pytest.raises(InputError, match=match):
        sparsify(model, selector, **kwargs)
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == "sdpa"


def test_what_is_not_a_transformers_model_is_refused():
    with pytest.raises(InputError, match="PreTrainedModel"):
        sparsify(torch.nn.Linear(2, 2), "full")


def test_training_is_refused(tiny, prompt):
    model = tiny().train()
    with sparsify(model, "full"), pytest.raises(InputError, match="eval"):
        model(prompt)


def test_autocast_is_refused(tiny, prompt):
    model = tiny()
    with sparsify(model, "full"), torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast"):
        model(prompt)
