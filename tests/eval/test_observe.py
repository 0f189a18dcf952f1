"""Several selectors see one prefill, each in a state of its own."""

import pytest
import torch

from sparsesel import KVView, LayerSpec, make_selector
from sparsesel.eval.observe import ObserveAll

LAYER = LayerSpec(0, 4, 2, 8, torch.float32, torch.device("cpu"), batch_size=2)


@pytest.fixture
def watched():
    """Watchers of two selectors, their state after a prefill, and states that each filled alone."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 20, 8, generator=generator)
    keys, values = torch.randn(2, 2, 2, 20, 8, generator=generator)
    kv = KVView.dense(keys, values)
    selectors = [make_selector("retopk,topk=4,cache_size=6"), make_selector("exact_topk,topk=4")]
    watchers = ObserveAll(selectors)
    state = watchers.init_state(LAYER)
    watchers.observe_prefill(query, kv, state, scale=0.3)
    alone = []
    for selector in selectors:
        alone.append(selector.init_state(LAYER))
        selector.observe_prefill(query, kv, alone[-1], scale=0.3)
    return watchers, state, alone


def assert_equal(states, expected):
    for state, other in zip(states, expected, strict=True):
        mine, theirs = state.tensors(), other.tensors()
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], equal_nan=True)


CHANGES = {
    "nothing": lambda state: None,
    "reset": lambda state: state.reset(),
    "crop": lambda state: state.crop(torch.tensor([10, 15])),
    "reorder": lambda state: state.reorder(torch.tensor([1, 1])),
    "repeat": lambda state: state.repeat(2),
    "select": lambda state: state.select(torch.tensor([1])),
    "to": lambda state: state.to("cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_the_composite_happens_to_each(watched, change):
    _, state, alone = watched
    untouched = state.clone()
    CHANGES[change](state)
    for each in alone:
        CHANGES[change](each)
    assert_equal(state.states, alone)
    assert state.nbytes() == sum(each.nbytes() for each in alone)
    if change == "reset":
        assert any(
            not torch.equal(a, b)
            for a, b in zip(untouched.states[0].tensors().values(), state.states[0].tensors().values(), strict=True)
        )


def test_it_decodes_nothing_itself(watched):
    watchers, state, _ = watched
    kv = KVView.dense(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8))
    with pytest.raises(RuntimeError, match="without choosing"):
        watchers.attend(torch.zeros(2, 4, 1, 8), kv, state, scale=1.0)
