"""A model generates the same text whichever backend runs its selectors, and says which one did."""

import dataclasses

import pytest
import torch
import triton

from sparsesel import InputError, make_selector, sparsify
from sparsesel.hf import compat, inject
from sparsesel.hf.cache import selector_layer
from sparsesel.ops import backend

CPU = torch.device("cpu")
RETOPK = "retopk,topk=6,window_size=3,cache_size=4,recall_size=2,refresh_interval=4"
# Its interpreter makes an int of an array of one number, which numpy 2.4 refuses.
interpreted = pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="Triton 3.6's interpreter has no loops")
SPECS = ("full", "exact_topk,topk=6", RETOPK)


def generated(model, inputs, selector, **arguments):
    """New tokens, and the session."""
    with sparsify(model, selector, **arguments) as session:
        tokens = model.generate(**inputs, max_new_tokens=7, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :].tolist(), session


@pytest.fixture
def model(tiny):
    """Small enough for Triton's interpreter."""
    return tiny(num_hidden_layers=2)


@interpreted
@pytest.mark.parametrize("selector", SPECS)
@pytest.mark.parametrize("batch", ["one prompt", "left-padded"])
def test_triton_generates_what_eager_generates(model, prompt, padded, selector, batch):
    inputs = {"input_ids": prompt} if batch == "one prompt" else {k: v[:2] for k, v in padded.items()}
    expected, eager = generated(model, inputs, selector, backend="eager")
    got, triton = generated(model, inputs, selector, backend="triton")
    assert got == expected
    assert (eager.backend, triton.backend) == ("eager", "triton")
    one, other = eager.stats(), triton.stats()
    assert (one.backend, other.backend) == ("eager", "triton")
    assert other.total == pytest.approx(one.total)  # the same paths were taken
    assert str(other).endswith("on triton")


@interpreted
@pytest.mark.parametrize("selector", SPECS)
def test_a_cache_may_go_on_under_the_other_backend(model, prompt, selector):
    tokens = torch.randint(1, 128, (6,), generator=torch.Generator().manual_seed(5)).tolist()

    def logits(*backends):
        cache, found = None, []
        with torch.no_grad():
            for name, ids in zip(backends, (prompt, *(torch.tensor([[token]]) for token in tokens)), strict=True):
                with sparsify(model, selector, backend=name):
                    output = model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
                cache = compat.cache_of(output)
                found.append(output.logits[:, -1])
        return torch.cat(found)

    expected = logits(*["eager"] * 7)
    torch.testing.assert_close(logits("eager", *["triton", "eager"] * 3), expected)


def test_auto_is_what_suits_the_device(model, prompt):
    _, session = generated(model, {"input_ids": prompt}, "full")
    assert session.backend == session.stats().backend == "eager"


@interpreted
def test_a_backend_is_in_force_for_the_selector_alone(model, prompt, monkeypatch):
    seen = {"selector": set(), "dense": set()}

    @dataclasses.dataclass(frozen=True)
    class Spy:
        inner: object

        @property
        def config(self):
            return self.inner.config

        def __getattr__(self, name):
            method = getattr(self.inner, name)

            def spied(*args, **kwargs):
                seen["selector"].add((name, backend.current(CPU)))
                return method(*args, **kwargs)

            return spied

    dense = compat.dense_attention

    def dense_attention(*args, **kwargs):
        seen["dense"].add(backend.current(CPU))
        return dense(*args, **kwargs)

    monkeypatch.setattr(inject.compat, "dense_attention", dense_attention)
    generated(model, {"input_ids": prompt}, Spy(make_selector("full")), backend="triton")
    assert seen == {
        "selector": {(name, "triton") for name in ("init_state", "observe_prefill", "attend")},
        "dense": {"eager"},
    }
    assert backend.current(CPU) == "eager"


@pytest.mark.parametrize(
    ("name", "match"), [("triton", "backend triton on cpu"), ("cuda", "one of auto, triton, eager; got 'cuda'")]
)
def test_a_backend_that_cannot_run_is_refused_before_the_model_is_touched(model, monkeypatch, name, match):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match=match):
        sparsify(model, "full", backend=name)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_more_heads_than_kernels_take_are_refused_before_the_prompt_is_attended_to(tiny, prompt, monkeypatch):
    model = tiny(hidden_size=68, num_attention_heads=17, num_key_value_heads=1, head_dim=4)
    expected, _ = generated(model, {"input_ids": prompt}, "full")
    with monkeypatch.context() as patch:
        patch.setattr(inject.compat, "dense_attention", lambda *_, **__: pytest.fail("attended"))
        with pytest.raises(InputError, match=r"at most 16 .* backend=eager"):
            generated(model, {"input_ids": prompt}, "full", backend="triton")
    assert generated(model, {"input_ids": prompt}, "full", backend="eager")[0] == expected


# Room for a known length


@pytest.mark.parametrize("capacity", [47, 64, 1000])
def test_with_room_for_all_tokens_nothing_is_moved(model, prompt, capacity):
    expected, _ = generated(model, {"input_ids": prompt}, "exact_topk,topk=6")
    places = set()
    update = inject.SelectorLayer.update

    def spy(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        places.update((keys.data_ptr(), values.data_ptr()))
        assert keys.stride(1) == capacity * 16
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inject.SelectorLayer, "update", spy)
        got, _ = generated(model, {"input_ids": prompt}, "exact_topk,topk=6", capacity=capacity)
    assert got == expected
    assert len(places) == 2 * 2  # keys and values of two layers


def test_beyond_its_capacity_a_cache_grows(model, prompt):
    expected, _ = generated(model, {"input_ids": prompt}, "full")
    for capacity in (1, 40, 43):
        assert generated(model, {"input_ids": prompt}, "full", capacity=capacity)[0] == expected


def test_a_cache_filled_before_is_given_room_at_its_next_step(model, prompt):
    with torch.no_grad():
        cache = compat.cache_of(model(prompt, use_cache=True))
        with sparsify(model, "full", capacity=500):
            model(prompt[:, :1], **{compat.CACHE_ARGUMENT: cache})
    assert selector_layer(cache, 0).keys.stride(1) == 500 * 16
    assert selector_layer(cache, 0).clone().capacity == 500


@pytest.mark.parametrize("capacity", [0, -1, True, 2.5, "100", 2**31])
def test_a_capacity_that_is_no_length_is_refused(model, capacity):
    with pytest.raises(InputError, match="capacity"):
        sparsify(model, "full", capacity=capacity)


@interpreted
def test_a_backward_pass_through_kernels_is_refused(model, prompt):
    """Their outputs have no gradient, which must not just be missing."""
    with sparsify(model, "full", backend="triton"):
        output = model(prompt, use_cache=True)
        output.logits.sum().backward()  # prefill is the model's own attention
        step = model(prompt[:, :1], use_cache=True, **{compat.CACHE_ARGUMENT: compat.cache_of(output)})
        with pytest.raises(InputError, match=r"backend.*no backward pass.*triton"):
            step.logits.sum().backward()


def test_closing_a_session_gives_its_scratch_back(model, monkeypatch):
    released = []
    monkeypatch.setattr(inject.workspace, "release", lambda: released.append(True))
    with sparsify(model, "retopk"):
        assert not released
    assert released
