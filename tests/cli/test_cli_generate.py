"""`sparsesel generate`, on a tiny random model and on the demonstration model."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from sparsesel.cli.app import app
from sparsesel.cli.generate import statistics
from sparsesel.hf import models as hf_models

WORDS = ["<unk>", "</s>", "[b]", "\x1b[2J", *(f"w{i}" for i in range(60))]
MAX_LENGTH = 64
COMMAND = "from sparsesel.cli import main; main()"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a random model whose tokens are words, two of them hostile to terminals."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*args):
        result = CliRunner().invoke(app, ["generate", *map(str, args)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


@pytest.fixture
def never_loads(monkeypatch):
    """Bad input must be refused before weights are read."""

    def load_model(source, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(hf_models, "load_model", load_model)


PROMPT = "w1 w2 w3 w4 w5 w6 w7 w8"


def test_text_streams_and_ends_in_a_line_of_statistics(run, tiny):
    result = run("--model", tiny, "--selector", "exact_topk,topk=4", "--prompt", PROMPT, "--max-new-tokens", "9")
    assert result.exit_code == 0, result.stderr
    text, statistic = result.stdout.splitlines()
    assert len(text.split()) == 9
    # 8 decode steps over 9 … 16 keys, 4 of them attended.
    density = 8 * 4 / sum(range(9, 17))
    assert re.fullmatch(
        rf"9 tokens · \d+\.\d ms per token after the first · density {density:.3f} · exact 1\.000 · eager", statistic
    )


def test_the_line_names_the_backend_that_ran(run, tiny):
    texts = set()
    for backend in ("eager", "triton"):
        options = ["--selector", "full", "--prompt", PROMPT, "--max-new-tokens", "4", "--backend", backend]
        result = run("--model", tiny, *options)
        assert result.exit_code == 0, result.stderr
        text, statistic = result.stdout.splitlines()
        assert statistic.endswith(f" · {backend}")
        texts.add(text)
    assert len(texts) == 1


def test_a_selector_that_attends_to_everything_generates_what_the_model_does(run, tiny):
    model = LlamaForCausalLM.from_pretrained(tiny)
    ids = torch.tensor([[WORDS.index(word) for word in PROMPT.split()]])
    dense = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, 8:]
    expected = " ".join(WORDS[i] for i in dense)
    for selector in ("full", "exact_topk,topk=100", "retopk,topk=100"):
        result = run("--model", tiny, "--selector", selector, "--prompt", PROMPT, "--max-new-tokens", "12")
        assert result.stdout.splitlines()[0] == expected.replace("\x1b", "\\x1b")


def test_set_and_prompt_file(run, tiny, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    common = ["--model", tiny, "--selector", "exact_topk", "--max-new-tokens", "3", "--set", "topk=2"]
    assert run(*common, "--prompt-file", path).stdout.split("·")[2] == " density 0.211 "
    assert run(*common, "--prompt", PROMPT).stdout.split("·")[2] == " density 0.211 "


def test_one_new_token_needs_no_decode_step(run, tiny):
    result = run("--model", tiny, "--selector", "retopk", "--prompt", PROMPT, "--max-new-tokens", "1")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "1 tokens · eager"


REFUSED = {
    "neither prompt": ([], "--prompt"),
    "both prompts": (["--prompt", "w1", "--prompt-file", "good.txt"], "--prompt"),
    "blank prompt": (["--prompt", "  "], "--prompt"),
    "not text": (["--prompt", "w1 \udcff"], "--prompt"),
    "missing file": (["--prompt-file", "gone.txt"], "--prompt-file"),
    "folder": (["--prompt-file", "."], "--prompt-file"),
    "empty file": (["--prompt-file", "empty.txt"], "--prompt-file"),
    "not UTF-8": (["--prompt-file", "latin.txt"], "--prompt-file"),
    "unknown selector": (["--prompt", "w1", "--selector", "retopkk"], "selector"),
    "bad budget": (["--prompt", "w1", "--selector", "retopk,topk=0"], "retopk.topk"),
    "bad field": (["--prompt", "w1", "--set", "nonsense=1"], "--set"),
    "too long": (["--prompt", PROMPT, "--max-new-tokens", str(MAX_LENGTH - 7)], "--max-new-tokens"),
    "no chat template": (["--prompt", PROMPT, "--chat"], "--chat"),
    "unknown model": (["--prompt", "w1", "--model", "./gone"], "model"),
    "unknown backend": (["--prompt", "w1", "--backend", "native"], "backend"),
    "backend without its device": (["--prompt", "w1", "--backend", "triton"], "backend"),
    "two selectors": (["--prompt", "w1", "--selector", "full", "--selector", "retopk"], "--selector"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_the_model_loads(run, tiny, tmp_path, monkeypatch, never_loads, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (tmp_path / "good.txt").write_text(PROMPT)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    args, field = REFUSED[case]
    defaults = {"--model": tiny, "--selector": "full"}
    given = [part for option, value in defaults.items() if option not in args for part in (option, value)]
    result = run(*given, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == f"error in {field}"


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma2", "soft-capped attention logits"), ("gpt_oss", "attention sinks as learned logits")],
)
def test_a_model_that_cannot_be_served_is_refused_by_name_before_its_weights_are_read(
    run, tiny, tmp_path, family, reason
):
    """Neither would transformers load it with sdpa, which it says in terms of its own."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, vocab_size=len(WORDS), num_key_value_heads=2, head_dim=8, **sizes)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    result = run("--model", tmp_path, "--selector", "full", "--prompt", PROMPT)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert re.match(r"error in model G\w+ForCausalLM, layer 1 \(G\w+Attention\)$", first)
    assert [line.split()[0] for line in rest] == ["expected", "got", "remedy"]
    assert reason in rest[1]


def test_the_longest_that_fits_is_generated(run, tiny):
    result = run("--model", tiny, "--selector", "full", "--prompt", PROMPT, "--max-new-tokens", str(MAX_LENGTH - 8))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{MAX_LENGTH - 8} tokens")


def test_no_new_token_is_a_usage_error(run, tiny):
    assert run("--model", tiny, "--selector", "full", "--prompt", "w1", "--max-new-tokens", "0").exit_code == 2


def test_generated_text_cannot_drive_the_terminal(run, tiny, monkeypatch):
    """A model that says nothing but an escape sequence."""
    load_model = hf_models.load_model

    def obsessed(source, **kwargs):
        model = load_model(source, **kwargs)
        model.lm_head.weight.data.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(WORDS)))
        model.lm_head.bias.data[WORDS.index("\x1b[2J")] = 1.0
        return model

    monkeypatch.setattr(hf_models, "load_model", obsessed)
    result = run("--model", tiny, "--selector", "full", "--prompt", PROMPT, "--max-new-tokens", "3")
    assert result.stdout.splitlines()[0] == "\\x1b[2J \\x1b[2J \\x1b[2J"


def test_statistics_of_a_mixed_run():
    shares = {"exact": 0.25, "reuse": 0.75, "refresh": 0.0}
    stats = SimpleNamespace(density=0.5, backend="triton", total=shares | {"steps": 8.0}, share=shares.__getitem__)
    assert statistics([1.0, 1.010, 1.030], stats) == (
        "3 tokens · 15.0 ms per token after the first · density 0.500 · exact 0.250 · reuse 0.750 · refresh 0.000 "
        "· triton"
    )


@pytest.mark.model
def test_the_demonstration_model_continues_a_prompt():
    options = ["--selector", "retopk:quality", "--set", "topk=64", "--max-new-tokens", "8"]
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, "generate", *options, "--prompt", "The capital of France is"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "default"},
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("8 tokens · ")
    assert result.stderr == ""
