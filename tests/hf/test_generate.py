"""Under sparsify, every generation mode gives what the selector means."""

import pytest
import torch
from transformers import DynamicCache

from sparsesel import sparsify
from sparsesel.hf import compat

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "granite",
    "olmo2",
    "smollm3",
    "gpt_neox",
    "gpt2",
    "qwen3_moe",
    "gemma3_text",
)
MODES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3},
    "beam": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 7},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=kwargs.pop("max_new_tokens", 16), **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_selection_gives_what_the_model_gives(tiny, prompt, family):
    model = tiny(family)
    expected = generate(model, prompt, do_sample=False)
    with sparsify(model, "full") as session:
        assert torch.equal(generate(model, prompt, do_sample=False), expected)
    full_layers = compat.layer_types(model.config).count("full_attention")
    assert session.stats().total["steps"] == 15 * 4 * full_layers
    assert session.stats().density == 1


@pytest.mark.parametrize("selector", ["full", "exact_topk,topk=4096", "retopk,topk=4096"])
@pytest.mark.parametrize("mode", MODES)
def test_a_budget_beyond_the_context_is_dense_in_every_mode(tiny, prompt, mode, selector):
    model = tiny()
    expected = generate(model, prompt, **MODES[mode])
    for multi_token in ("dense", "select"):
        with sparsify(model, selector, multi_token=multi_token) as session:
            assert torch.equal(generate(model, prompt, **MODES[mode]), expected)
        assert session.stats().total["steps"] > 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "chunked prefill"])
def test_left_padding_is_never_attended(tiny, padded, mode, implementation):
    model = tiny(attn_implementation=implementation)
    expected = generate(model, padded["input_ids"], attention_mask=padded["attention_mask"], **MODES[mode])
    with sparsify(model, "exact_topk,topk=4096"):
        got = generate(model, padded["input_ids"], attention_mask=padded["attention_mask"], **MODES[mode])
    assert torch.equal(got, expected)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    "selector", ["exact_topk,topk=6", "retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5"]
)
def test_a_padded_batch_generates_what_its_prompts_generate_alone(tiny, padded, selector):
    model = tiny()
    with sparsify(model, selector):
        together = generate(model, padded["input_ids"], attention_mask=padded["attention_mask"], do_sample=False)
        for row, mask in enumerate(padded["attention_mask"]):
            alone = generate(model, padded["input_ids"][row : row + 1, mask.bool()], do_sample=False)
            assert torch.equal(together[row, -16:], alone[0, -16:])


def test_a_small_budget_changes_what_is_generated_and_holds(tiny, prompt):
    model = tiny()
    dense = generate(model, prompt, do_sample=False, max_new_tokens=40)
    with sparsify(model, "exact_topk", topk=3) as session:
        sparse = generate(model, prompt, do_sample=False, max_new_tokens=40)
    assert not torch.equal(dense, sparse)
    total = session.stats().total
    assert total["selected"] == 3 * total["steps"]


@pytest.mark.parametrize(
    "selector", ["retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5", "exact_topk,topk=6"]
)
@pytest.mark.parametrize("assistant", ["draft model", "prompt lookup"])
def test_assisted_decoding_equals_greedy_when_every_token_selects(tiny, prompt, selector, assistant):
    model = tiny()
    # A draft that is often right and often wrong: the model with noise on its weights.
    draft = tiny()
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    help_ = {"assistant_model": draft} if assistant == "draft model" else {"prompt_lookup_num_tokens": 4}
    if assistant == "prompt lookup":
        prompt = prompt.repeat(1, 2)
    with sparsify(model, selector, multi_token="select") as session:
        greedy = generate(model, prompt, do_sample=False, max_new_tokens=32)
        greedy_steps = session.stats().total["steps"]
        assisted = generate(model, prompt, do_sample=False, max_new_tokens=32, **help_)
        assisted_steps = session.stats().total["steps"] - greedy_steps
    assert torch.equal(assisted, greedy)
    assert assisted_steps > greedy_steps  # rejected drafts were steps too, so crop was exercised


def test_a_prompt_of_one_token_is_a_prompt(tiny, prompt):
    """Not a decode step, whoever brings it: alone, in a padded batch, or together with a draft."""
    model = tiny()
    draft = tiny()
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    short = prompt[:, -1:]
    batch = torch.cat([prompt, torch.nn.functional.pad(short, (39, 0))])
    mask = torch.ones_like(batch)
    mask[1, :39] = 0
    spec = "retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5,similarity_threshold=0.5"
    with sparsify(model, spec, multi_token="select") as session:
        alone = generate(model, short, do_sample=False, max_new_tokens=40)
        assert session.stats().total["steps"] == 39 * 4 * 3
        together = generate(model, batch, attention_mask=mask, do_sample=False, max_new_tokens=40)
        assisted = generate(model, short, do_sample=False, max_new_tokens=40, assistant_model=draft)
    assert torch.equal(together[1, -40:], alone[0, -40:])
    assert torch.equal(assisted, alone)


@pytest.mark.parametrize("chunk", [1, 2, 13])
@pytest.mark.parametrize("multi_token", ["dense", "select"])
def test_sequences_may_begin_in_any_chunk(tiny, padded, chunk, multi_token):
    model = tiny()
    ids, mask = padded["input_ids"], padded["attention_mask"]
    expected = generate(model, ids, attention_mask=mask, do_sample=False)
    for spec in ("full", "exact_topk,topk=4096", "retopk,topk=4096"):
        with sparsify(model, spec, multi_token=multi_token):
            got = generate(model, ids, attention_mask=mask, do_sample=False, prefill_chunk_size=chunk)
        assert torch.equal(got, expected)


def test_a_float64_model_is_served(tiny, prompt):
    model = tiny().double()
    expected = generate(model, prompt, do_sample=False)
    for spec in ("full", "exact_topk,topk=4096", "retopk,topk=4096"):
        with sparsify(model, spec):
            assert torch.equal(generate(model, prompt, do_sample=False), expected)


def test_nothing_leaks_from_one_prompt_to_the_next(tiny, prompt):
    model = tiny()
    other = prompt.flip(1)
    spec = "retopk,topk=6,window_size=3,cache_size=8"
    with sparsify(model, spec):
        alone = generate(model, other, do_sample=False)
    with sparsify(model, spec):
        generate(model, prompt, do_sample=False)
        assert torch.equal(generate(model, other, do_sample=False), alone)


def test_two_generations_can_interleave(tiny, prompt):
    model = tiny()
    prompts = [prompt, prompt.flip(1)]
    spec = "retopk,topk=6,window_size=3,cache_size=8"

    def stepper(ids):
        cache = None
        while True:
            output = model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
            cache = compat.cache_of(output)
            ids = output.logits[:, -1:].argmax(-1)
            yield int(ids)

    with sparsify(model, spec), torch.no_grad():
        one_by_one = [[token for token, _ in zip(stepper(ids), range(12), strict=False)] for ids in prompts]
        first, second = map(stepper, prompts)
        interleaved = [list(pair) for pair in zip(*((next(first), next(second)) for _ in range(12)), strict=True)]
    assert interleaved == one_by_one


def test_a_second_turn_continues_the_same_state(tiny, prompt):
    model = tiny()
    spec = "retopk,topk=6,window_size=3,cache_size=8"
    turn = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 8}

    def two_turns(first_session, second_session):
        cache = DynamicCache(config=model.config)
        with first_session():
            first = model.generate(prompt, **turn, **{compat.CACHE_ARGUMENT: cache})
        longer = torch.cat([first.sequences, prompt[:, :9]], dim=1)
        with second_session():
            return model.generate(longer, **turn, **{compat.CACHE_ARGUMENT: cache}).sequences

    session = sparsify(model, spec)
    try:
        import contextlib

        in_one = two_turns(contextlib.nullcontext, contextlib.nullcontext)
    finally:
        session.close()
    in_two = two_turns(lambda: sparsify(model, spec), lambda: sparsify(model, spec))
    assert torch.equal(in_one, in_two)


def test_a_cache_filled_before_sparsify_is_taken_over(tiny, prompt, padded):
    model = tiny()
    for inputs in ({"input_ids": prompt}, padded):
        with torch.no_grad():
            dense = model(**inputs, use_cache=True)
            cache = compat.cache_of(dense)
            token = dense.logits[:, -1:].argmax(-1)
            mask = inputs.get("attention_mask")
            step = {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)} if mask is not None else {}
            position = None if mask is None else step["attention_mask"].sum(1, keepdim=True) - 1
            step["position_ids"] = position
            reference = compat.cache_of(model(**inputs, use_cache=True))
            expected = model(token, **step, **{compat.CACHE_ARGUMENT: reference}).logits
            with sparsify(model, "retopk,topk=4096"):
                got = model(token, **step, **{compat.CACHE_ARGUMENT: cache}).logits
        torch.testing.assert_close(got, expected)


def test_layers_can_have_selectors_of_their_own(tiny, prompt):
    model = tiny()
    with sparsify(model, {"0-1": "full", 2: "exact_topk,topk=5"}) as session:
        generate(model, prompt, do_sample=False)
    stats = session.stats()
    assert {layer: s.config.name for layer, s in session.selectors.items()} == {
        0: "full",
        1: "full",
        2: "exact_topk",
    }
    assert stats.layers[2]["selected"].sum() == 5 * stats.layers[2]["steps"].sum()
    assert torch.equal(stats.layers[0]["selected"], stats.layers[0]["visible"])
    with sparsify(model, {"1-": "full"}) as session:
        generate(model, prompt, do_sample=False)
    assert set(session.stats().layers) == {1, 2}


def test_no_mask_is_made_for_a_decode_step_without_padding(tiny, prompt, monkeypatch):
    model = tiny()
    seen = []
    from sparsesel.hf import inject

    original = inject.Session._attention

    def spy(self, call, module, query, key, value, mask, **kwargs):
        if query.shape[2] == 1:
            seen.append(mask)
        return original(self, call, module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(inject.Session, "_attention", spy)
    with sparsify(model, "full"):
        generate(model, prompt, do_sample=False)
    assert len(seen) == 15 * 3
    assert all(mask is None for mask in seen)
