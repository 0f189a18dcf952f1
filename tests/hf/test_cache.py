"""Cache layers append in place, and the state goes where the cache goes."""

import pytest
import torch
from transformers import DynamicCache

from sparsesel import InputError, make_selector, sparsify
from sparsesel.hf import compat
from sparsesel.hf.cache import SelectorLayer, fork, selector_layer
from sparsesel.selector import Counters, LayerSpec


def kv(tokens, batch=2, start=0):
    values = torch.arange(start, start + tokens, dtype=torch.float32)[None, None, :, None]
    rows = torch.arange(batch, dtype=torch.float32)[:, None, None, None] * 1000
    return (values + rows).expand(batch, 3, tokens, 4).clone(), (-values - rows).expand(batch, 3, tokens, 4).clone()


def filled(tokens=10, batch=2):
    layer = SelectorLayer()
    layer.update(*kv(tokens, batch))
    return layer


def test_appending_matches_concatenation_and_rarely_moves():
    layer, expected = SelectorLayer(), kv(0)
    places = set()
    position = 0
    for tokens in (5, 1, 1, 60, *([1] * 300)):
        new = kv(tokens, start=position)
        position += tokens
        expected = tuple(torch.cat(pair, dim=2) for pair in zip(expected, new, strict=True))
        keys, values = layer.update(*new)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        places.add(keys.data_ptr())
    assert layer.get_seq_length() == position
    assert layer.get_mask_sizes(1) == (position + 1, 0)
    assert len(places) <= 6  # grows geometrically


def test_a_step_within_capacity_allocates_nothing_and_writes_one_token():
    layer = filled(3)
    before = layer.keys
    keys, _ = layer.update(*kv(1, start=3))
    assert keys.data_ptr() == before.data_ptr()
    assert torch.equal(keys[:, :, :3], kv(3)[0])


def test_row_operations_and_crop():
    layer = filled(10, batch=3)
    layer.starts = torch.tensor([0, 2, 4])
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert layer.keys[:, 0, 0, 0].tolist() == [2000, 0, 0]
    assert layer.starts.tolist() == [4, 0, 0]
    layer.batch_repeat_interleave(2)
    assert layer.keys[:, 0, 0, 0].tolist() == [2000, 2000, 0, 0, 0, 0]
    layer.batch_select_indices(torch.tensor([1, 4]))
    assert layer.keys[:, 0, 0, 0].tolist() == [2000, 0]
    layer.crop(-4)
    assert layer.get_seq_length() == 6
    keys, _ = layer.update(*kv(1, start=77))
    assert keys[0, 0].T[0].tolist() == [2000, 2001, 2002, 2003, 2004, 2005, 77]
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.state is None
    layer.update(*kv(2))
    assert layer.get_seq_length() == 2


def test_a_positive_crop_means_what_it_means_in_transformers():
    layer = filled(10)
    if compat.POSITIVE_CROP_KEEPS:
        layer.crop(4)
        assert layer.get_seq_length() == 4
    else:
        with pytest.raises(InputError, match="negative"):
            layer.crop(4)
    layer.crop(0)
    layer.crop(-100)
    assert layer.get_seq_length() == 0


def test_keys_set_from_outside_are_taken_over():
    layer = filled(10)
    layer.keys, layer.values = layer.keys[..., -4:, :].clone(), layer.values[..., -4:, :].clone()
    keys, values = layer.update(*kv(1, start=50))
    assert keys[0, 0, :, 0].tolist() == [6, 7, 8, 9, 50]
    assert values[0, 0, :, 0].tolist() == [-6, -7, -8, -9, -50]


def test_steps_may_leave_inference_mode():
    layer = SelectorLayer()
    with torch.inference_mode():
        layer.update(*kv(5))
    layer.update(*kv(1, start=5))
    with torch.inference_mode():
        keys, _ = layer.update(*kv(1, start=6))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_offloading_moves_there_and_back():
    layer = filled(5)
    layer.offload()
    assert layer.is_offloaded
    layer.prefetch()
    assert not layer.is_offloaded
    assert torch.equal(layer.update(*kv(1, start=5))[0], kv(6)[0])


def test_a_layer_keeps_the_state_of_an_equal_selector_only():
    layer = filled(5)
    spec = LayerSpec(0, 6, 3, 4, torch.float32, torch.device("cpu"), batch_size=2)
    first = layer.bind(make_selector("retopk,topk=4"), spec, Counters())
    assert layer.bind(make_selector("retopk", topk=4), spec, Counters()) is first
    assert layer.bind(make_selector("retopk,topk=3"), spec, Counters()) is not first


def test_a_plain_dynamic_cache_is_taken_over_in_place():
    cache = DynamicCache()
    layer = selector_layer(cache, 2)
    assert [type(one).__name__ for one in cache.layers] == ["DynamicLayer", "DynamicLayer", "SelectorLayer"]
    assert selector_layer(cache, 2) is layer
    filled_cache = DynamicCache()
    filled_cache.update(*kv(7), 0)
    adopted = selector_layer(filled_cache, 0)
    assert torch.equal(adopted.keys, kv(7)[0])
    assert filled_cache.get_seq_length() == 7


@pytest.mark.parametrize(
    "spec", ["full", "exact_topk,topk=6", "retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5"]
)
def test_a_fork_continues_independently(tiny, prompt, spec):
    model = tiny()

    def steps(cache, tokens):
        logits = []
        for token in tokens:
            output = model(torch.tensor([[token]]), **{compat.CACHE_ARGUMENT: cache})
            logits.append(output.logits)
        return torch.cat(logits)

    with sparsify(model, spec), torch.no_grad():
        original = compat.cache_of(model(prompt, use_cache=True))
        steps(original, range(1, 6))
        twin = fork(original)
        steps(twin, range(90, 110))  # must not show in the original
        again = fork(original)
        assert torch.equal(steps(original, range(20, 40)), steps(again, range(20, 40)))


def test_crop_then_replay_is_as_if_never_generated(tiny, prompt):
    model = tiny()
    with sparsify(model, "retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5"), torch.no_grad():

        def step(cache, token):
            return model(torch.tensor([[token]]), **{compat.CACHE_ARGUMENT: cache}).logits

        straight = compat.cache_of(model(prompt, use_cache=True))
        detour = compat.cache_of(model(prompt, use_cache=True))
        for token in range(1, 10):
            step(straight, token)
            step(detour, token)
        for token in (50, 51, 52, 53):
            step(detour, token)
        detour.crop(-4)
        for token in range(10, 30):
            assert torch.equal(step(straight, token), step(detour, token))


def test_a_cache_that_moved_its_rows_may_leave_inference_mode(tiny, prompt):
    model = tiny()
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 5}
    with sparsify(model, "retopk,topk=6,window_size=3,cache_size=8"):
        cache = DynamicCache()
        with torch.inference_mode():
            model.generate(prompt, **beams, **{compat.CACHE_ARGUMENT: cache})
            caches = [cache, fork(cache)]
        with torch.no_grad():
            one, two = (model(torch.ones(3, 1, dtype=torch.long), **{compat.CACHE_ARGUMENT: c}).logits for c in caches)
    assert torch.equal(one, two)


def test_a_cache_cropped_to_nothing_is_as_new(tiny, prompt, padded):
    model = tiny()
    with sparsify(model, "retopk,topk=6,window_size=3,cache_size=8,refresh_interval=5"), torch.no_grad():
        used = compat.cache_of(model(**padded, use_cache=True))
        used.crop(-30)
        fresh = DynamicCache()
        for ids in (prompt.repeat(2, 1), torch.tensor([[1], [2]]), torch.tensor([[3], [4]])):  # another batch, unpadded
            one, two = (model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: c}).logits for c in (used, fresh))
            assert torch.equal(one, two)
