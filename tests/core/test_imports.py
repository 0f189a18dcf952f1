"""What answers before a model is loaded loads neither torch nor triton nor transformers."""

import subprocess
import sys
import types

import pytest

HEAVY = ("torch", "triton", "transformers", "numpy", "jaxtyping", "safetensors")

QUICK = {
    "import sparsesel": "import sparsesel",
    "public names without torch": "from sparsesel import InputError, SelectorConfig, hookimpl, make_config",
    "registry": "from sparsesel.registry import registry; registry()",
    "config of every selector": "from sparsesel.registry import registry;"
    "[registry().config_class(name) for name in registry().selectors]",
    "list": "from sparsesel.cli.app import app; app(['list'], standalone_mode=False)",
    "list --json": "from sparsesel.cli.app import app; app(['list', '--json'], standalone_mode=False)",
    "show": "from sparsesel.cli.app import app; app(['show', 'retopk:quality'], standalone_mode=False)",
    "refusal": "from sparsesel.cli.app import app; app(['show', 'nope'], standalone_mode=False)",
    "refused evaluation": "from sparsesel.cli.app import app;"
    "app(['eval', 'perplexity', '--selector', 'nope', '--out', 'x'], standalone_mode=False)",
    "refused cost": "from sparsesel.cli.app import app;"
    "app('cost --heads 3 --kv-heads 2 --head-dim 8 --layers 1 --context 9'.split(), standalone_mode=False)",
    "refused generation": "from sparsesel.cli.app import app;"
    "app(['generate', '--selector', 'nope', '--prompt', 'x'], standalone_mode=False)",
}


@pytest.mark.parametrize("what", QUICK)
def test_heavy_packages_stay_out(what, tmp_path):
    code = f"{QUICK[what]}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert result.stdout.splitlines()[-1] == "LOADED"


def test_every_public_name_exists():
    import sparsesel

    for name in sparsesel.__all__:
        # A submodule of that name would take its place once it is imported.
        assert not isinstance(getattr(sparsesel, name), types.ModuleType)
    assert set(dir(sparsesel)) == set(sparsesel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sparsesel.nonsense
