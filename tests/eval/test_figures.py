"""The offline model's figures."""

import os
from pathlib import Path

import pytest
import torch

from sparsesel import make_selector
from sparsesel.eval.decode import Prefill
from sparsesel.eval.tasks.perplexity import score
from sparsesel.eval.texts import cut_windows, default_text, load_texts
from sparsesel.hf.models import load_model, load_tokenizer, resolve

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2():
    source = resolve("smollm2-135m")
    return load_model(source, device="cpu"), load_tokenizer(source)


def test_decode_true_equals_teacher_forcing_where_nothing_is_left_out(smollm2):
    model, tokenizer = smollm2
    (window,) = cut_windows([default_text()], tokenizer, size=512, documents=1)
    tokens = torch.tensor(window.tokens)
    with torch.inference_mode():
        scores = model(tokens[None]).logits[0].double().log_softmax(-1)
    expected = -scores[-33:-1].gather(1, tokens[-32:, None]).sum().item()
    prefill = Prefill(model, tokens[:-33], {spec: make_selector(spec) for spec in ("full", "retopk,topk=512")})
    for spec in ("full", "retopk,topk=512"):
        assert score(prefill, spec, tokens[-33:])["nll"] == pytest.approx(expected, rel=1e-5)


# From characters 3000 on, 2048 tokens of which the last 256 are scored, K=128, float32.
FIGURES = {
    "full": {"perplexity": (24.107, 0.003)},
    "exact_topk,topk=128": {"perplexity": (25.298, 0.003), "exact_share": (1.0, 0.0)},
    "retopk,topk=128": {
        "perplexity": (26.405, 0.003),
        "exact_share": (0.283, 0.005 / 0.283),
        "candidates": (203.0, 3 / 203),
    },
    "retopk:quality,topk=128": {"perplexity": (25.779, 0.003), "exact_share": (0.564, 0.005 / 0.564)},
}


@pytest.mark.skipif("SPARSESEL_BOOKS" not in os.environ, reason="SPARSESEL_BOOKS names no folder with emma.txt")
def test_the_first_chapter_of_emma(smollm2):
    model, tokenizer = smollm2
    texts = load_texts([str(Path(os.environ["SPARSESEL_BOOKS"]) / "emma.txt")], 3000)
    (window,) = cut_windows(texts, tokenizer, size=2048, documents=1)
    tokens = torch.tensor(window.tokens)
    prefill = Prefill(model, tokens[:-257], {spec: make_selector(spec) for spec in FIGURES})
    for spec, figures in FIGURES.items():
        metrics = score(prefill, spec, tokens[-257:])
        for name, (expected, tolerance) in figures.items():
            assert metrics[name] == pytest.approx(expected, rel=tolerance), (spec, name)
