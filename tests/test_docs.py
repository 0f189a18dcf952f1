"""The documentation: its Python runs, its commands exist, its generated parts are complete, its site needs no network.

A fenced block ```` ```python ```` runs in one namespace with the others of its page, in order. One that needs the
offline model begins with ```` ```{.python .model} ````. Blocks that are included from files are tested where those are.
"""

import html
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from sparsesel.cli.app import app
from sparsesel.config import RunConfig
from sparsesel.eval.decode import selector_metrics
from sparsesel.hf.stats import Stats
from sparsesel.registry import registry

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
FENCE = re.compile(r"^( *)```(?:(\w+)([^\n]*)|\{\.python \.model\})\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OURS = [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]


def blocks(page):
    """(language, info string, code) of each fenced block; language `model` for Python that needs the model."""
    return [(m[2] or "model", m[3] or "", m[4]) for m in FENCE.finditer(PAGES[page])]


def python(page, *languages):
    return [code for language, _, code in blocks(page) if language in languages and "--8<--" not in code]


def run(page, codes):
    module = types.ModuleType(f"docs.{page}")
    for number, code in enumerate(codes, start=1):
        exec(compile(code, f"{page}, block {number}", "exec"), module.__dict__)


@pytest.mark.parametrize("page", [page for page in PAGES if python(page, "python")])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, python(page, "python"))


@pytest.mark.model
@pytest.mark.parametrize("page", [page for page in PAGES if python(page, "model")])
def test_python_with_the_model_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, python(page, "python", "model"))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page):
    assert PAGES[page].count("```") == 2 * len(blocks(page))
    assert {language for language, _, _ in blocks(page)} <= {"python", "model", "sh", "toml"}


def commands():
    """Every `sparsesel …` in a shell block, with the page it is on."""
    for page in PAGES:
        for language, _, code in blocks(page):
            lines = code.replace("\\\n", " ").splitlines() if language == "sh" else []
            for line in lines:
                words = shlex.split(line, comments=True)
                if words[:1] == ["sparsesel"]:
                    yield pytest.param(words[1:], id=f"{page}: {' '.join(words[:4])}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_and_their_options_exist(words):
    command = typer.main.get_command(app)
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        command = command.get_command(None, words[0])
        words = words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    required = {p.opts[0] for p in command.params if p.required and p.opts[0].startswith("--")}
    assert required <= set(words)


def test_make_targets_exist():
    named = set(re.findall(r"^make ([a-z-]+)", "\n".join(PAGES.values()), re.MULTILINE))
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert "bench" in named
    assert named <= defined


def test_toml_blocks_are_what_they_say():
    """A run's file and files that name selectors are read as the program reads them."""
    import tomllib

    from sparsesel.config import build

    found = [tomllib.loads(code) for language, _, code in blocks("configuration.md") if language == "toml"]
    assert [sorted(one) for one in found] == [["name", "preset", "topk"], ["layers"]]
    (run_file,) = [code for language, _, code in blocks("evaluation.md") if language == "toml"]
    config = build(RunConfig, tomllib.loads(run_file), where="run")
    assert registry().make_task_config("perplexity", config.tasks["perplexity"]).suffix == 256
    assert registry().make_task_config("niah", config.tasks["niah"]).trials == 20


@pytest.mark.parametrize("name", OURS)
def test_every_selector_has_its_page(name):
    page = PAGES.get(f"selectors/{name}.md")
    assert page, f"docs/selectors/{name}.md is missing"
    assert page.count(f"<!-- config: {name} -->") == 1
    assert "$$" not in page
    assert "\n## " in page


def test_no_page_is_of_a_selector_that_is_gone():
    assert {path.stem for path in (DOCS / "selectors").glob("*.md")} == {*OURS, "index"}


def test_metrics_are_explained():
    page = PAGES["evaluation.md"]
    stats = Stats({0: {}})
    known = types.SimpleNamespace(total={"selected": 1, "steps": 1}, share=stats.share, candidates=1.0, density=1.0)
    names = ["perplexity", "nll", "tokens", "ms_per_step", "score", *selector_metrics(known)]
    assert [name for name in names if f"`{name}`" not in page] == []


# What is generated


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_every_comment_is_filled(hooks, page):
    assert "<!--" not in hooks.on_page_markdown(PAGES[page])


@pytest.mark.parametrize("name", OURS)
def test_the_table_of_a_selector_is_its_configuration(hooks, name):
    text = hooks.on_page_markdown(f"<!-- config: {name} -->")
    config = registry().config_class(name)
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    presets = [f"{name}:{preset}" for preset in registry().presets(name)]
    assert rows == [*(field for field in config.model_fields if field != "name"), *presets]
    for field in config.model_fields.values():
        assert (field.description or "").replace("|", "\\|") in text
    for values in registry().presets(name).values():
        assert all(f"`{key} = {json.dumps(value)}`" in text for key, value in values.items())


def test_types_bounds_and_defaults_are_told(hooks):
    text = hooks.on_page_markdown("<!-- config: retopk -->")
    assert re.search(r"\| `cache_size` \| int, ≥ 1 \| `32` \| C: past queries", text)
    assert re.search(r"\| `retrieval` \| similarity \\\| recent \| `\"similarity\"` \|", text)
    assert hooks.on_page_markdown("<!-- config: full -->") == "It has no fields to configure."
    run_fields = hooks.on_page_markdown("<!-- model: sparsesel.config:RunConfig -->")
    assert re.search(r"\| `selectors` \| tuple\[str, \.\.\.\] \| `\[\]` \|", run_fields)
    task_fields = hooks.on_page_markdown("<!-- model: sparsesel.eval.tasks.perplexity:PerplexityConfig -->")
    assert re.search(r"\| `documents` \| int \\\| None, ≥ 1, ≤ 2147483647 \|  \|", task_fields)


def test_selectors_and_costs_list_all_that_ship_and_no_others(hooks):
    assert re.findall(r"\[`(\w+)`\]\(\1\.md\)", hooks.on_page_markdown("<!-- selectors -->")) == hooks.ours()
    assert sorted(hooks.ours()) == sorted(OURS)
    costs = hooks.on_page_markdown("<!-- costs: 131072 -->").splitlines()[2:]
    assert sorted(re.match(r"\| `(\w+)", line)[1] for line in costs) == sorted(OURS)
    (full,) = [line for line in costs if line.startswith("| `full` ")]
    assert "| 131072 | 3758.1 | 3758.1 | 0.0 | 0.0 | 7516.2 | 0.0 | 1.00× |" in full


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs sparsesel[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    result = subprocess.run(
        [*command, "-d", str(folder)],
        cwd=folder,  # from anywhere
        env=os.environ
        | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    yield folder
    shutil.rmtree(folder)


def text_of(path):
    return html.unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8")))


def test_every_page_is_built_and_nothing_is_left_unfilled(site):
    for page in PAGES:
        built = (site / page).with_suffix(".html")
        assert built.is_file()
        assert "--8<--" not in built.read_text(encoding="utf-8")
    assert "similarity_threshold" in text_of(site / "selectors" / "retopk.html")


def test_the_sample_project_is_shown_as_it_is(site):
    text = text_of(site / "write-a-selector.html")
    sample = ROOT / "tests" / "third_party" / "sparsesel_strided"
    for name in ("pyproject.toml", "sparsesel_strided/plugin.py", "sparsesel_strided/selector.py"):
        lines = [line.strip() for line in (sample / name).read_text(encoding="utf-8").splitlines() if line.strip()]
        assert [line for line in lines if line not in text] == []


def test_the_api_reference_documents_every_public_name(site):
    import sparsesel

    text = "\n".join(text_of(path) for path in (site / "reference").glob("*.html"))
    missing = [name for name in sparsesel.__all__ if not name.startswith("__") and name not in text]
    assert missing == []
    ids = "\n".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for target in ("sparsesel.hf.inject.sparsify", "sparsesel.selector.Selector.discover", "sparsesel.kv.KVView.dense"):
        assert f'id="{target}"' in ids


def test_nothing_is_fetched_from_elsewhere(site):
    elsewhere = r"=[\"']?(https?:)?//"
    loads = re.compile(rf"<(script|img|iframe|source)[^>]*\bsrc{elsewhere}|<link[^>]*\bhref{elsewhere}")
    for path in site.rglob("*.html"):
        found = loads.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(site)}: {found[0]}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", path.read_text(encoding="utf-8"))
