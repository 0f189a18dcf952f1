"""Finds selectors and evaluation tasks through entry points and makes them by name.

pluggy's own bulk loading lets one plugin silently replace what is another's and lets one broken import take
all discovery down. So entry points are enumerated here, each is loaded by itself, and both faults are kept,
shown by `sparsesel list` and raised only when the plugin concerned is asked for.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy

from sparsesel import hookspecs
from sparsesel.config import (
    AnyConfig,
    LayeredConfig,
    LayeredSpec,
    SelectorConfig,
    SelectorSpec,
    TaskConfig,
    build,
    parse_spec,
    unknown_name,
)
from sparsesel.errors import BrokenPluginError, InputError
from sparsesel.hookspecs import SelectorPlugin, TaskPlugin

if TYPE_CHECKING:
    from sparsesel.eval.task import Task
    from sparsesel.selector import Calibrator, Selector

GROUP = "sparsesel"
PluginT = TypeVar("PluginT", SelectorPlugin, TaskPlugin)


@dataclass(frozen=True)
class _Kind(Generic[PluginT]):
    """What one of the hooks returns."""

    what: str
    hook: str
    record: type[PluginT]
    name: re.Pattern[str]


_SELECTORS = _Kind("selector", "sparsesel_selectors", SelectorPlugin, re.compile(r"[a-z][a-z0-9_]*"))
_TASKS = _Kind("task", "sparsesel_tasks", TaskPlugin, re.compile(r"[a-z][a-z0-9_-]*"))


@dataclass(frozen=True)
class Registered(Generic[PluginT]):
    """A selector or task and where it came from."""

    plugin: PluginT
    distribution: str
    version: str
    entry_point: str


@dataclass(frozen=True)
class Broken:
    """An entry point, or a name, that cannot be used, and why; `kind` says of what, empty for a whole entry point."""

    name: str
    distribution: str
    version: str
    error: str
    kind: str = ""


class Registry:
    """Everything found in one sweep over entry points.

    Attributes:
        selectors: Usable selectors by name, sorted.
        tasks: Usable evaluation tasks by name, sorted.
        broken: What could not be used, with the reason.
    """

    def __init__(self, entry_points: "list[importlib.metadata.EntryPoint]") -> None:
        selectors: list[Registered[SelectorPlugin]] = []
        tasks: list[Registered[TaskPlugin]] = []
        self.broken: list[Broken] = []
        for entry_point in sorted(entry_points, key=lambda e: (e.name, e.value)):
            origin = _origin(entry_point)
            try:
                found = _load(entry_point)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a third party's import can raise anything, SystemExit among it
                self.broken.append(Broken(entry_point.name, *origin, _told(error)))
                continue
            selectors += [Registered(plugin, *origin, entry_point.name) for plugin in found[0]]
            tasks += [Registered(plugin, *origin, entry_point.name) for plugin in found[1]]
        self.selectors = self._claim(selectors, _SELECTORS)
        self.tasks = self._claim(tasks, _TASKS)

    def _claim(self, found: list[Registered[PluginT]], kind: _Kind[PluginT]) -> dict[str, Registered[PluginT]]:
        """By name what one alone claims; what several do is broken."""
        names: dict[str, list[Registered[PluginT]]] = {}
        for one in found:
            names.setdefault(one.plugin.name, []).append(one)
        for name, claims in names.items():
            if len(claims) > 1:
                rivals = " and ".join(f"{c.distribution} {c.version} (entry point {c.entry_point})" for c in claims)
                error = f"the name {name!r} is claimed by {rivals}; uninstall all but one of them"
                self.broken.extend(Broken(name, c.distribution, c.version, error, kind.what) for c in claims)
        return {name: claims[0] for name, claims in sorted(names.items()) if len(claims) == 1}

    def get(self, name: str) -> Registered[SelectorPlugin]:
        """Look a selector up.

        Raises:
            BrokenPluginError: It is installed but broken, or claimed twice.
            UnknownNameError: It is not installed.
        """
        return self._get(name, self.selectors, _SELECTORS)

    def get_task(self, name: str) -> Registered[TaskPlugin]:
        """Look an evaluation task up.

        Raises:
            BrokenPluginError: It is installed but broken, or claimed twice.
            UnknownNameError: It is not installed.
        """
        return self._get(name, self.tasks, _TASKS)

    def _get(self, name: str, known: Mapping[str, Registered[PluginT]], kind: _Kind[PluginT]) -> Registered[PluginT]:
        if name in known:
            return known[name]
        for broken in self.broken:
            if broken.name == name and broken.kind in ("", kind.what):
                raise BrokenPluginError(
                    f"{kind.what} {name!r}",
                    expected="a plugin that loads",
                    got=broken.error,
                    remedy=f"It comes from {broken.distribution} {broken.version}; repair or uninstall it.",
                )
        raise unknown_name(kind.what, name, known, what=kind.what)

    def task_config_class(self, name: str) -> type[TaskConfig]:
        """Configuration class of an evaluation task."""
        config = _resolve(self.get_task(name), "config")
        if not (isinstance(config, type) and issubclass(config, TaskConfig)):
            raise BrokenPluginError(
                f"task {name!r}",
                expected="`config` to name a subclass of TaskConfig",
                got=repr(config),
                remedy=f"Report it to {self.get_task(name).distribution}.",
            )
        return config

    def make_task_config(self, name: str, values: Mapping[str, Any] | None = None) -> TaskConfig:
        """Configuration of a task from its fields.

        Raises:
            InputError: Unknown task or field, or a value out of bounds.
        """
        config_class = self.task_config_class(name)
        try:
            return build(config_class, values or {}, where=name)
        except InputError:
            raise
        except Exception as error:  # a third party's own validation
            raise _broken(self.get_task(name), "a configuration class that validates", error) from error

    def make_task(self, name: str, values: Mapping[str, Any] | None = None) -> "Task[Any]":
        """Make an evaluation task from its name and fields.

        Raises:
            InputError: As `make_task_config`; also when the task itself cannot be made.
        """
        config = self.make_task_config(name, values)
        registered, factory = self.get_task(name), self.task_class(name)
        try:
            return factory(config)
        except InputError:
            raise
        except Exception as error:
            raise _broken(registered, f"`factory` {registered.plugin.factory!r} to make a task", error) from error

    def task_class(self, name: str) -> "type[Task[Any]]":
        """Class of a task, whose `report` needs no configuration.

        Raises:
            InputError: Unknown task, or one whose class cannot be imported.
        """
        return _resolve(self.get_task(name), "factory")

    def config_class(self, name: str) -> type[SelectorConfig]:
        """Configuration class of a selector."""
        config = _resolve(self.get(name), "config")
        if not (isinstance(config, type) and issubclass(config, SelectorConfig)):
            raise BrokenPluginError(
                f"selector {name!r}",
                expected="`config` to name a subclass of SelectorConfig",
                got=repr(config),
                remedy=f"Report it to {self.get(name).distribution}.",
            )
        # Otherwise its configurations would be taken for another selector's.
        own = config.model_fields["name"].get_default()
        if own != name:
            raise BrokenPluginError(
                f"selector {name!r}",
                expected=f"the field `name` of its configuration to have the default {name!r}",
                got=repr(own),
                remedy=f"Report it to {self.get(name).distribution}.",
            )
        return config

    def presets(self, name: str) -> dict[str, dict[str, Any]]:
        """Presets of a selector: name of the preset to the fields it sets.

        Raises:
            BrokenPluginError: They cannot be read.
            UnknownNameError: There is no such selector.
        """
        package = self.get(name).plugin.presets
        if not package:
            return {}
        try:
            folder = importlib.resources.files(package) / "presets"
            files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
            return {f.name.removesuffix(".toml"): tomllib.loads(f.read_text(encoding="utf-8")) for f in files}
        except Exception as error:  # a third party's import, in case the package is not imported yet
            raise _broken(self.get(name), f"readable presets/*.toml in {package}", error) from error

    def fields(self, spec: str) -> set[str]:
        """Names of the fields that a spec's selector has, or for a file by layers that any of its selectors has.

        Raises:
            InputError: As `resolve`, for an unknown selector.
        """
        parsed = parse_spec(spec)
        selectors = parsed.layers.values() if isinstance(parsed, LayeredSpec) else [parsed]
        return set().union(*(self._fields(one.name) for one in selectors))

    def resolve(self, spec: str, overrides: Mapping[str, Any] | None = None) -> AnyConfig:
        """Resolve a selector's configuration: defaults < preset < file < the spec's own fields < `overrides`.

        Args:
            spec: `name`, `name:preset` or a config file, each optionally followed by `,field=value`.
            overrides: Fields that win over everything else. With a file by layers they go, as the spec's own do, to
                every selector of it that has the field.

        Raises:
            InputError: Unknown selector, preset or field, or a value out of bounds.
        """
        parsed = parse_spec(spec)
        if isinstance(parsed, SelectorSpec):
            return self._build(parsed, overrides or {})
        common = {**parsed.values, **(overrides or {})}
        fields = {key: self._fields(one.name) for key, one in parsed.layers.items()}
        for name in common:
            if not any(name in known for known in fields.values()):
                raise unknown_name(f"selector {spec!r}", name, set().union(*fields.values()), what="field")
        return LayeredConfig(
            layers={
                key: self._build(one, {name: value for name, value in common.items() if name in fields[key]})
                for key, one in parsed.layers.items()
            }
        )

    def make_config(self, spec: str, overrides: Mapping[str, Any] | None = None) -> SelectorConfig:
        """Resolve the configuration of one selector, as `resolve` does.

        Raises:
            InputError: As `resolve`; also for a file that names selectors by layers.
        """
        config = self.resolve(spec, overrides)
        if isinstance(config, LayeredConfig):
            raise InputError(
                "selector",
                expected="one selector",
                got=f"{spec!r}, which names selectors by layers",
                remedy="Give it to a whole model, or name one of its selectors.",
            )
        return config

    def make_selector(self, spec: "str | SelectorConfig", overrides: Mapping[str, Any] | None = None) -> "Selector":
        """Make a selector from a spec or from a configuration.

        Raises:
            InputError: As `make_config`; also when `overrides` come with a configuration.
        """
        if isinstance(spec, SelectorConfig):
            if overrides:
                raise InputError(
                    "overrides",
                    expected="none beside a config object",
                    got=overrides,
                    remedy="Use model_copy(update=…).",
                )
            config = spec
        else:
            config = self.make_config(spec, overrides)
        registered = self.get(config.name)
        factory = _resolve(registered, "factory")
        try:
            return factory(config)
        except InputError:
            raise
        except Exception as error:
            raise _broken(registered, f"`factory` {registered.plugin.factory!r} to make a selector", error) from error

    def _fields(self, name: str) -> set[str]:
        return set(self.config_class(name).model_fields) - {"name"}

    def _build(self, spec: SelectorSpec, overrides: Mapping[str, Any]) -> SelectorConfig:
        values: dict[str, Any] = {}
        config_class = self.config_class(spec.name)
        if spec.preset:
            presets = self.presets(spec.name)
            if spec.preset not in presets:
                raise unknown_name(f"preset of {spec.name}", spec.preset, presets, what="preset")
            values.update(presets[spec.preset])
        try:
            return build(config_class, {**values, **spec.values, **overrides}, where=spec.name)
        except InputError:
            raise
        except Exception as error:  # a third party's own validation
            raise _broken(self.get(spec.name), "a configuration class that validates", error) from error

    def make_calibrator(self, name: str) -> "Calibrator":
        """A new calibrator of a selector.

        Raises:
            InputError: There is no such selector, or it is not calibrated.
        """
        if not self.get(name).plugin.calibrate:
            others = [known for known, found in self.selectors.items() if found.plugin.calibrate]
            raise InputError(
                "selector",
                expected="one that is calibrated on text",
                got=f"{name!r}, which is not",
                remedy=f"Use it as it is; calibrated are: {', '.join(others) or 'none installed'}.",
            )
        return _resolve(self.get(name), "calibrate")()


def _load(entry_point: importlib.metadata.EntryPoint) -> tuple[list[SelectorPlugin], list[TaskPlugin]]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    selectors, tasks = _records(manager, _SELECTORS), _records(manager, _TASKS)
    if not selectors and not tasks:
        raise TypeError(
            f"{entry_point.value} implements no `sparsesel_selectors` hook and no `sparsesel_tasks` hook, "
            "or it returns no selector and no task"
        )
    return selectors, tasks


def _records(manager: pluggy.PluginManager, kind: _Kind[PluginT]) -> list[PluginT]:
    """What a module's implementation of one hook returns."""
    plugins: list[PluginT] = []
    for result in getattr(manager.hook, kind.hook)():
        plugins.extend(result)
    for plugin in plugins:
        if not isinstance(plugin, kind.record):
            raise TypeError(f"`{kind.hook}` must return {kind.record.__name__} records, got {plugin!r}")
        for field in dataclasses.fields(plugin):
            value, wanted = getattr(plugin, field.name), "text"
            texts: list[Any] = [value]
            if field.name == "stages":
                wanted = "a mapping of texts"
                texts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"`{field.name}` of {plugin.name!r} must be {wanted}, got {value!r}")
        if not kind.name.fullmatch(plugin.name):
            raise ValueError(f"{kind.what} name {plugin.name!r} is not of the form {kind.name.pattern}")
    return plugins


def _origin(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that declares it, as far as its metadata can be read."""
    try:
        dist = entry_point.dist
        return (dist.name or "unknown", dist.version or "unknown") if dist is not None else ("unknown", "unknown")
    except Exception:  # damaged metadata raises what it likes, by Python version
        return ("unknown", "unknown")


def _told(error: BaseException) -> str:
    """Kind and message of an error, also of one that cannot say what it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _resolve(registered: Registered[Any], attribute: str) -> Any:
    target: str = getattr(registered.plugin, attribute)
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's import can raise anything, SystemExit among it
        raise _broken(registered, f"`{attribute}` {target!r} to import", error) from error


def _broken(registered: Registered[Any], expected: str, error: BaseException) -> BrokenPluginError:
    what = "task" if isinstance(registered.plugin, TaskPlugin) else "selector"
    return BrokenPluginError(
        f"{what} {registered.plugin.name!r}",
        expected=expected,
        got=_told(error),
        remedy=f"It comes from {registered.distribution} {registered.version}; repair or uninstall it.",
    )


@functools.cache
def registry() -> Registry:
    """The registry of this process; entry points are read once."""
    return Registry(list(importlib.metadata.entry_points(group=GROUP)))


def make_config(spec: str, **overrides: Any) -> SelectorConfig:
    """Resolve `spec`, for example `make_config("retopk:quality", topk=128)`. See `Registry.make_config`."""
    return registry().make_config(spec, overrides)


def make_selector(spec: "str | SelectorConfig", **overrides: Any) -> "Selector":
    """Make a selector, as in `make_selector("retopk:quality,topk=128")`. See `Registry.make_selector`."""
    return registry().make_selector(spec, overrides)
