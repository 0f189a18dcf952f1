"""Selectors by range of layers: the ranges, the files that name them, what they resolve to."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsesel.config import LayeredConfig, LayeredSpec, parse_spec, spread_layers
from sparsesel.errors import InputError, UnknownNameError
from sparsesel.eval.selectors import resolve_selectors
from sparsesel.registry import make_config, make_selector, registry

CONTENT = {"layers": {"0-1": "full", "2-": "retopk:quality,topk=64"}}
TOML = 'layers = {"0-1" = "full", "2-" = "retopk:quality,topk=64"}\n'
WRITTEN = {".toml": TOML, ".yaml": yaml.safe_dump(CONTENT), ".json": json.dumps(CONTENT)}
RESOLVED = {"0-1": make_config("full"), "2-": make_config("retopk:quality,topk=64")}


@pytest.fixture
def file(tmp_path):
    def write(content, name="layered.toml"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


# Ranges


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["0-"], {0: "0-", 1: "0-", 2: "0-", 3: "0-"}),
        (["2-", "0-1"], {0: "0-1", 1: "0-1", 2: "2-", 3: "2-"}),
        ([3, "1"], {1: "1", 3: 3}),
        ([" 1 - 2 "], {1: " 1 - 2 ", 2: " 1 - 2 "}),
        (["3-"], {3: "3-"}),
    ],
)
def test_ranges_are_spread_over_the_layers(keys, expected):
    spread = spread_layers({key: key for key in keys}, range(4))
    assert spread == expected
    assert list(spread) == sorted(spread)


def test_only_layers_that_are_there_count():
    assert spread_layers({"0-2": "a", "3-": "b"}, [1, 4, 7]) == {1: "a", 4: "b", 7: "b"}


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ([], "some layer"),
        (["a"], "first-last"),
        (["-1"], "first-last"),
        ([True], "first-last"),
        (["1-2-3"], "first-last"),
        (["9" * 30], "first-last"),
        (["3-1"], "Correct the range"),
        (["0-4"], "among 0-3"),
        (["4-"], "among 0-3"),
        (["0-1", 1], "each layer once"),
        (["2-", "0-2"], "each layer once"),
        (["0-", "3"], "each layer once"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(keys, match):
    with pytest.raises(InputError, match=match):
        spread_layers(dict.fromkeys(keys, "x"), range(4))


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_any_cut_into_runs_is_spread_back(cuts):
    """Runs of layers written as ranges give every layer its own run again."""
    run_of = [0]
    for cut in cuts:
        run_of.append(run_of[-1] + cut)
    runs = {run: [layer for layer, other in enumerate(run_of) if other == run] for run in set(run_of)}
    keys = {f"{layers[0]}-{layers[-1]}": run for run, layers in runs.items()}
    assert spread_layers(keys, range(len(run_of))) == dict(enumerate(run_of))


# Files


@pytest.mark.parametrize("suffix", WRITTEN)
def test_every_format_resolves_to_a_configuration_for_each_range(file, suffix):
    path = file(WRITTEN[suffix], f"layered{suffix}")
    assert isinstance(parse_spec(path), LayeredSpec)
    resolved = registry().resolve(path)
    assert resolved.layers == RESOLVED
    assert str(resolved) == "0-1: full; 2-: retopk,topk=64,similarity_threshold=0.9"


def test_a_range_may_hold_a_table_or_a_file(file):
    own = file('name = "retopk"\npreset = "quality"\ntopk = 64\n', "own.toml")
    table = {"name": "retopk", "preset": "quality", "topk": 64}
    for value in (own, table):
        path = file({"layers": {"0-1": {"name": "full"}, "2-": value}}, "layered.json")
        assert registry().resolve(path).layers == RESOLVED


def test_the_resolved_configuration_can_be_given_back(file):
    resolved = registry().resolve(file(TOML))
    dumped = resolved.model_dump(mode="json")
    assert dumped["layers"]["2-"]["similarity_threshold"] == 0.9
    assert registry().resolve(file(resolved.model_dump_json(), "again.json")) == resolved


def test_an_integer_key_names_a_layer(file):
    assert list(registry().resolve(file("layers: {0: full, 3: exact_topk}", "layered.yaml")).layers) == ["0", "3"]


def test_fields_go_to_every_selector_that_has_them(file):
    path = file({"layers": {0: "full", 1: "exact_topk,topk=9", "2-": "retopk"}, "topk": 32}, "layered.json")
    assert [config.model_dump().get("topk") for config in registry().resolve(path).layers.values()] == [None, 32, 32]
    later = registry().resolve(f"{path},topk=16,window_size=0").layers
    assert (later["1"].topk, later["2-"].topk, later["2-"].window_size) == (16, 16, 0)
    assert registry().resolve(path, {"topk": 8}).layers["1"].topk == 8


def test_set_reaches_through(file):
    path = file(TOML)
    resolved = resolve_selectors([path, "full"], ["topk=128"])
    assert resolved[path].layers["2-"].topk == 128
    with pytest.raises(UnknownNameError, match="Did you mean 'topk'"):
        resolve_selectors([path], ["topkk=3"])


REFUSED = {
    "no table": ({"layers": "full"}, "a table from ranges"),
    "empty": ({"layers": {}}, "some layer"),
    "bad range": ({"layers": {"x": "full"}}, "first-last"),
    "overlap": ({"layers": {"0-1": "full", "1-": "retopk"}}, "each layer once"),
    "number": ({"layers": {"0-": 3}}, "one selector"),
    "list": ({"layers": {"0-": ["full"]}}, "one selector"),
    "nameless table": ({"layers": {"0-": {"topk": 3}}}, "`name` in the file"),
    "unknown selector": ({"layers": {"0-": "retok"}}, "Did you mean 'retopk'"),
    "unknown preset": ({"layers": {"0-": "retopk:papr"}}, "Did you mean 'paper'"),
    "bad value": ({"layers": {"0-": "retopk,topk=0"}}, "at least 1"),
    "field that none has": ({"layers": {"0-": "full"}, "topk": 3}, "a field among"),
    "bad common value": ({"layers": {"0-": "retopk"}, "topk": "x"}, "percentage"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_files_are_refused(file, what):
    content, match = REFUSED[what]
    with pytest.raises(InputError, match=match):
        registry().resolve(file(content, "layered.json"))


def test_layers_within_layers_are_refused_and_do_not_recurse(file):
    path = file({"layers": {"0-": "full"}}, "layered.json")
    file({"layers": {"0-": path}}, "layered.json")
    with pytest.raises(InputError, match="one selector"):
        parse_spec(path)


def test_where_one_selector_is_wanted_it_is_refused(file):
    path = file(TOML)
    for make in (make_config, make_selector):
        with pytest.raises(InputError, match="selectors by layers"):
            make(path)


def test_the_configuration_holds_resolved_selectors_alone():
    with pytest.raises(ValidationError, match="instance of SelectorConfig"):
        LayeredConfig(layers={"0-": {"name": "retopk"}})
    with pytest.raises(ValidationError, match="each layer once"):
        LayeredConfig(layers={"0-": make_config("full"), "1": make_config("full")})
