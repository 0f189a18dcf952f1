"""Overlap of supports by similarity of queries: as counted by hand, without any selector being named."""

import itertools
import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sparsesel import InputError
from sparsesel.cli.app import app
from sparsesel.eval import run
from sparsesel.eval.binning import bin_means, bin_sums, pooled
from sparsesel.eval.figures import Curves, HeatMap
from sparsesel.eval.results import read_results
from sparsesel.eval.tasks.reuse_study import MAX_RECALL, ReuseStudy, ReuseStudyConfig, compare_queries, summary

SUFFIX, CACHE, TOPK = 30, 20, 6


def heads(seed, steps=26, topk=5, total=40):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(steps, 4, generator=generator)
    supports = torch.stack([torch.randperm(total, generator=generator)[:topk].sort().values for _ in range(steps)])
    return queries, supports.int()


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.dist(one, [0] * 4) / math.dist(other, [0] * 4)


@given(st.integers(0, 2**20))
@settings(max_examples=8, deadline=None)
def test_pairs_as_counted_by_hand(seed):
    queries, supports = heads(seed)
    pairs = compare_queries(queries, supports, CACHE)
    rows, sets = queries.double().tolist(), [set(row) for row in supports.tolist()]
    for i, j in itertools.combinations(range(len(rows)), 2):
        assert float(pairs.cosine[i, j]) == pytest.approx(cosine(rows[i], rows[j]))
        assert float(pairs.overlap[i, j]) == pytest.approx(len(sets[i] & sets[j]) / 5)
    for place, step in enumerate(range(CACHE, len(rows))):
        latest = list(range(step - 1, step - CACHE - 1, -1))
        similar = sorted(latest, key=lambda other: -cosine(rows[step], rows[other]))
        assert int(pairs.best[place]) == similar[0]
        for order, found in ((similar, pairs.coverage), (latest, pairs.recent)):
            for recalled in range(1, MAX_RECALL + 1):
                union = set().union(*(sets[other] for other in order[:recalled]))
                assert float(found[place, recalled - 1]) == pytest.approx(len(union & sets[step]) / 5)


def test_the_same_query_has_the_same_support():
    queries, supports = heads(0)
    queries, supports = queries[:1].repeat(26, 1), supports[:1].repeat(26, 1)
    found = summary({3: list(queries[:, None])}, {3: list(supports[:, None])}, CACHE)
    assert found["layers"] == [3]
    assert found["best_overlap"] == found["overlap"] == 1.0
    assert found["coverage"] == [1.0] * MAX_RECALL
    assert found["pairs_by_cosine"] == [0.0] * (len(found["pairs_by_cosine"]) - 1) + [26 * 25 / 2]


def test_bins_hold_their_lower_edge_and_what_rounding_takes_past_the_last():
    places = torch.tensor([-1.5, -1, 0, 0.5, 1, 1.5, math.nan, -math.inf])
    assert bin_sums(places, (-1.0, 0.0, 0.5, 1.0)) == [2, 1, 3]
    assert bin_sums(places, (-1.0, 0.0, 0.5, 1.0), torch.arange(8.0)) == [1, 2, 12]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=2, max_size=4))
def test_pooled_means_are_those_of_everything(documents):
    sums, counts = [[sum(values), 0] for values in documents], [[len(values), 0] for values in documents]
    means = pooled([bin_means(*pair) for pair in zip(sums, counts, strict=True)], counts)
    everything = [value for values in documents for value in values]
    assert means == [pytest.approx(sum(everything) / len(everything)), None]


@pytest.fixture(scope="module")
def results(model_folder, text_file):
    return run(
        "reuse-study",
        str(model_folder),
        contexts=[100],
        texts=[str(text_file)],
        suffix=SUFFIX,
        documents=2,
        topk=TOPK,
        cache_size=CACHE,
    )


def test_supports_are_those_of_dense_attention(results, model_folder, text_file):
    """All pairs again, from the keys and queries of one dense forward."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from sparsesel.eval.runner import load_tokenizer
    from sparsesel.hf.models import resolve

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = load_tokenizer(resolve(str(model_folder)))
    tokens = torch.tensor(tokenizer(text_file.read_text(encoding="utf-8"))["input_ids"][:100])
    queries: dict[int, list[torch.Tensor]] = {}
    supports: dict[int, list[torch.Tensor]] = {}

    def keep(layer):
        def hook(module, args, kwargs, output):
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            q = module.q_proj(hidden).view(1, -1, 4, 8).transpose(1, 2)
            k = module.k_proj(hidden).view(1, -1, 2, 8).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            scores = q[0] @ k[0].repeat_interleave(2, 0).transpose(1, 2)
            for step in range(100 - SUFFIX - 1, 99):
                queries.setdefault(layer, []).append(q[0, :, step])
                supports.setdefault(layer, []).append(scores[:, step, : step + 1].topk(TOPK).indices)

        return hook

    for layer, block in enumerate(model.model.layers):
        block.self_attn.register_forward_hook(keep(layer), with_kwargs=True)
    with torch.inference_mode():
        model(tokens[None])
    expected = summary(queries, supports, CACHE)
    metrics = results.lines[0]["metrics"]
    assert sum(metrics["pairs_by_cosine"]) == 2 * 4 * SUFFIX * (SUFFIX - 1) / 2
    for name in ("overlap", "best_overlap", "best_cosine", "coverage", "coverage_recent", "best_overlap_map"):
        torch.testing.assert_close(torch.tensor(metrics[name]), torch.tensor(expected[name]), atol=2e-3, rtol=0)


def test_it_reports(results):
    assert [line["selector"] for line in results.lines] == ["full", "full"]
    for line in results.lines:
        metrics = line["metrics"]
        assert metrics["coverage"] == sorted(metrics["coverage"])
        assert metrics["coverage"][0] == pytest.approx(metrics["best_overlap"])
    (section,) = results.report()
    by_cosine, by_recalled = section.tables
    assert by_cosine.columns[0].values[-1] == 2 * 2 * 4 * SUFFIX * (SUFFIX - 1) / 2
    assert len(by_recalled.rows) == MAX_RECALL
    titles = [figure.title for figure in section.figures]
    assert len(titles) == len(set(titles))
    assert [type(figure) for figure in section.figures] == [Curves, Curves, HeatMap, HeatMap]
    assert ReuseStudy.report([]) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"cache_size": 30}, "cache_size"), ({"topk": 69}, "topk"), ({"suffix": 98}, "suffix"), ({"documents": 0}, "doc")],
)
def test_what_could_say_nothing_is_refused(model_folder, text_file, fields, field):
    given = {"suffix": SUFFIX, "topk": TOPK, "cache_size": CACHE, **fields}
    with pytest.raises(InputError, match=field):
        run("reuse-study", str(model_folder), contexts=[100], texts=[str(text_file)], **given)


def test_parameters_say_what_a_support_is():
    setting = types.SimpleNamespace(contexts=(100,), texts=[None])
    task = ReuseStudy(ReuseStudyConfig(suffix=SUFFIX, topk=TOPK, cache_size=CACHE))
    assert task.parameters(setting, 100, 0).items() >= {"topk": TOPK, "cache_size": CACHE, "suffix": SUFFIX}.items()


@pytest.fixture
def command(model_folder, text_file, tmp_path):
    def invoke(task, *more):
        where = ["--model", str(model_folder), "--text", str(text_file), "--out", str(tmp_path / "o")]
        arguments = ["eval", task, *where, "--context", "60", "--suffix", "18", *more]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "150"})

    return invoke


def test_the_command_asks_for_no_selector(command, tmp_path):
    result = command("reuse-study", "--topk", "6", "--cache-size", "16")
    assert result.exit_code == 0, result.output
    assert "Overlap of exact supports" in result.stdout
    again = command("reuse-study", "--topk", "6", "--cache-size", "16")
    assert again.exit_code == 0, again.output
    assert len(read_results(tmp_path / "o")) == 1
    assert command("reuse-study", "--selector", "full").exit_code == 2
    missing = command("perplexity")
    assert missing.exit_code == 2
    assert "at least one selector" in missing.output


def test_a_grid_has_its_selectors_for_the_others(model_folder, text_file):
    tasks = {"perplexity": {"suffix": 18}, "reuse-study": {"suffix": 18, "topk": 6, "cache_size": 16}}
    results = run(tasks, str(model_folder), ["exact_topk,topk=6"], contexts=[60], texts=[str(text_file)])
    assert [(line["task"], line["selector"]) for line in results.lines] == [
        ("perplexity", "exact_topk,topk=6"),
        ("reuse-study", "full"),
    ]
