"""Results as runs leave them, made up: eight selectors, two contexts, every kind of metric; hostile where names are."""

import json
import math
import random

import pytest

from sparsesel.eval import report

SELECTORS = {
    "full": {"name": "full"},
    "exact_topk,topk=128": {"name": "exact_topk", "topk": 128},
    "retopk,topk=128": {"name": "retopk", "topk": 128},
    "streaming_llm,sink_size=16,topk=128": {"name": "streaming_llm", "topk": 128},
    "quest,topk=128": {"name": "quest", "topk": 128},
    "sparq,topk=128": {"name": "sparq", "topk": 128},
    "loki,topk=128": {"name": "loki", "topk": 128},
    "tokenselect,topk=128": {"name": "tokenselect", "topk": 128},
}
NEEDLES = [name for name in SELECTORS if name.startswith(("full", "exact", "retopk", "quest"))]
CONTEXTS = (1024, 2048)
PROVENANCE = {
    "model": "tiny@sha256:" + "0123456789abcdef" * 4,
    "backend": "eager",
    "device": "cpu",
    "device_name": "x86_64, 2 threads",
    "dtype": "float32",
    "data_sha256": "d" * 64,
    "calibration_sha256": None,
    "bos_count": 0,
    "truncation": "none",
    "seed": 0,
    "selector_from": "sparsesel 0.1.0",
    "task_from": "sparsesel 0.1.0",
    "versions": {"sparsesel": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
    "commit": "c" * 40,
    "time": "2026-01-02T03:04:05+00:00",
}


def make_line(task, selector, context, document, metrics, parameters=None, **provenance):
    """A line as the harness writes it; `provenance` replaces what it says of where it came from."""
    place = SELECTORS.get(selector, {"name": selector})
    dense = 23e3 * context
    read = {"full": dense, "exact_topk": dense / 1.9, "streaming_llm": 4e6, "tokenselect": 6e6}
    counted = 1 + 0.5 * document if place["name"] == "retopk" else 1  # paths differ between documents
    return {
        "task": task,
        "selector": selector,
        "context": context,
        "document": document,
        "metrics": metrics,
        "config": place,
        "provenance": {
            **PROVENANCE,
            "parameters": {"text": "book.txt", "skip_chars": 0, **(parameters or {})},
            "prompt_sha256": f"{task}{context}{document}".encode().hex().ljust(64, "0"),
            "cost": {
                "layers": 4,
                "dense_layers": 2 if selector.startswith("quest") else 0,
                "attended": place.get("topk", context),
                "bytes_read": 1.0,
                "step_bytes": read.get(place["name"], dense / 8 + 1e5 * len(selector)) * counted,
                "state_bytes": 8e3 * context if place["name"] in ("retopk", "loki", "sparq") else 0,
                "full_bytes": dense,
                "exact_bytes": dense / 1.9,
            },
            **provenance,
        },
    }


def work(selector, context):
    attended = float(SELECTORS[selector].get("topk", context))
    return {"attended": attended, "density": attended / context, "ms_per_step": 4.5}


def make_lines():
    generator = random.Random(0)
    lines = []
    for context in CONTEXTS:
        for document in range(2):
            for place, selector in enumerate(SELECTORS):
                nll = 100 * (3 + 0.02 * place + 0.1 * document + 0.01 * generator.random())
                mix = {"exact_share": None, "reuse_share": None, "hit_share": None, "miss_share": None}
                if selector.startswith("retopk"):
                    mix |= {"exact_share": 0.25, "reuse_share": 0.75, "candidates": 200.0}
                if selector.startswith("tokenselect"):
                    mix |= {"hit_share": 0.9, "miss_share": 0.1}
                common = work(selector, context)
                perplexity = {"perplexity": math.exp(nll / 100), "nll": nll, "tokens": 100, **mix, **common}
                lines.append(make_line("perplexity", selector, context, document, perplexity, {"suffix": 100}))
        cells = [("single", "noise"), ("multikey", "prose"), ("multikey", "noise")]
        for document in range(4 * len(cells)):
            trial, cell = divmod(document, len(cells))
            variant, haystack = cells[cell]
            for place, selector in enumerate(NEEDLES):
                score = float(generator.random() > 0.1 * place)
                metrics = {"score": score, "tokens": 7, "answer": "It is <b>1234567</b>", **work(selector, context)}
                parameters = {"variant": variant, "haystack": haystack, "trial": trial, "depth": trial / 4}
                lines.append(make_line("niah", selector, context, document, metrics, parameters))
    return lines


def write_results(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (folder / "results.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def few_resamples():
    """Intervals are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_RESAMPLES", 20)
        yield


@pytest.fixture(scope="session")
def lines():
    return make_lines()


@pytest.fixture
def results(tmp_path, lines):
    return write_results(tmp_path / "results", lines)
