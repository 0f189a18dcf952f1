"""Selectors named on the command line, and the `--set` beside them."""

import pytest

from sparsesel.errors import InputError, UnknownNameError
from sparsesel.eval.selectors import resolve_selectors


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
    assert len(resolve_selectors(["retopk,topk=64", "retopk,topk=128", "retopk:quality", "retopk"])) == 4


@pytest.mark.parametrize(
    ("specs", "sets"),
    [
        (["retopk", "full", "retopk:paper"], []),
        (["retopk,topk=512", "retopk"], []),
        (["exact_topk", "exact_topk,topk=64"], ["topk=32"]),
    ],
)
def test_one_configuration_named_in_two_ways_is_refused_with_both(specs, sets):
    with pytest.raises(InputError, match="which are the same") as error:
        resolve_selectors(specs, sets)
    assert error.value.field == "--selector"
    assert repr(specs[0]) in error.value.got
    assert repr(specs[-1]) in error.value.got


def test_one_file_by_layers_under_two_names_is_refused(tmp_path):
    for name in ("one.toml", "two.toml"):
        (tmp_path / name).write_text('layers = {"0-" = "retopk"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"one\.toml.*two\.toml"):
        resolve_selectors([str(tmp_path / "one.toml"), str(tmp_path / "two.toml")])
