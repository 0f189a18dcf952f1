"""Configuration: values, files, specs, and what is said when they do not fit."""

import contextlib
import json
import math
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from sparsesel.config import (
    SelectorConfig,
    Topk,
    build,
    load_file,
    parse_assignments,
    parse_spec,
    parse_value,
    read_text,
    resolve_topk,
)
from sparsesel.errors import InputError, UnknownNameError


class ToyConfig(SelectorConfig):
    name: Literal["toy"] = "toy"
    topk: Topk = 512
    similarity_threshold: float = Field(0.85, ge=-1, le=2, description="tau, a cosine.")
    cache_size: int = Field(32, ge=1)
    recall_size: int = Field(4, ge=1)
    retrieval: Literal["similarity", "recent"] = "similarity"
    fallback: bool = True

    @model_validator(mode="after")
    def _recall_fits(self) -> "ToyConfig":
        if self.recall_size > self.cache_size:
            raise ValueError("recall_size at most cache_size")
        return self


def refused(**values: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        build(ToyConfig, values, where="toy")
    return caught.value


def test_config_is_frozen_hashable_and_equal_by_value():
    config = ToyConfig(topk=64)
    with pytest.raises(ValidationError):
        config.topk = 128
    assert hash(config) == hash(ToyConfig(topk=64))
    assert config == ToyConfig(topk=64) != ToyConfig()


def test_text_of_a_config_names_what_was_changed_and_reads_back():
    config = ToyConfig(topk="6.25%", fallback=False)
    assert str(config) == "toy,topk=6.25%,fallback=False"
    assert str(ToyConfig()) == "toy"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("topk", 0, "at least 1"),
        ("topk", -3, "at least 1"),
        ("topk", True, "integer"),
        ("topk", 1.5, "integer"),
        ("topk", [], "integer"),
        ("topk", "0%", "percentage"),
        ("topk", "100.1%", "at most 100%"),
        ("topk", "-5%", "percentage"),
        ("topk", "many", "percentage"),
        ("similarity_threshold", math.nan, "finite"),
        ("similarity_threshold", math.inf, "finite"),
        ("similarity_threshold", "high", "number"),
        ("similarity_threshold", True, "number"),
        ("cache_size", 0, "greater than or equal to 1"),
        ("cache_size", 2.0, "integer"),
        ("cache_size", True, "integer"),
        ("cache_size", "32", "integer"),
        ("retrieval", "oldest", "'similarity' or 'recent'"),
        ("fallback", "yes", "boolean"),
        ("fallback", 1, "boolean"),
        ("name", "other", "'toy'"),
    ],
)
def test_bad_value_is_refused_with_field_expectation_and_value(field, value, expected):
    error = refused(**{field: value})
    assert error.field == f"toy.{field}"
    assert expected in error.expected
    assert error.got == repr(value)
    assert "sparsesel show toy" in error.remedy


def test_field_description_is_part_of_the_error():
    assert "tau, a cosine" in refused(similarity_threshold=3.0).expected


def test_fields_that_contradict_each_other_are_refused():
    error = refused(recall_size=33)
    assert error.field == "toy"
    assert "recall_size at most cache_size" in error.expected


def test_unknown_field_is_refused_with_the_nearest_one():
    error = refused(topkk=4)
    assert isinstance(error, UnknownNameError)
    assert error.field == "toy.topkk"
    known = "cache_size, fallback, recall_size, retrieval, similarity_threshold, topk"
    assert error.expected == f"a field among {known}"
    assert "'topk'" in error.remedy


def test_an_integer_serves_as_a_float():
    assert build(ToyConfig, {"similarity_threshold": 1}, where="toy").similarity_threshold == 1.0


# Budgets


@pytest.mark.parametrize("text", ["6.25%", " 6.25 % ", "100%", ".5%", "5.%"])
def test_relative_budget_is_accepted(text):
    assert build(ToyConfig, {"topk": text}, where="toy").topk == f"{text.strip().rstrip('%').strip()}%"


def test_absolute_budget_does_not_depend_on_the_length():
    assert resolve_topk(512, 3) == resolve_topk(512, 10**6) == 512


@pytest.mark.parametrize(
    ("topk", "length", "keys"),
    [("6.25%", 8192, 512), ("6.25%", 8193, 513), ("50%", 3, 2), ("1%", 1, 1), ("100%", 7, 7), ("10%", 70, 7)],
)
def test_relative_budget_rounds_up(topk, length, keys):
    assert resolve_topk(topk, length) == keys


@given(st.integers(1, 10_000), st.integers(1, 10**6))
def test_relative_budget_is_the_exact_ceiling_and_within_the_length(hundredths, length):
    keys = resolve_topk(f"{hundredths / 100}%", length)
    assert keys == max(1, -(-hundredths * length // 10_000))
    assert 1 <= keys <= length


# Values and assignments

# What `str` of a TOML scalar gives back unchanged.
scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.from_regex(r"[A-Za-z][A-Za-z_]{0,8}%?", fullmatch=True).filter(
        lambda text: text not in ("true", "false", "inf", "nan")
    ),
)


@given(scalars)
def test_a_value_reads_back_as_it_was_written(value):
    read = parse_value(str(value))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("'a b'", "a b"), ("6.25%", "6.25%")])
def test_value_forms(text, value):
    assert parse_value(text) == value


@given(st.text())
def test_any_text_is_some_value(text):
    parse_value(text)


@pytest.mark.parametrize("text", ["128#x", "128\nother = 1", "[" * 20_000, "9" * 5_000])
def test_what_is_no_single_value_stays_text(text):
    assert parse_value(text) == text


@pytest.mark.parametrize("pair", ["topk", "topk=", "=5", "", "  = "])
def test_half_an_assignment_is_refused(pair):
    with pytest.raises(InputError, match="field=value"):
        parse_assignments([pair], where="--set")


def test_a_field_assigned_twice_is_refused():
    with pytest.raises(InputError, match="'topk' twice"):
        parse_assignments(["topk=1", "topk=2"], where="--set")


# Specs


@pytest.mark.parametrize(
    ("text", "name", "preset", "values"),
    [
        ("retopk", "retopk", "", {}),
        ("retopk:quality", "retopk", "quality", {}),
        ("retopk,topk=128", "retopk", "", {"topk": 128}),
        (" retopk:quality , topk = 128, fallback=false", "retopk", "quality", {"topk": 128, "fallback": False}),
        ("full,topk=6.25%", "full", "", {"topk": "6.25%"}),
    ],
)
def test_spec_grammar(text, name, preset, values):
    spec = parse_spec(text)
    assert (spec.name, spec.preset, spec.values) == (name, preset, values)


MALFORMED = """
:|retopk:|:quality|Retopk|1topk|re-topk|retopk:qu/ality|retopk:../x|retopk,|retopk,topk|retopk,topk=1,topk=2|
retopk,name=full|[red]|\x1b[31m|retopk:a:b|retopk topk=1|a:b=c
"""


@pytest.mark.parametrize("text", ["", " ", *MALFORMED.replace("\n", "").split("|")])
def test_malformed_spec_is_refused(text):
    with pytest.raises(InputError):
        parse_spec(text)


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@given(names, st.one_of(st.just(""), names), st.dictionaries(names.filter(lambda n: n != "name"), scalars, max_size=4))
def test_a_spec_reads_back_as_it_was_written(name, preset, values):
    text = ",".join([name + (f":{preset}" if preset else ""), *(f"{key}={value}" for key, value in values.items())])
    spec = parse_spec(text)
    assert (spec.name, spec.preset, spec.values) == (name, preset, values)


@given(st.text(max_size=30))
def test_any_text_is_a_spec_or_bad_input(text):
    with contextlib.suppress(InputError):
        parse_spec(text)


# Files

CONTENT = {"name": "toy", "preset": "tight", "topk": 64, "fallback": False}
WRITTEN = {
    ".toml": 'name = "toy"\npreset = "tight"\ntopk = 64\nfallback = false\n',
    ".yaml": yaml.safe_dump(CONTENT),
    ".yml": yaml.safe_dump(CONTENT),
    ".json": json.dumps(CONTENT),
}


@pytest.mark.parametrize("suffix", WRITTEN)
def test_all_file_formats_say_the_same(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    path.write_text(WRITTEN[suffix])
    assert load_file(path) == CONTENT
    spec = parse_spec(f"{path},topk=128")
    assert (spec.name, spec.preset, spec.values) == ("toy", "tight", {"topk": 128, "fallback": False})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "topk": st.one_of(st.integers(1, 10**6), st.sampled_from(["6.25%", "100%", "0.5%"])),
            "similarity_threshold": st.floats(-1, 2),
            "cache_size": st.integers(4, 100),
            "retrieval": st.sampled_from(["similarity", "recent"]),
            "fallback": st.booleans(),
        },
    )
)
def test_a_resolved_config_can_be_given_back_as_a_file(tmp_path_factory, values):
    config = build(ToyConfig, values, where="toy")
    path = tmp_path_factory.mktemp("config") / "resolved.json"
    path.write_text(config.model_dump_json())
    spec = parse_spec(str(path))
    assert build(ToyConfig, {"name": spec.name, **spec.values}, where="toy") == config


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.ini", b"topk = 1", "ending in"),
        ("a.toml", b"topk = ", "well-formed"),
        ("a.json", b"{", "well-formed"),
        ("a.json", b"[" * 100_000, "well-formed"),
        ("a.json", b'{"topk": ' + b"9" * 5_000 + b"}", "well-formed"),
        ("a.yaml", b"a: [", "well-formed"),
        ("a.yaml", b"a: 2020-13-45", "well-formed"),
        ("a.yaml", b"a: !!python/object:os.system {}", "well-formed"),
        ("a.yaml", b"- 1\n- 2", "table"),
        ("a.yaml", b"1: 2", "table"),
        ("a.json", b"3", "table"),
        ("a.toml", b"topk = 1\ntopk = 2", "well-formed"),
        ("a.json", b'{"topk": 1, "topk": 2}', "'topk' twice"),
        ("a.json", b'{"x": [{"topk": 1, "topk": 2}]}', "'topk' twice"),
        ("a.yaml", b"topk: 1\ntopk: 2", "'topk' twice"),
        ("a.yaml", b"x:\n- {topk: 1, topk: 2}", "'topk' twice"),
        ("a.toml", b"", "empty"),
        ("a.toml", b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_file_is_refused(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem) as caught:
        load_file(path)
    assert name in caught.value.got


def test_what_yaml_merges_in_may_be_overridden(tmp_path):
    (tmp_path / "a.yaml").write_text("<<: {topk: 3, window_size: 4}\ntopk: 5\n")
    assert load_file(tmp_path / "a.yaml") == {"topk": 5, "window_size": 4}


def test_a_value_without_end_is_shown_cut_short(tmp_path):
    levels = [f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else 'x' * 9)}]" for i in range(9)]
    (tmp_path / "bomb.yaml").write_text("name: toy\ntopk:\n" + "\n".join(levels) + "\n")
    values = load_file(tmp_path / "bomb.yaml")
    for value in (values["topk"], "9" * 10_000, {"a": values["topk"]}, parse_value("0x" + "f" * 5_000)):
        assert len(refused(topk=value).got) < 300


def test_counts_beyond_any_position_are_refused():
    assert build(ToyConfig, {"topk": 2**31 - 1}, where="toy").topk == 2**31 - 1
    for field in ("topk", "cache_size"):
        assert "at most 2147483647" in refused(**{field: 2**31}).expected


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path / "gone.txt", where="--text")
    with pytest.raises(InputError, match="a folder"):
        read_text(tmp_path, where="--text")
    with pytest.raises(InputError):
        parse_spec(str(tmp_path / "gone.toml"))


@pytest.mark.parametrize("content", ["topk = 1\n", "name = 3\n", 'name = "toy"\npreset = 4\n'])
def test_a_file_that_names_no_selector_is_refused(tmp_path, content):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(InputError, match="`name` in the file"):
        parse_spec(str(path))
