"""The registry: what is found, and the traps that discovery must not fall into."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparsesel.config import SelectorConfig
from sparsesel.errors import BrokenPluginError, InputError, UnknownNameError
from sparsesel.registry import GROUP, Registry, make_config, make_selector

PLUGIN = """
import sparsesel

@sparsesel.hookimpl
def sparsesel_selectors():
    return [sparsesel.SelectorPlugin(
        name={name!r}, summary="Nothing in particular.", config="{module}_parts:Config", factory="{module}_parts:Made",
        presets="{module}_package",
    )]
"""

PARTS = """
from typing import Literal
from sparsesel.config import SelectorConfig, Topk

class Config(SelectorConfig):
    name: Literal[{name!r}] = {name!r}
    topk: Topk = 512
    window_size: int = 32

class Made:
    def __init__(self, config):
        self.config = config
"""


class Site:
    """A folder of throwaway distributions that can be imported from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, content: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))

    def declare(self, distribution: str, version: str, *entries: str, metadata: bool = True) -> None:
        info = f"{distribution}-{version}.dist-info"
        self.write(f"{info}/entry_points.txt", f"[{GROUP}]\n" + "\n".join(entries))
        if metadata:
            self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def plugin(self, module: str, *, name: str, distribution: str = "", version: str = "1.0") -> None:
        """A complete distribution with one good selector."""
        self.write(f"{module}.py", PLUGIN.format(name=name, module=module))
        self.write(f"{module}_parts.py", PARTS.format(name=name))
        self.write(f"{module}_package/__init__.py", "")
        self.write(f"{module}_package/presets/tight.toml", "topk = 64\n")
        self.declare(distribution or module, version, f"{name} = {module}")

    def registry(self) -> Registry:
        return Registry(
            [
                entry
                for distribution in importlib.metadata.distributions(path=[str(self.folder)])
                for entry in distribution.entry_points
            ]
        )


@pytest.fixture
def site(tmp_path, monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_selector_is_found_with_its_origin(site):
    site.plugin("good", name="mine", distribution="acme-select", version="2.1")
    registry = site.registry()
    assert not registry.broken
    assert list(registry.selectors) == ["mine"]
    found = registry.get("mine")
    assert (found.distribution, found.version, found.entry_point) == ("acme-select", "2.1", "mine")
    assert "good_parts" not in sys.modules, "listing must not import what strings point at"


def test_sources_win_in_order(site):
    """Defaults < preset < file < the spec's own fields < overrides."""
    site.plugin("good", name="mine")
    registry = site.registry()
    file = site.folder / "file.toml"
    file.write_text('name = "mine"\npreset = "tight"\n')
    with_topk = site.folder / "with_topk.toml"
    with_topk.write_text('name = "mine"\npreset = "tight"\ntopk = 65\n')

    def topk(spec, **overrides):
        return registry.make_config(spec, overrides).topk

    assert topk("mine") == 512
    assert topk("mine:tight") == topk(str(file)) == 64
    assert topk(str(with_topk)) == 65
    assert topk(f"{with_topk},topk=66") == topk("mine:tight,topk=66") == 66
    assert topk(f"{with_topk},topk=66", topk=67) == topk("mine", topk=67) == 67
    assert registry.make_config("mine:tight").window_size == 32


def test_a_selector_is_made_from_a_spec_or_a_config(site):
    site.plugin("good", name="mine")
    registry = site.registry()
    config = registry.make_config("mine", {"topk": 7})
    assert isinstance(config, SelectorConfig)
    assert registry.make_selector("mine", {"topk": 7}).config == registry.make_selector(config).config == config
    with pytest.raises(InputError, match="overrides"):
        registry.make_selector(config, {"topk": 8})


def test_unknown_names_are_refused_with_what_is_installed_and_the_nearest(site):
    site.plugin("good", name="mine")
    site.plugin("other", name="yours")
    registry = site.registry()
    with pytest.raises(UnknownNameError, match=r"among mine, yours; got 'mien'\. Did you mean 'mine'\?"):
        registry.get("mien")
    with pytest.raises(UnknownNameError, match=r"preset among tight; got 'tigth'\. Did you mean 'tight'\?"):
        registry.make_config("mine:tigth")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'topk'"):
        registry.make_config("mine,topkk=3")


BROKEN = {
    "raises": ("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
    "exits": ("raise SystemExit('please install x')", "SystemExit: please install x"),
    "fails_no_exception": ("class Outcome(BaseException): pass\nraise Outcome('skipped')", "Outcome: skipped"),
    "speechless": (
        "class Speechless(Exception):\n    def __str__(self): raise self\nraise Speechless",
        "Speechless",
    ),
    "syntax": ("def (", "SyntaxError"),
    "missing": ("import a_module_that_does_not_exist", "ModuleNotFoundError"),
    "no_hook": ("x = 1", "implements no `sparsesel_selectors` hook"),
    "unmarked": ("def sparsesel_selectors():\n    return []", "implements no `sparsesel_selectors` hook"),
    "unknown_hook": ("import sparsesel\n@sparsesel.hookimpl\ndef sparsesel_selector():\n    return []", "unknown hook"),
    **{
        f"returns_{key}": (f"import sparsesel\n@sparsesel.hookimpl\ndef sparsesel_selectors():\n    {body}", error)
        for key, (body, error) in {
            "none": ("return None", "returns no selector"),
            "empty": ("return []", "returns no selector"),
            "number": ("return 3", "TypeError"),
            "dictionaries": ("return [{'name': 'x'}]", "must return SelectorPlugin records"),
            "text": ("return 'mine'", "must return SelectorPlugin records"),
            "bad_name": ("return [sparsesel.SelectorPlugin('Bad name!', '', '', '')]", "not of the form"),
            "escape": ("return [sparsesel.SelectorPlugin('\\x1b[31m', '', '', '')]", "not of the form"),
            "path": ("return [sparsesel.SelectorPlugin('../x', '', '', '')]", "not of the form"),
            "nameless": ("return [sparsesel.SelectorPlugin(None, '', '', '')]", "must be text"),
            "no_stages": ("return [sparsesel.SelectorPlugin('x', '', '', '', stages='QK')]", "must be a mapping"),
            "no_stage": ("return [sparsesel.SelectorPlugin('x', '', '', '', stages={'f': 1})]", "must be a mapping"),
            "no_summary": ("return [sparsesel.SelectorPlugin('x', None, '', '')]", "must be text"),
            "error": ("raise ValueError('late')", "ValueError: late"),
        }.items()
    },
}


@pytest.mark.parametrize("trap", BROKEN)
def test_one_broken_plugin_leaves_the_others_alone(site, trap):
    code, message = BROKEN[trap]
    site.plugin("good", name="mine")
    site.write("bad.py", code)
    site.declare("bad-company", "0.3", "theirs = bad")
    registry = site.registry()
    assert list(registry.selectors) == ["mine"]
    (broken,) = registry.broken
    assert (broken.name, broken.distribution, broken.version) == ("theirs", "bad-company", "0.3")
    assert message in broken.error
    with pytest.raises(BrokenPluginError, match=r"bad-company 0\.3; repair or uninstall") as caught:
        registry.make_config("theirs")
    assert message in caught.value.got


def test_damaged_metadata_does_not_take_discovery_down(site):
    site.plugin("good", name="mine")
    site.declare("shell", "1.0", "theirs = a_module_that_does_not_exist", metadata=False)
    registry = site.registry()
    assert list(registry.selectors) == ["mine"]
    assert [broken.name for broken in registry.broken] == ["theirs"]
    assert all(isinstance(part, str) for part in (registry.broken[0].distribution, registry.broken[0].version))


def test_a_name_claimed_twice_is_refused_and_cites_both_distributions(site):
    site.plugin("first", name="mine", distribution="first-co", version="1.0")
    site.plugin("second", name="mine", distribution="second-co", version="2.0")
    site.plugin("good", name="other")
    registry = site.registry()
    assert list(registry.selectors) == ["other"]
    with pytest.raises(BrokenPluginError) as caught:
        registry.make_selector("mine")
    for rival in ("first-co 1.0", "second-co 2.0"):
        assert rival in caught.value.got
    assert {broken.distribution for broken in registry.broken} == {"first-co", "second-co"}


def test_one_distribution_that_claims_a_name_twice_is_refused(site):
    site.plugin("first", name="mine")
    site.declare("first", "1.0", "mine = first", "again = first")
    registry = site.registry()
    assert not registry.selectors
    assert "entry point again" in registry.broken[0].error
    assert "entry point mine" in registry.broken[0].error


PARTS_BROKEN = {
    "raises": ("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
    "exits": ("raise SystemExit(1)", "SystemExit"),
    "lacks": ("x = 1", "AttributeError"),
    "no_config": ("class Config: pass\nclass Made: pass", "Config"),
    "other_name": (PARTS.format(name="full"), "'full'"),
    "no_name": ("from sparsesel.config import SelectorConfig as Config\nclass Made: pass", "Undefined"),
    "cannot_validate": (
        PARTS.format(name="mine") + "    def __init__(self, **_): pass\nConfig.__pydantic_validator__ = None\n",
        "AttributeError",
    ),
    "factory_raises": (PARTS.format(name="mine").replace("self.config = config", "1 / 0"), "ZeroDivisionError"),
    "factory_is_none": (PARTS.format(name="mine") + "Made = 3\n", "TypeError: 'int' object is not callable"),
}


@pytest.mark.parametrize("trap", PARTS_BROKEN)
def test_a_plugin_whose_parts_do_not_import_is_refused_by_name(site, trap):
    site.plugin("good", name="mine")
    code, message = PARTS_BROKEN[trap]
    site.write("good_parts.py", code)
    with pytest.raises(BrokenPluginError, match="selector 'mine'") as caught:
        site.registry().make_selector("mine")
    assert message in caught.value.got


@pytest.mark.parametrize("damage", ["malformed", "not_text", "no_folder", "no_package", "a_module"])
def test_unreadable_presets_are_refused_by_name(site, damage):
    site.plugin("good", name="mine")
    presets = site.folder / "good_package" / "presets"
    (presets / "tight.toml").unlink()
    match damage:
        case "malformed":
            (presets / "tight.toml").write_text("topk = ")
        case "not_text":
            (presets / "tight.toml").write_bytes(b"\xff")
        case "no_folder":
            presets.rmdir()
        case "a_module":
            site.write("good.py", PLUGIN.format(name="mine", module="good").replace("good_package", "good_parts"))
        case "no_package":
            site.write("good.py", PLUGIN.format(name="mine", module="good").replace("good_package", "gone_package"))
    with pytest.raises(BrokenPluginError, match=r"presets/\*\.toml .* It comes from good 1\.0"):
        site.registry().make_config("mine:tight")


def test_a_preset_that_does_not_fit_is_refused_by_field(site):
    site.plugin("good", name="mine")
    site.write("good_package/presets/wrong.toml", "topk = 0\n")
    with pytest.raises(InputError, match=r"mine\.topk"):
        site.registry().make_config("mine:wrong")


def test_discovery_in_a_process_of_its_own(site):
    """As installed: through `importlib.metadata`, beside the selectors that ship with sparsesel."""
    site.plugin("good", name="mine", distribution="acme-select")
    site.write("bad.py", "raise SystemExit(3)")
    site.declare("bad-company", "0.3", "theirs = bad")
    code = """
        from sparsesel.registry import registry
        found = registry()
        assert found.get("mine").distribution == "acme-select"
        assert {"full", "exact_topk", "retopk"} <= set(found.selectors), found.broken
        assert [b.name for b in found.broken] == ["theirs"], found.broken
    """
    environment = os.environ | {"PYTHONPATH": str(site.folder)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("spec", [None, 3, ["full"], b"full"])
def test_what_is_no_text_names_no_selector(spec):
    for make in (make_selector, make_config):
        with pytest.raises(InputError, match="retopk:quality"):
            make(spec)
