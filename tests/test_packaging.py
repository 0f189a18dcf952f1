"""The wheel: every plugin a top-level package with its presets, found through entry points alone."""

import configparser
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLUGINS = PROJECT["entry-points"]["sparsesel"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [*command, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300
    )
    (path,) = folder.glob("*.whl")
    return path


def test_one_wheel_for_every_platform(wheel):
    assert wheel.name == f"sparsesel-{PROJECT['version']}-py3-none-any.whl"


def test_plugins_are_packages_of_their_own_with_their_presets(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {Path(name).parts[0] for name in names} - {f"sparsesel-{PROJECT['version']}.dist-info"}
    assert folders == {"sparsesel", *(target.partition(".")[0] for target in PLUGINS.values())}
    source = {
        str(path.relative_to(ROOT / "plugins"))
        for path in (ROOT / "plugins").rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml")
    }
    assert source <= set(names)
    assert "sparsesel_retopk/presets/quality.toml" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "plugins/"))]


def test_every_plugin_folder_is_declared():
    folders = {path.parent.name for path in (ROOT / "plugins").glob("*/plugin.py")}
    ours = {target.partition(".")[0] for target in PLUGINS.values()}
    assert folders == ours - {"sparsesel"}  # its tasks are plugins, too


def test_entry_points_and_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"sparsesel-{PROJECT['version']}.dist-info"
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(f"{info}/entry_points.txt").decode())
        assert dict(parser["sparsesel"]) == PLUGINS
        assert dict(parser["console_scripts"]) == {"sparsesel": "sparsesel.cli:main"}
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def test_version_is_written_once():
    import sparsesel

    assert sparsesel.__version__ == PROJECT["version"]


def test_an_installed_wheel_finds_its_own_selectors(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, "--no-deps", "--target", str(tmp_path), str(wheel)], check=True, timeout=300)
    code = """
import sparsesel, sparsesel_retopk
from sparsesel.registry import registry
assert not registry().broken, registry().broken
assert {"full", "exact_topk", "retopk"} <= set(registry().selectors)
assert sparsesel.make_config("retopk:quality").similarity_threshold == 0.9
print(sparsesel.__file__, sparsesel_retopk.__file__, sep="\\n")
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PIP_ROOT_USER_ACTION": "ignore"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert all(Path(line).is_relative_to(tmp_path) for line in result.stdout.split())
