"""Selectors named on the command line, and the `--set` beside them."""

import pytest

from sparsesel.cli.selectors import resolve_selectors
from sparsesel.errors import InputError, UnknownNameError


def test_specs_keep_their_order_and_their_own_fields():
    resolved = resolve_selectors(["retopk:quality,topk=64", "full", "exact_topk"])
    assert list(resolved) == ["retopk:quality,topk=64", "full", "exact_topk"]
    assert resolved["retopk:quality,topk=64"].model_dump()["topk"] == 64
    assert resolved["exact_topk"].model_dump()["topk"] == 512


def test_set_reaches_every_selector_that_has_the_field_and_wins_over_its_spec():
    resolved = resolve_selectors(["full", "exact_topk", "retopk,topk=64"], ["topk=128", "similarity_threshold=0.9"])
    assert resolved["full"].model_dump() == {"name": "full"}
    assert resolved["exact_topk"].model_dump() == {"name": "exact_topk", "topk": 128}
    retopk = resolved["retopk,topk=64"].model_dump()
    assert (retopk["topk"], retopk["similarity_threshold"]) == (128, 0.9)


def test_set_is_refused_if_no_selector_has_the_field():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'window_size'\?"):
        resolve_selectors(["full", "retopk"], ["windowsize=3"])
    with pytest.raises(UnknownNameError, match="cache_size"):
        resolve_selectors(["full", "retopk"], ["sink_size=3"])
    with pytest.raises(UnknownNameError):
        resolve_selectors(["full"], ["topk=3"])


@pytest.mark.parametrize("specs", [["full", "full"], ["retopk,topk=1", "full", " retopk,topk=1 "]])
def test_a_selector_named_twice_is_refused(specs):
    with pytest.raises(InputError, match="twice"):
        resolve_selectors(specs)


def test_no_selector_is_refused():
    with pytest.raises(InputError, match="at least one selector"):
        resolve_selectors([])


def test_the_same_selector_with_different_fields_is_two_selectors():
    assert len(resolve_selectors(["retopk,topk=64", "retopk,topk=128", "retopk:paper", "retopk"])) == 4
