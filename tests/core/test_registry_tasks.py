"""Evaluation tasks of third parties: found like selectors, refused by name if broken or claimed twice."""

import importlib.metadata
import sys
import textwrap

import pytest

from sparsesel.errors import BrokenPluginError, InputError, UnknownNameError
from sparsesel.registry import GROUP, Registry

PLUGIN = """
import sparsesel

@sparsesel.hookimpl
def sparsesel_tasks():
    return [sparsesel.TaskPlugin(
        name="counting", summary="Counts.", config="{module}_parts:Config", factory="{module}_parts:Counting",
    )]
"""
PARTS = """
from pydantic import Field
from sparsesel.config import TaskConfig
from sparsesel.eval.task import Task

class Config(TaskConfig):
    to: int = Field(default=3, ge=1, description="How far.")

class Counting(Task[Config]):
    def points(self, setting): return []
    def prepare(self, setting, context, document): raise NotImplementedError
    def measure(self, bench, case, specs): yield from ()
    @classmethod
    def report(cls, lines): return []
"""


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declares a distribution with a task; returns what makes a registry of all."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def add(module, parts=PARTS, plugin=PLUGIN):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(plugin).format(module=module))
        (tmp_path / f"{module}_parts.py").write_text(parts)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{module} = {module}\n")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        found = importlib.metadata.distributions(path=[str(tmp_path)])
        return Registry([entry for distribution in found for entry in distribution.entry_points])

    yield add
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_task_is_found_with_its_origin_and_made_from_its_fields(declare):
    registry = declare("numbers_co")
    found = registry.get_task("counting")
    assert (found.distribution, found.version, found.plugin.summary) == ("numbers_co", "1.0", "Counts.")
    assert registry.make_task("counting", {"to": 7}).config.to == 7
    assert not registry.selectors


def test_unknown_tasks_and_fields_are_refused(declare):
    registry = declare("numbers_co")
    with pytest.raises(UnknownNameError, match="Did you mean 'counting'"):
        registry.get_task("countin")
    with pytest.raises(InputError, match="ot"):
        registry.make_task("counting", {"ot": 7})
    with pytest.raises(InputError, match=r"to: expected .*1"):
        registry.make_task("counting", {"to": 0})


def test_a_task_claimed_twice_is_refused_and_cites_both(declare):
    declare("numbers_co")
    registry = declare("figures_co")
    assert not registry.tasks
    with pytest.raises(BrokenPluginError) as caught:
        registry.make_task("counting")
    assert "numbers_co 1.0" in caught.value.got
    assert "figures_co 1.0" in caught.value.got


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("raise RuntimeError('no abacus')", "RuntimeError: no abacus"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "AttributeError"),
        (PARTS.replace("(TaskConfig)", ""), "Config"),
        (PARTS + "    def __init__(self, config): 1 / 0\n", "ZeroDivisionError"),
        (PARTS.replace("    def points(self, setting): return []\n", ""), "points"),
    ],
)
def test_a_task_whose_parts_are_broken_is_refused_by_name(declare, parts, message):
    registry = declare("numbers_co", parts)
    assert list(registry.tasks) == ["counting"]  # listing imports none of it
    with pytest.raises(BrokenPluginError, match="task 'counting'") as caught:
        registry.make_task("counting")
    assert message in caught.value.got


def test_a_hook_that_fails_leaves_the_others_alone(declare):
    declare("broken_co", plugin="import sparsesel\n@sparsesel.hookimpl\ndef sparsesel_tasks():\n    return 1 / 0\n")
    registry = declare("numbers_co")
    assert list(registry.tasks) == ["counting"]
    (broken,) = registry.broken
    assert broken.distribution == "broken_co"
    assert "ZeroDivisionError" in broken.error
