"""The sample project in tests/third_party is found through its entry point alone, as anyone's would be."""

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

import sparsesel
from sparsesel.registry import registry

PROJECT = Path(__file__).parents[1] / "third_party" / "sparsesel_strided"
REMEDY = f"install it: pip install --no-deps --no-build-isolation {PROJECT}"


@pytest.fixture
def declared():
    """What its pyproject.toml says, if it is installed."""
    try:
        importlib.metadata.distribution("sparsesel-strided")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            pytest.fail(f"the sample third-party project is missing; {REMEDY}")
        pytest.skip(f"the sample third-party project is not installed; {REMEDY}")
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def test_is_found_with_its_distribution_and_version(declared):
    registered = registry().get("strided")
    assert registered.distribution == declared["name"]
    assert registered.version == declared["version"]
    assert registered.entry_point == "strided"


def test_is_made_by_name(declared):
    selector = sparsesel.make_selector("strided,stride=3", topk=5)
    assert type(selector).__module__ == "sparsesel_strided.selector"
    assert selector.config.model_dump() == {"name": "strided", "topk": 5, "stride": 3}


def test_nothing_of_ours_names_it():
    root = PROJECT.parents[2]
    sources = [*root.glob("sparsesel/**/*.py"), *root.glob("plugins/**/*.py"), root / "pyproject.toml"]
    assert not [path for path in sources if "sparsesel_strided" in path.read_text(encoding="utf-8")]


def test_its_task_is_found_and_has_a_command(declared):
    from typer.testing import CliRunner

    from sparsesel.cli.app import app

    found = registry().get_task("agreement")
    assert (found.distribution, found.entry_point) == (declared["name"], "strided")
    assert registry().make_task("agreement", {"steps": 4}).config.steps == 4
    text = CliRunner().invoke(app, ["eval", "agreement", "--help"], env={"COLUMNS": "150"}).stdout
    assert "--steps" in text
    assert "Tokens decoded at the end of a text. [default: 32]" in text


def test_its_task_runs_and_reports_as_ours_do(declared, tmp_path):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from sparsesel.eval import run

    words = {word: index for index, word in enumerate(["?", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 20)
    specs = ["full", "strided,topk=4"]
    results = run(
        "agreement",
        str(tmp_path / "model"),
        specs,
        contexts=[40],
        texts=[tmp_path / "text.txt"],
        steps=8,
        backend="eager",
    )
    assert next(iter(results)).metrics["agreement"] == 1.0
    (section,) = results.report()
    assert section.tables[0].rows == specs
    assert {result.provenance["task_from"] for result in results} == {f"sparsesel-strided {declared['version']}"}
