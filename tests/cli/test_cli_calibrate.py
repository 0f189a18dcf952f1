"""`sparsesel calibrate loki`, on a tiny random model: from text to a file to a selector that uses it."""

import json
import os

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from sparsesel.cli.app import app
from sparsesel.hf import models as hf_models
from sparsesel_loki.header import read_header

WORDS = ["<unk>", *(f"w{i}" for i in range(63))]


def save_tiny(folder, *, seed=0, **changes):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = LlamaConfig(
        vocab_size=len(WORDS), max_position_embeddings=128, eos_token_id=None, bos_token_id=None, **{**sizes, **changes}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{(7 * i + i // 5) % 63}" for i in range(700)), encoding="utf-8")
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def calibrate(tiny, text, tmp_path):
    def invoke(*more, selector="loki", model=tiny, texts=(text,), out=tmp_path / "loki.safetensors"):
        options = [part for path in texts for part in ("--text", path)]
        return run("calibrate", selector, "--model", model, *options, "--out", out, *more)

    return invoke


def generate(model, file):
    prompt = " ".join(WORDS[1:41])
    selector = f"loki,topk=8,rank=4,calibration={file}"
    return run("generate", "--model", model, "--selector", selector, "--prompt", prompt, "--max-new-tokens", 5)


def test_a_file_is_written_and_used(calibrate, tiny, tmp_path):
    result = calibrate()
    assert result.exit_code == 0, result.stderr
    assert "from 700 tokens in windows of 128" in result.stdout
    assert "Variance explained" in result.stdout
    header = read_header(tmp_path / "loki.safetensors")
    assert header["tokens"] == "700"
    assert header["model"] == str(tiny)
    assert header["model_identity"].startswith(f"{tiny.name}@sha256:")
    assert json.loads(header["texts"]) == ["text.txt"]
    assert json.loads(header["versions"])["sparsesel"]
    assert json.loads(header["shapes"]) == {"0": [2, 8], "1": [2, 8]}
    assert not list(tmp_path.glob(".part-*"))
    used = generate(tiny, tmp_path / "loki.safetensors")
    assert used.exit_code == 0, used.stderr
    assert "density" in used.stdout


def test_twice_gives_the_same(calibrate, tmp_path):
    assert calibrate(out=tmp_path / "one").exit_code == calibrate(out=tmp_path / "two").exit_code == 0
    headers = [read_header(tmp_path / name) for name in ("one", "two")]
    assert headers[0].pop("time") <= headers[1].pop("time")
    assert headers[0] == headers[1]


def test_several_texts_up_to_a_limit(calibrate, text, tmp_path):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    result = calibrate("--max-tokens", 800, "--context", 50, texts=(text, copy))
    assert result.exit_code == 0, result.stderr
    assert "from 800 tokens in windows of 50" in result.stdout
    assert read_header(tmp_path / "loki.safetensors")["tokens"] == "800"


def test_another_model_is_refused(calibrate, tmp_path):
    """One of other weights, and one of other shapes."""
    assert calibrate().exit_code == 0
    file = tmp_path / "loki.safetensors"
    twin = generate(save_tiny(tmp_path / "twin", seed=1), file)
    assert twin.exit_code == 2
    assert "calibration of this model" in twin.stderr
    assert "sparsesel calibrate loki" in twin.stderr
    other = generate(save_tiny(tmp_path / "other", num_key_value_heads=4), file)
    assert other.exit_code == 2
    assert "loki.calibration" in other.stderr


def test_a_file_that_is_none_is_refused_before_the_model_loads(tiny, text, monkeypatch):
    monkeypatch.setattr(hf_models, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    result = generate(tiny, text)
    assert result.exit_code == 2
    assert "loki.calibration" in result.stderr
    assert "sparsesel calibrate loki" in result.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"selector": "exact_topk"}, "selector"),
        ({"selector": "lokki"}, "selector"),
        ({"model": "nowhere/to-be-found"}, "model"),
        ({"texts": ("missing.txt",)}, "text"),
        ({"texts": (__file__, __file__)}, "text"),
        ({"out": ""}, "--out"),
        ({"out": "no/such/folder/file"}, "--out"),
        ({"out": "/"}, "--out"),
        ({"more": ("--context", 129)}, "--context"),
        ({"more": ("--context", 1)}, "--context"),
        ({"more": ("--max-tokens", 1)}, "--max-tokens"),
    ],
    ids=str,
)
def test_refused_before_the_model_loads(calibrate, change, field, monkeypatch):
    monkeypatch.setattr(hf_models, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    named = {name: value for name, value in change.items() if name != "more"}
    result = calibrate(*change.get("more", ()), **named)
    assert result.exit_code == 2
    assert field in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(calibrate, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert calibrate(out=folder / "file").exit_code == 2


def test_too_little_text_leaves_no_file(calibrate, tmp_path):
    out = tmp_path / "loki.safetensors"
    out.write_text("as it was", encoding="utf-8")
    result = calibrate("--max-tokens", 5)
    assert result.exit_code == 2
    assert "more text" in result.stderr
    assert out.read_text(encoding="utf-8") == "as it was"
    assert not list(tmp_path.glob(".part-*"))
