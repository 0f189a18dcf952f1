"""Configuration: frozen pydantic models, their sources, and how a selector is named on a command line.

Later sources win: defaults < preset (`retopk:paper`) < file < `--set`.
"""

import contextlib
import itertools
import json
import math
import os
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    SerializeAsAny,
    ValidationError,
    field_validator,
)

from sparsesel.errors import InputError, UnknownNameError

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PRESET = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_LAYERS = re.compile(r"\s*(\d{1,9})\s*(?:(-)\s*(\d{1,9})?\s*)?", re.ASCII)
# What pydantic and validators write before the part that follows "expected".
_DECORATION = re.compile(r"^(Value error, )?((Input should|must) be )?")
_KINDS = {
    "dict_type": "a table",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
}
FILE_SUFFIXES = (".toml", ".yaml", ".yml", ".json")
MAX_COUNT = 2**31 - 1
"""Largest position or count there is: positions are int32."""
_EXAMPLES = 4  # of values that a remedy repeats
_SHOWN = 200  # characters of a refused value that an error shows

BackendName = Literal["auto", "triton", "eager"]
"""What runs the operations: `auto` is triton on CUDA and ROCm devices that have it, eager elsewhere."""


def _valid_topk(value: int | str) -> int | str:
    if isinstance(value, int):
        if value < 1:
            raise ValueError("must be at least 1")
        return value
    match = _PERCENT.fullmatch(value)
    if match is not None and float(match[1]) > 100:
        raise ValueError("must be at most 100%, as a percentage of the context")
    if match is None or float(match[1]) == 0:
        raise ValueError('must be a positive integer or a percentage of the context such as "6.25%"')
    return f"{match[1]}%"


Topk = Annotated[
    int | str,
    Field(
        description="K: keys attended per query head and step, the current token included. An integer, or a "
        'percentage of the visible keys such as "6.25%".'
    ),
    AfterValidator(_valid_topk),
]


def resolve_topk(topk: int | str, length: int) -> int:
    """Number of keys that a budget means at `length` visible keys (a percentage rounds up; at least 1)."""
    if isinstance(topk, int):
        return topk
    return max(1, math.ceil(float(topk.rstrip("%")) * length / 100 - 1e-9))


class SelectorConfig(BaseModel):
    """Base of every selector's configuration: immutable, hashable, without unknown fields.

    A subclass declares `name: Literal["its_name"] = "its_name"` and its own fields, each with a description
    that gives the unit, the bounds and the paper's symbol.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    name: str

    @field_validator("*")
    @classmethod
    def _counts_fit_their_type(cls, value: Any) -> Any:
        if isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"at most {MAX_COUNT}")
        return value

    def __str__(self) -> str:
        changed = {k: v for k, v in self.model_dump(exclude_defaults=True).items() if k != "name"}
        return ",".join([self.name, *(f"{k}={v}" for k, v in changed.items())])


class TaskConfig(BaseModel):
    """Base of every evaluation task's configuration: immutable, without unknown fields.

    A subclass declares its fields, each with a description that gives the unit and the bounds. They become keys of
    `[tasks.its_name]` in a run's file and options of `sparsesel eval its_name`. Where a default of None means
    something, `json_schema_extra={"default": "one of each text"}` says what.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def absolute_path(path: str) -> str:
    """A path that means the same from everywhere, `~` and what leads through `..` resolved.

    Raises:
        ValueError: It is none.
    """
    if not path.strip() or "\0" in path:
        raise ValueError("must be a path")
    return os.path.abspath(os.path.expanduser(path))


PathText = Annotated[str, AfterValidator(absolute_path)]
"""A path in a configuration: absolute once it is read, so that what is written beside results holds anywhere."""

LayerKey = int | str
"""Names layers: an index, "first-last" (both included) or "first-" (to the last)."""

ValueT = TypeVar("ValueT")


def check_layers(keys: Iterable[LayerKey]) -> None:
    """Refuse keys that name no layers, or one layer twice, in a model of any depth.

    Raises:
        InputError: The first key that does not fit.
    """
    ranges = sorted(((*_layer_range(key), key) for key in keys), key=lambda named: named[0])
    if not ranges:
        raise InputError("layers", expected="a selector for some layer", got="none", remedy="Name at least one layer.")
    for (_, last, _), (first, _, key) in itertools.pairwise(ranges):
        if first <= last:
            raise InputError(
                f"layers {str(key)!r}",
                expected="each layer once",
                got=f"layer {first} a second time",
                remedy="Make the ranges disjoint.",
            )


def spread_layers(values: Mapping[Any, ValueT], layers: Sequence[int]) -> dict[int, ValueT]:
    """What each of a model's `layers` (ascending) is given by a mapping of ranges; layers that no key names are absent.

    Raises:
        InputError: A key that names no layers, layers beyond the last, or a layer twice.
    """
    check_layers(values)
    spread: dict[int, ValueT] = {}
    for key, value in values.items():
        first, last = _layer_range(key)
        named = [layer for layer in layers if first <= layer <= last]
        if not named or layers[-1] < last < math.inf:
            known = f"{layers[0]}-{layers[-1]}" if layers else "(none)"
            raise InputError(
                f"layers {str(key)!r}",
                expected=f"layers among {known} that attend to the whole context",
                got=str(key),
                remedy="Correct the range.",
            )
        spread.update(dict.fromkeys(named, value))
    return dict(sorted(spread.items()))


def _layer_range(key: LayerKey) -> tuple[int, float]:
    """First and last layer that a key names, the last infinite where it is open."""
    match = None if isinstance(key, bool) else _LAYERS.fullmatch(str(key))
    if match is None:
        raise InputError(
            "layers",
            expected='an index, "first-last" or "first-"',
            got=repr(key),
            remedy='Write for example "2-".',
        )
    first = int(match[1])
    last = first if match[2] is None else math.inf if match[3] is None else int(match[3])
    if last < first:
        raise InputError(f"layers {str(key)!r}", expected="first-last", got=str(key), remedy="Correct the range.")
    return first, last


class LayeredConfig(BaseModel):
    """Selectors by range of layers, as a config file gives them in its table `layers`.

    Layers that no range names stay dense.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    layers: dict[str, SerializeAsAny[InstanceOf[SelectorConfig]]] = Field(
        description='Configuration of each range: an index, "first-last" or "first-".'
    )

    @field_validator("layers")
    @classmethod
    def _ranges_are_disjoint(cls, layers: dict[str, SelectorConfig]) -> dict[str, SelectorConfig]:
        check_layers(layers)
        return layers

    def __str__(self) -> str:
        return "; ".join(f"{key}: {config}" for key, config in self.layers.items())


AnyConfig = SelectorConfig | LayeredConfig
"""What a selector's name on a command line or in a run's configuration resolves to."""

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def build(model: type[ConfigT], values: Mapping[str, Any], *, where: str) -> ConfigT:
    """Validate `values` into `model`; `where` says in errors what was being configured.

    Raises:
        InputError: The first field that does not fit, with the names that would.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        name = str(first["loc"][0]) if first["loc"] else ""
        path = ".".join([name, *_written(first["loc"][1:], values.get(name))])
        # The branches of a union each have an error of their own about the same value.
        branches = [one for one in others if one["loc"][:-1] == first["loc"][:-1] and one["input"] is first["input"]]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InputError):  # a validator that knows the remedy
            raise InputError(f"{where}.{path}", expected=cause.expected, got=cause.got, remedy=cause.remedy) from None
        if first["type"] == "extra_forbidden":
            raise unknown_name(f"{where}.{path}", name, set(model.model_fields) - {"name"}, what="field") from None
        known = model.model_fields.get(name)
        description = f" ({known.description})" if known is not None and known.description else ""
        *kinds, last = dict.fromkeys(_expected(one) for one in (first, *branches))
        expected = " or ".join([*([", ".join(kinds)] if kinds else []), last])
        got = "nothing" if first["type"] == "missing" else _shown(first["input"])
        remedy = "Correct it and run the command again."
        if issubclass(model, SelectorConfig | TaskConfig):
            remedy = f"See `sparsesel show {where}` for every field."
        several = _several(first["input"])
        whole = len(first["loc"]) == 1 and not isinstance(first["input"], str)
        if issubclass(model, TaskConfig) and known is not None and _is_list(known.annotation) and several and not whole:
            given = " ".join(f"--{name.replace('_', '-')} {one}" for one in several)
            remedy = f"For several values, repeat the option: {given}. {remedy}"
        raise InputError(
            f"{where}.{path}" if path else where, expected=expected + description, got=got, remedy=remedy
        ) from None


def _is_list(annotation: Any) -> bool:
    """Whether a field's type is one of several values, or that and nothing."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(get_origin(one) in (tuple, list) for one in options)


def _several(value: Any) -> list[str]:
    """Values that stand in the place of one: the first few of a list, or of text with commas."""
    several = value.strip("[] ").split(",") if isinstance(value, str) else value
    if not isinstance(several, list) or (isinstance(value, str) and len(several) < 2):
        return []
    return [(one.strip() if isinstance(one, str) else _shown(one)) for one in several[:_EXAMPLES]]


def _written(loc: Iterable[Any], value: Any) -> Iterator[str]:
    """The parts of a place in `value` that its author wrote: others name branches of a union."""
    for part in loc:
        in_list = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, Mapping) and part in value):
            value = value[part]
            yield str(part)


def _expected(error: Any) -> str:
    """What pydantic expected, as a phrase."""
    text = _KINDS.get(error["type"]) or _DECORATION.sub("", error["msg"])
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    """A refused value, cut short: what YAML's aliases make of a few lines can be gigabytes long."""
    try:
        text = reprlib.repr(value) if isinstance(value, (list, tuple, dict)) else repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def unknown_name(where: str, name: str, known: Iterable[str], *, what: str) -> UnknownNameError:
    """Error for a name that is not among `known`, with the nearest one that is."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return UnknownNameError(
        where,
        expected=f"a {what} among {', '.join(names) if names else '(none)'}",
        got=repr(name),
        remedy=f"Did you mean {near[0]!r}?" if near else f"Choose one of the {what}s listed.",
    )


@contextlib.contextmanager
def reading_text(path: str | Path, *, where: str) -> Iterator[None]:
    """Refuse by name what goes wrong in this block: a text that is missing, unreadable or, as it says, unfit.

    Raises:
        InputError: In place of any OSError or ValueError.
    """
    try:
        yield
    except FileNotFoundError:
        problem = "no such file"
    except IsADirectoryError:
        problem = "a folder"
    except UnicodeDecodeError:
        problem = "bytes that are not UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path, or what the block raises itself
        problem = str(error)
    else:
        return
    raise InputError(
        where,
        expected="a readable UTF-8 text file",
        got=f"{path} ({problem})",
        remedy="Check the path and encoding.",
    )


def read_text(path: Path, *, where: str) -> str:
    """Text of a UTF-8 file, refused by name if it is missing, unreadable, empty or not UTF-8."""
    with reading_text(path, where=where):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"bytes that are not UTF-8, the first at offset {error.start}") from None
        if not text.strip():
            raise ValueError("an empty file")
        return text


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A table of `pairs`; as TOML does by itself, JSON and YAML refuse a name that stands there twice."""
    table: dict[Any, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} twice")
        table[key] = value
    return table


class _YamlLoader(yaml.SafeLoader):
    """YAML's plain values alone, each name once in a table."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before merge keys (`<<`) are resolved: what they bring may be overridden.
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _unique((name, None) for name in names)
        return super().construct_mapping(node, deep=deep)


def load_file(path: str | Path) -> dict[str, Any]:
    """Read one table from a TOML, YAML or JSON file, chosen by its suffix.

    Raises:
        InputError: The file is missing, of another kind, malformed, or not a table.
    """
    path = Path(path)
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise InputError(
            "config",
            expected=f"a file ending in {', '.join(FILE_SUFFIXES)}",
            got=path,
            remedy="Rename or convert it.",
        )
    text = read_text(path, where="config")
    try:
        match path.suffix.lower():
            case ".toml":
                data = tomllib.loads(text)
            case ".json":
                data = json.loads(text, object_pairs_hook=_unique)
            case _:
                data = yaml.load(text, Loader=_YamlLoader)
    # ValueError: also a number or date out of range
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(
            "config", expected="a well-formed file", got=f"{path}: {error}", remedy="Correct it."
        ) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError(
            "config",
            expected="a table of named values",
            got=f"{type(data).__name__} in {path}",
            remedy="Use key = value.",
        )
    return data


def parse_value(text: str) -> Any:
    """Read a value as TOML does (`512`, `0.9`, `true`); anything else is the text itself."""
    if "\n" in text or "#" in text:  # neither a second line nor a comment belongs to a value
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def parse_assignments(pairs: Iterable[str], *, where: str) -> dict[str, Any]:
    """Read `field=value` pairs.

    Raises:
        InputError: A pair without a field or a value, or one field given twice.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not (key and sign and value):
            raise InputError(where, expected="field=value", got=repr(pair), remedy="Write for example topk=128.")
        if key in values:
            raise InputError(where, expected="each field once", got=f"{key!r} twice", remedy="Remove one of them.")
        values[key] = parse_value(value)
    return values


@dataclass(frozen=True)
class SelectorSpec:
    """A selector as a user names it: `name`, `name:preset` or a config file, then any `,field=value`."""

    name: str
    preset: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayeredSpec:
    """Selectors by range of layers as a config file names them.

    Attributes:
        layers: Range to the selector named for it.
        values: Fields for every one of them that has the field; they win over its own.
    """

    layers: Mapping[str, SelectorSpec]
    values: Mapping[str, Any] = field(default_factory=dict)


def parse_spec(text: str) -> SelectorSpec | LayeredSpec:
    """Read `retopk:quality,topk=128` or `my_retopk.toml,topk=128`.

    A file names its selector in `name` and may name a `preset`; its other keys are fields. Or it has a table
    `layers` from ranges of layers to selectors, each named as here or a table of that same kind; its other keys are
    fields of every one that has them.

    Raises:
        InputError: The text is no such thing.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            "selector",
            expected="name, name:preset or a config file, as text, then optional ,field=value",
            got=_shown(text),
            remedy="Write for example retopk:quality,topk=128; `sparsesel list` shows the names.",
        )
    spec = _parse(text)
    if isinstance(spec, SelectorSpec):
        return spec
    layers, values = spec
    return LayeredSpec(_parse_layers(layers, text), values)


def _parse(text: str) -> SelectorSpec | tuple[Any, dict[str, Any]]:
    """A selector, or of a file by layers its table `layers`, unread, and its other fields."""
    head, *pairs = text.split(",")
    head = head.strip()
    values = parse_assignments(pairs, where=f"selector {text!r}")
    if "name" in values:
        raise InputError(
            f"selector {text!r}",
            expected="fields other than `name`",
            got="name",
            remedy="Put the name first.",
        )
    if head.lower().endswith(FILE_SUFFIXES):
        data = load_file(head)
        if "layers" in data and "name" not in data:
            layers = data.pop("layers")
            return layers, {**data, **values}
        return _spec_of_table({**data, **values}, head)
    name, colon, preset = head.partition(":")
    if not _NAME.fullmatch(name) or (colon and not preset):
        raise InputError(
            "selector",
            expected="name, name:preset or a config file, then optional ,field=value",
            got=_shown(text),
            remedy="Write for example retopk:quality,topk=128; `sparsesel list` shows the names.",
        )
    return _checked_spec(name, preset, values)


def _parse_layers(table: Any, text: str) -> dict[str, SelectorSpec]:
    """The selectors that the table `layers` of the file named in `text` gives to ranges."""
    if not isinstance(table, dict):
        raise InputError(
            "layers",
            expected="a table from ranges of layers to selectors",
            got=_shown(table),
            remedy='Write for example layers = {"0-1" = "full", "2-" = "retopk"}.',
        )
    check_layers(table)
    layers: dict[str, SelectorSpec] = {}
    for key, value in table.items():
        where = f"layers {str(key)!r} of {text}"
        spec = _spec_of_table(value, where) if isinstance(value, dict) else None
        if isinstance(value, str):
            spec = _parse(value)
        if not isinstance(spec, SelectorSpec):
            raise InputError(
                where,
                expected="one selector: a name, or a table with its name and fields",
                got=_shown(value),
                remedy='Write for example "retopk:quality".',
            )
        layers[str(key)] = spec
    return layers


def _spec_of_table(table: Mapping[str, Any], where: str) -> SelectorSpec:
    values = dict(table)
    name, preset = values.pop("name", ""), values.pop("preset", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(preset, str):
        raise InputError(
            "selector",
            expected="`name` in the file, text that names a selector, and `preset`, if it is there, text",
            got=f"name {_shown(name)} and preset {_shown(preset)} in {where}",
            remedy='Write for example name = "retopk"; `sparsesel list` shows the names.',
        )
    return _checked_spec(name, preset, values)


def _checked_spec(name: str, preset: str, values: Mapping[str, Any]) -> SelectorSpec:
    if preset and not _PRESET.fullmatch(preset):
        raise InputError(
            "preset",
            expected="letters, digits, '_', '-' and '.'",
            got=repr(preset),
            remedy="See `sparsesel show`.",
        )
    return SelectorSpec(name, preset, values)


class RunConfig(BaseModel):
    """What an evaluation measures; written beside its results, and read back with `--config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    model: str = Field(default="smollm2-135m", description="The offline model's name, a local folder or a Hub id.")
    selectors: tuple[str, ...] = Field(
        default=(), strict=False, description="Selectors: name, name:preset or a file, then ,field=value."
    )
    names: dict[str, str] = Field(
        default_factory=dict, description="What selectors are called in results, from one of `selectors` to its name."
    )
    set: dict[str, Any] = Field(default_factory=dict, description="Fields set in every selector that has them.")
    contexts: tuple[int, ...] = Field(
        default=(2048,),
        strict=False,
        min_length=1,
        description="Tokens that a task may fill, what it decodes included.",
    )
    texts: tuple[str, ...] = Field(
        default=(), strict=False, description="UTF-8 text files; without any, Python's language reference."
    )
    skip_chars: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Characters left out at the beginning of each file."
    )
    seed: int = Field(default=0, ge=0, lt=2**64, description="Seed of torch's generator, set before each measurement.")
    backend: BackendName = Field(
        default="auto",
        description='What runs the selectors: "triton", "eager", or "auto", the best one for the device.',
    )
    tasks: dict[str, dict[str, Any]] = Field(
        min_length=1, description="What is measured: a task's name to its fields, `[tasks.perplexity]` in TOML."
    )

    @field_validator("contexts")
    @classmethod
    def _contexts_are_lengths(cls, contexts: tuple[int, ...]) -> tuple[int, ...]:
        if min(contexts) < 1 or len(set(contexts)) < len(contexts):
            raise ValueError("positive lengths, each once")
        if max(contexts) > MAX_COUNT:
            raise ValueError(f"at most {MAX_COUNT}")
        return contexts
