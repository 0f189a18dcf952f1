"""What is measured is the selector's own decoding, and one prefill serves several selectors."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparsesel import make_config, make_selector, sparsify
from sparsesel.eval.decode import MeasurementError, Prefill
from sparsesel.eval.tasks.perplexity import score
from sparsesel.hf import compat
from sparsesel_full.selector import FullSelector

SUFFIX = 48


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 400, (160,), generator=torch.Generator().manual_seed(3))


class Prefilled:
    """A document of which the last tokens are scored with each of several selectors."""

    def __init__(self, model, tokens, suffix, selectors, **options):
        self.prefill = Prefill(model, tokens[: -suffix - 1], dict(enumerate(selectors)), **options)
        self.scored = tokens[-suffix - 1 :]

    def decode(self, index):
        return score(self.prefill, index, self.scored)


def dense_nll(model, tokens, suffix):
    """NLL of the last tokens from one teacher-forced forward."""
    with torch.inference_mode():
        scores = model(tokens[None]).logits[0].double().log_softmax(-1)
    return -scores[-suffix - 1 : -1].gather(1, tokens[-suffix:, None]).sum().item()


@pytest.mark.parametrize("suffix", [1, SUFFIX, 157])
def test_full_gives_what_one_dense_forward_gives(model, tokens, suffix):
    metrics = Prefilled(model, tokens, suffix, [make_selector("full")]).decode(0)
    expected = dense_nll(model, tokens, suffix)
    assert metrics["nll"] == pytest.approx(expected, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected / suffix), rel=1e-5)
    assert metrics["tokens"] == suffix
    assert metrics["density"] == 1.0


@pytest.mark.parametrize("spec", ["exact_topk,topk=160", "retopk,topk=160"])
def test_a_budget_of_everything_is_full(model, tokens, spec):
    metrics = Prefilled(model, tokens, SUFFIX, [make_selector(spec)]).decode(0)
    assert metrics["nll"] == pytest.approx(dense_nll(model, tokens, SUFFIX), rel=1e-5)


def test_a_small_budget_is_not_full(model, tokens):
    metrics = Prefilled(model, tokens, SUFFIX, [make_selector("exact_topk,topk=4")]).decode(0)
    assert abs(metrics["nll"] - dense_nll(model, tokens, SUFFIX)) > 0.1
    assert metrics["attended"] == 4


def test_a_fork_of_a_shared_prefill_decodes_like_a_run_of_its_own(model, tokens):
    specs = ["retopk,topk=8,similarity_threshold=0.3", "full", "exact_topk,topk=8"]
    shared = Prefilled(model, tokens, SUFFIX, [make_selector(spec) for spec in specs])
    for index, spec in reversed(list(enumerate(specs))):
        metrics = shared.decode(index)
        first = len(tokens) - SUFFIX - 1
        nll = 0.0
        with torch.inference_mode(), sparsify(model, spec) as session:
            cache = compat.cache_of(model(tokens[None, :first], use_cache=True))
            for position in range(first, len(tokens) - 1):
                output = model(tokens[None, position : position + 1], **{compat.CACHE_ARGUMENT: cache})
                nll -= output.logits[0, -1].double().log_softmax(-1)[tokens[position + 1]].item()
            stats = session.stats()
        assert metrics["nll"] == pytest.approx(nll, rel=1e-6)
        assert metrics["density"] == stats.density
        if spec.startswith("retopk"):
            assert metrics["exact_share"] == stats.share("exact") < 1
            assert metrics["exact_share"] + metrics["reuse_share"] == pytest.approx(1)
            assert metrics["candidates"] == pytest.approx(stats.candidates)


def test_paths_that_a_selector_does_not_have_are_absent(model, tokens):
    metrics = Prefilled(model, tokens, SUFFIX, [make_selector("full")]).decode(0)
    assert metrics["reuse_share"] is None
    assert metrics["candidates"] is None


class Bystander(FullSelector):
    """Attends, but never says that it acted."""

    def attend(self, query, kv, state, *, scale):
        return query


def test_a_selector_that_never_acted_is_refused(model, tokens):
    prefilled = Prefilled(model, tokens, SUFFIX, [Bystander(make_config("full"))])
    with pytest.raises(MeasurementError, match="acted in 0 of 384"):
        prefilled.decode(0)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e6])  # 1e6: finite, but no float holds the perplexity
def test_a_likelihood_that_is_not_finite_is_refused(model_folder, tokens, factor):
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    model.lm_head.weight.data *= factor
    with pytest.raises(MeasurementError, match="no finite perplexity"):
        Prefilled(model, tokens, SUFFIX, [make_selector("full")]).decode(0)


def test_each_step_is_announced(model, tokens):
    steps, begun = [], []
    announced = {"advance": lambda: steps.append(1), "begin": begun.append}
    Prefilled(model, tokens, SUFFIX, [make_selector("full")], **announced).decode(0)
    assert len(steps) == SUFFIX
    assert begun == [0]


def test_a_decoder_can_be_made_again(model, tokens):
    """From where the prefill ended, with the state as it was then."""
    prefilled = Prefilled(model, tokens, SUFFIX, [make_selector("retopk,topk=8,similarity_threshold=0.3")])
    first, second = prefilled.decode(0), prefilled.decode(0)
    assert {**first, "ms_per_step": 0} == {**second, "ms_per_step": 0}


def test_greedy_steps_are_those_of_generate(model, tokens):
    with sparsify(model, "exact_topk,topk=8"), torch.inference_mode():
        expected = model.generate(tokens[None, :50], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 50:]
    prefill = Prefill(model, tokens[:49], {"exact": "exact_topk,topk=8"})
    chosen = [tokens[49]]
    with prefill.decoder("exact") as decoder:
        for _ in range(12):
            chosen.append(decoder.step(chosen[-1]).argmax())
        assert decoder.steps == 12
    # generate's first token is of the dense prefill, ours went through the selector.
    if chosen[1] == expected[0]:
        assert torch.stack(chosen[1:]).tolist() == expected.tolist()


def test_a_decoder_that_took_no_step_measured_nothing(model, tokens):
    with Prefill(model, tokens, {"full": "full"}).decoder("full") as decoder, pytest.raises(MeasurementError):
        decoder.metrics()
