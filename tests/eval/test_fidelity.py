"""Each step beside exact and full attention: what is compared is right, and the model goes on as it would alone."""

import itertools
import os
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sparsesel import InputError, make_selector
from sparsesel.config import SelectorConfig
from sparsesel.eval import run
from sparsesel.eval.decode import Prefill
from sparsesel.eval.figures import Curves, HeatMap, Marks
from sparsesel.eval.shadow import Step, Watched, compare
from sparsesel.eval.tasks.fidelity import SIMILARITY_BINS, Fidelity, FidelityConfig, Record, runs
from sparsesel.eval.tasks.perplexity import score
from sparsesel.hf.inject import selectors_by_layer
from sparsesel.kv import KVView
from sparsesel.ops import sparse_attention
from sparsesel.registry import registry
from sparsesel.selector import SelectorState, Support, discover_and_aggregate

LAYERS, HEADS, SUFFIX = 2, 4, 40
MEASURES = ("recall", "retained_mass", "output_cosine", "relative_error", "distribution_cosine")


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 400, (150,), generator=torch.Generator().manual_seed(3))


def measured(model, tokens, selector, *, layer=1, head=0):
    record = Record(layer, head)
    watched = {i: Watched(one, record.take) for i, one in selectors_by_layer(model, selector).items()}
    prefill = Prefill(model, tokens[: -SUFFIX - 1], {"it": watched})
    known = score(prefill, "it", tokens[-SUFFIX - 1 :])
    return {**known, **record.metrics()}


def cosine(one, other):
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("topk", [7, None])
def test_a_step_against_plain_sums_in_float64(shared, topk):
    generator = torch.Generator().manual_seed(shared)
    query = 2 * torch.randn(1, 4, 1, 8, generator=generator)
    keys, values = (torch.randn(1, 2, 30, 8, generator=generator) for _ in range(2))
    chosen = torch.stack([torch.randperm(30, generator=generator)[:9].sort().values for _ in range(shared)])
    indices = chosen[None, :, None].int()
    if shared > 1:
        indices[:, -1, :, 5:] = -1
    kv = KVView.dense(keys, values)
    output = sparse_attention(query, kv, indices, scale=0.4)
    found = compare(Step(0, query, kv, Support.of(indices), output, {}, None, topk, 0.4))
    for head in range(4):
        q, k, v = (x.double().numpy() for x in (query[0, head, 0], keys[0, head // 2], values[0, head // 2]))
        mine = [int(i) for i in indices[0, head * shared // 4, 0] if i >= 0]
        weights = np.exp(k @ q * 0.4)
        weights /= weights.sum()
        best = sorted(range(30), key=lambda i: -weights[i])[: topk or len(mine)]
        alone = np.zeros(30)
        alone[mine] = weights[mine] / weights[mine].sum()
        expected = {
            "recall": len({*mine} & {*best}) / len(best),
            "retained_mass": weights[mine].sum(),
            "output_cosine": cosine(alone @ v, weights @ v),
            "relative_error": np.linalg.norm(alone @ v - weights @ v) / np.linalg.norm(weights @ v),
            "distribution_cosine": cosine(alone, weights),
        }
        for name, value in expected.items():
            assert float(getattr(found, name)[head]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("spec", ["full", "exact_topk,topk=150", "retopk,topk=150"])
def test_everything_is_full_attention(model, tokens, spec):
    metrics = measured(model, tokens, spec)
    for name in MEASURES:
        expected = 0.0 if name == "relative_error" else 1.0
        assert metrics[name] == pytest.approx(expected, abs=1e-5), name
    assert [span for [span] in metrics["support_map"]] == [[0, last] for last in range(109, 149)]


@pytest.mark.parametrize("spec", ["exact_topk,topk=8", "retopk,topk=8,similarity_threshold=1.5"])
def test_what_is_always_exact_misses_nothing(model, tokens, spec):
    metrics = measured(model, tokens, spec)
    assert metrics["recall"] == 1.0
    assert metrics["recall_map"] == [[1.0] * HEADS] * LAYERS
    assert metrics["exact_map"] == [[1.0] * HEADS] * LAYERS
    assert metrics["recall_reuse"] is None
    assert 0 < metrics["retained_mass"] < 1


@pytest.mark.parametrize("spec", ["retopk,topk=8,similarity_threshold=0.3", "quest,topk=32", "sparq,topk=16,rank=4"])
def test_the_model_goes_on_as_without_being_watched(model, tokens, spec):
    selector = make_selector(spec)
    alone = score(Prefill(model, tokens[: -SUFFIX - 1], {"it": selector}), "it", tokens[-SUFFIX - 1 :])
    metrics = measured(model, tokens, selector)
    for name, value in alone.items():
        if name != "ms_per_step":
            assert metrics[name] == (value if value is None else pytest.approx(value, rel=1e-5)), name


@pytest.fixture(scope="module")
def reusing(model, tokens):
    return measured(model, tokens, "retopk,topk=8,similarity_threshold=0.5", layer=0, head=3)


def test_paths_recur_in_the_maps(reusing):
    for path in ("exact", "reuse", "fallback", "refresh"):
        values = np.array(reusing[f"{path}_map"])
        assert values.shape == (LAYERS, HEADS)
        assert values.mean() == pytest.approx(reusing[f"{path}_share"])
    assert np.mean(reusing["recall_map"]) == pytest.approx(reusing["recall"])
    assert 0 < reusing["reuse_share"] < 1


def test_exact_pairs_and_reusing_ones_make_up_all(reusing):
    reuse = reusing["reuse_share"]
    assert reusing["recall"] == pytest.approx(reuse * reusing["recall_reuse"] + (1 - reuse))
    assert reusing["recall_reuse"] < 1


def test_bins_hold_every_pair_where_it_belongs(reusing):
    pairs = LAYERS * HEADS * SUFFIX
    edges, counts = reusing["similarity_bins"], reusing["reuse_by_similarity"]
    assert len(counts) == len(edges) - 1 == len(SIMILARITY_BINS) - 1
    assert sum(reusing["pairs_by_similarity"]) == pairs
    assert sum(counts) == pytest.approx(reusing["reuse_share"] * pairs)
    # The threshold is an edge: below it nothing reuses, from it on all but refreshed and underfull pairs.
    for (low, _), count, of in zip(itertools.pairwise(edges), counts, reusing["pairs_by_similarity"], strict=True):
        assert count == 0 if low < 0.5 else count <= of
    for name in MEASURES:
        values = reusing[f"{name}_by_similarity"]
        total = sum(value * count for value, count in zip(values, counts, strict=True) if count)
        assert total / sum(counts) == pytest.approx(reusing[f"{name}_reuse"])
        assert [value is None for value in values] == [not count for count in counts]


def test_similarity_is_what_decides_the_path(model, tokens):
    """Of pairs that fell back ρmax was below the threshold, of those that reused it was not."""
    steps: list[Step] = []
    spec = "retopk,topk=8,similarity_threshold=0.6"
    watched = {i: Watched(one, steps.append) for i, one in selectors_by_layer(model, spec).items()}
    score(Prefill(model, tokens[: -SUFFIX - 1], {"it": watched}), "it", tokens[-SUFFIX - 1 :])
    assert len(steps) == LAYERS * SUFFIX
    seen = set()
    for step in steps:
        assert step.similarity is not None
        for path, near in (("fallback", False), ("reuse", True)):
            taken = step.counted[path] > 0
            seen.add((path, bool(taken.any())))
            assert ((step.similarity[taken] >= 0.6) == near).all()
    assert {("fallback", True), ("reuse", True)} <= seen


class Latest:
    """A third party's: one set for all heads, no budget by a known name, only what the protocol asks for."""

    class Config(SelectorConfig):
        name: str = "latest"

    config = Config()

    def init_state(self, layer):
        return SelectorState(layer)

    def observe_prefill(self, query, kv, state, *, scale):
        pass

    def discover(self, query, kv, state, *, scale):
        last = torch.arange(kv.max_length - 16, kv.max_length, dtype=torch.int32)
        support = Support.of(last[None, None, None])
        state.counters.add_step(support, kv, query.shape[1])
        return support

    def aggregate(self, query, kv, support, state, *, scale):
        return sparse_attention(query, kv, support.indices, scale=scale)

    def attend(self, query, kv, state, *, scale):
        return discover_and_aggregate(self, query, kv, state, scale=scale)

    def cost(self, layer, length):
        raise NotImplementedError


def test_a_selector_with_the_protocol_alone(model, tokens):
    metrics = measured(model, tokens, Latest())
    assert 0 < metrics["recall"] < 1
    assert metrics["recall_reuse"] is None
    assert "similarity_bins" not in metrics
    assert metrics["support_map"] == [[[last - 15, last]] for last in range(109, 149)]


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_positions(positions):
    spans = runs(sorted(positions))
    assert {at for first, last in spans for at in range(first, last + 1)} == positions
    assert all(after[0] - before[1] > 1 for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("fields", [{"layer": 2}, {"head": 4}])
def test_a_support_map_of_what_is_not_there_is_refused(fields):
    shape = types.SimpleNamespace(num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    setting = types.SimpleNamespace(contexts=(64,), texts=[None], model_config=shape, seed=0, tokenizer=None)
    with pytest.raises(InputError, match=next(iter(fields))):
        Fidelity(FidelityConfig(suffix=8, **fields)).points(setting)


def test_a_run_reports(model_folder, text_file):
    specs = ["full", "exact_topk", "retopk,similarity_threshold=0.5", "streaming_llm,sink_size=2"]
    results = run(
        "fidelity",
        str(model_folder),
        specs,
        contexts=[96],
        set={"topk": 8},
        texts=[str(text_file)],
        suffix=16,
        documents=2,
    )
    assert len(results) == 8
    for line in results.lines:
        assert line["provenance"]["parameters"]["layer"] == 1
        assert "ms_per_step" not in line["metrics"]
    (section,) = results.report()
    everything, reuse, _ = section.tables
    assert list(everything.rows) == specs
    assert list(reuse.rows) == ["retopk,similarity_threshold=0.5"]
    recall = dict(zip(everything.rows, everything.columns[0].values, strict=True))
    assert recall["full"] == recall["exact_topk"] == 1.0
    assert 0 < recall["streaming_llm,sink_size=2"] < recall["retopk,similarity_threshold=0.5"] < 1
    titles = [figure.title for figure in section.figures]
    assert len(titles) == len(set(titles))
    kinds = [type(figure) for figure in section.figures]
    assert (kinds.count(Curves), kinds.count(HeatMap), kinds.count(Marks)) == (5, 6, 3)
    marks = next(figure for figure in section.figures if isinstance(figure, Marks) and "streaming" in figure.title)
    ((_, points),) = marks.groups
    assert {x for x, y in points if y == 0} == {0, 1, *range(74, 80)}


SMALL = {
    "quest": "quest,dense_layers=0,page_size=4",
    "sparq": "sparq,rank=4,local_size=2",
    "loki": "loki,rank=4",
    "streaming_llm": "streaming_llm,sink_size=2",
    "tokenselect": "tokenselect,sink_size=2,local_size=2",
    "retopk": "retopk,similarity_threshold=0.5",
}


@pytest.fixture(scope="module")
def fidelity_of(model_folder, text_file):
    def measure(specs, **options):
        common = {"contexts": [64], "set": {"topk": 8}, "texts": [str(text_file)], **options}
        results = run("fidelity", str(model_folder), specs, **common)
        return {result.selector: result.metrics for result in results}

    return measure


def test_every_selector_can_be_compared(fidelity_of):
    specs = [SMALL.get(name, name) for name, found in registry().selectors.items() if found.distribution == "sparsesel"]
    found = fidelity_of(specs, suffix=6)
    assert len(found) >= 8
    for spec, metrics in found.items():
        assert 0 < metrics["recall"] <= 1, spec
        assert metrics["density"] == 1 or metrics["retained_mass"] < 1, spec


def test_backends_agree(fidelity_of):
    eager, triton = (
        fidelity_of([SMALL["retopk"]], suffix=2, contexts=[32], backend=name) for name in ("eager", "triton")
    )
    for metrics, same in zip(eager.values(), triton.values(), strict=True):
        for name in (*MEASURES, "reuse_by_similarity", "support_map", "reuse_map"):
            assert same[name] == (pytest.approx(metrics[name], abs=1e-5) if name in MEASURES else metrics[name])


def test_without_lines_there_is_nothing_to_report():
    assert Fidelity.report([]) == []


@pytest.mark.model
@pytest.mark.skipif("SPARSESEL_BOOKS" not in os.environ, reason="SPARSESEL_BOOKS names no folder with emma.txt")
def test_the_first_chapter_of_emma():
    book = os.path.join(os.environ["SPARSESEL_BOOKS"], "emma.txt")
    common = {"contexts": [2048], "texts": [book], "skip_chars": 3000, "suffix": 256}
    (result,) = run("fidelity", "smollm2-135m", ["retopk,topk=128"], **common)
    # Means over all pairs, those of exact paths among them.
    figures = {"recall": 0.860, "retained_mass": 0.895, "output_cosine": 0.989, "exact_share": 0.283}
    for name, expected in figures.items():
        assert result.metrics[name] == pytest.approx(expected, abs=0.005), name
