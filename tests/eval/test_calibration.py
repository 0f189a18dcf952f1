"""Running texts through a model for a calibrator: windows, streaming, and what the calibrator is shown."""

import hashlib
import os

import pytest
import torch

from sparsesel.errors import InputError
from sparsesel.eval import texts
from sparsesel.eval.calibration import Watcher, calibrate, token_windows
from sparsesel.eval.texts import Text, text_sha256, texts_sha256
from sparsesel.hf import compat
from sparsesel.hf.inject import sparsify
from sparsesel.hf.models import load_model, load_tokenizer, resolve


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(resolve(str(model_folder)))


@pytest.fixture(scope="module")
def bos_tokenizer(other_model_folder):
    return load_tokenizer(resolve(str(other_model_folder)))


def test_windows_hold_the_text_in_order(tokenizer, text_file, monkeypatch):
    monkeypatch.setattr(texts, "_PIECE", 500)
    windows = list(token_windows([str(text_file)], tokenizer, size=100))
    assert {len(window) for window in windows[:-1]} == {100}
    text = text_file.read_text(encoding="utf-8")
    assert tokenizer.decode([token for window in windows for token in window]) == text
    # Pieces are cut between words, so the tokens are those of the text as a whole.
    assert [token for window in windows for token in window] == tokenizer(text)["input_ids"]


def test_every_window_begins_as_a_text_does(bos_tokenizer, text_file):
    windows = list(token_windows([str(text_file), str(text_file)], bos_tokenizer, size=50))
    assert all(window[0] == bos_tokenizer.bos_token_id for window in windows)
    assert all(bos_tokenizer.bos_token_id not in window[1:] for window in windows)
    assert {len(window) for window in windows} >= {50}


@pytest.mark.parametrize("max_tokens", [2, 99, 100, 101, 250])
def test_windows_stop_at_the_limit(tokenizer, text_file, max_tokens):
    windows = list(token_windows([str(text_file)], tokenizer, size=100, max_tokens=max_tokens))
    # One token left over makes no window.
    assert sum(len(window) for window in windows) == max_tokens - (max_tokens == 101)


def test_text_is_read_no_further_than_needed(tokenizer, tmp_path):
    """The memory of a long text is that of a piece: here one that could not be read to its end."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"some words \n" * 20_000 + b"\xff")
    windows = token_windows([str(path)], tokenizer, size=100)
    assert len(next(windows)) == 100
    with pytest.raises(UnicodeDecodeError):
        list(windows)


def test_text_without_white_space_is_cut_anyway(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_PIECE", 64)
    path = tmp_path / "dense.txt"
    path.write_text("abcdefgh" * 100, encoding="utf-8")
    tokens = [token for window in token_windows([str(path)], tokenizer, size=50) for token in window]
    assert tokenizer.decode(tokens) == "abcdefgh" * 100


def test_hash_is_that_of_the_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("one\r\ntwo é".encode() * 9000)
    content = path.read_text(encoding="utf-8")
    assert text_sha256(str(path)) == hashlib.sha256(content.encode()).digest()
    combined = hashlib.sha256(text_sha256(str(path))).hexdigest()
    assert combined == texts_sha256([Text("text.txt", content)])  # as evaluation states it


@pytest.mark.parametrize("content", [b"", b"  \n ", b"caf\xe9", None])
def test_texts_that_cannot_be_read_are_refused(tmp_path, content):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        text_sha256(str(path))
    assert str(path) in caught.value.got


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_is_refused_unread(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), os.devnull):
        with pytest.raises(InputError, match="pipe or device"):
            text_sha256(path)


def test_a_calibrator_sees_every_layer_and_every_key(model_folder, tokenizer, text_file):
    """Post-rotary keys of the whole window, whatever precedes it."""
    model = load_model(resolve(str(model_folder)), device="cpu")
    seen = []

    class Recorder:
        def observe(self, layer, query, kv):
            seen.append((layer.layer_idx, layer.model, query.shape[2], kv.logical_keys().clone()))

        def save(self, path, provenance):
            return ""

    windows = list(token_windows([str(text_file)], tokenizer, size=60, max_tokens=150))
    advanced = []
    assert calibrate(model, iter(windows), Recorder(), advance=advanced.append) == 150
    assert advanced == [60, 60, 30]
    assert [(layer, count) for layer, _, count, _ in seen] == [(i, n) for n in advanced for i in (0, 1)]
    assert len({fingerprint for _, fingerprint, _, _ in seen}) == 1
    with torch.inference_mode():
        cache = model(torch.tensor([windows[1]]), use_cache=True).past_key_values
    for layer in (0, 1):
        torch.testing.assert_close(seen[2 + layer][3], cache.layers[layer].keys, rtol=1e-4, atol=1e-5)


def test_a_model_under_calibration_does_not_decode(model_folder):
    model = load_model(resolve(str(model_folder)), device="cpu")

    class Blind:
        def observe(self, layer, query, kv):
            pass

    with torch.inference_mode(), sparsify(model, Watcher(Blind())):  # pyright: ignore[reportArgumentType]
        cache = compat.cache_of(model(torch.tensor([[1]]), use_cache=True))
        with pytest.raises(RuntimeError, match="calibration"):
            model(torch.tensor([[1]]), **{compat.CACHE_ARGUMENT: cache})
