"""Long continuations: perplexity by position, and a shadow that walks along a selector's own choices."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparsesel import InputError, make_config, sparsify
from sparsesel.config import LayeredConfig
from sparsesel.eval import run
from sparsesel.eval.decode import Prefill
from sparsesel.eval.tasks.perplexity import score
from sparsesel.eval.tasks.stability import Stability, StabilityConfig, autoregressive, teacher_forced
from sparsesel.hf import compat
from sparsesel.registry import registry

STEPS, BIN = 22, 8
EXACT, REUSING = "exact_topk,topk=8", "retopk,topk=8,similarity_threshold=0.3"


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 400, (120,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def prefill(model, tokens):
    return Prefill(model, tokens[: -STEPS - 1], {spec: spec for spec in (EXACT, REUSING, "full")})


def test_bins_add_up_to_the_perplexity_of_the_task_perplexity(prefill, tokens):
    rest = tokens[-STEPS - 1 :]
    found, expected = teacher_forced(prefill, REUSING, rest, BIN), score(prefill, REUSING, rest)
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-6)
    assert found["exact_share"] == expected["exact_share"]
    assert found["tokens_by_position"] == [8, 8, 6]
    assert math.fsum(found["nll_by_position"]) == pytest.approx(found["nll"])
    # The first bin is what a shorter text would have given.
    assert found["nll_by_position"][0] == pytest.approx(score(prefill, REUSING, rest[: BIN + 1])["nll"], rel=1e-6)


def decoded(model, tokens, spec, chosen=()):
    """Tokens consumed, given or greedily chosen, and the logits after each, from a session of its own."""
    consumed, logits = [tokens[-STEPS - 1]], []
    with torch.inference_mode(), sparsify(model, spec):
        cache = compat.cache_of(model(tokens[None, : -STEPS - 1], use_cache=True))
        for step in range(STEPS):
            output = model(consumed[-1].view(1, 1), **{compat.CACHE_ARGUMENT: cache})
            logits.append(output.logits[0, -1].double())
            consumed.append(chosen[step + 1] if chosen else logits[-1].argmax())
    return consumed, logits


def test_the_shadow_consumes_what_the_selector_chose(model, tokens, prefill):
    found = autoregressive(prefill, REUSING, EXACT, tokens[-STEPS - 1], STEPS, BIN)
    chosen, own = decoded(model, tokens, REUSING)
    _, exact = decoded(model, tokens, EXACT, chosen)
    distances, same = [], []
    for one, other in zip(exact, own, strict=True):
        p, q = one.softmax(-1), other.softmax(-1)
        distances.append(float((p * (p / q).log()).sum()))
        same.append(float(one.argmax() == other.argmax()))
    assert found["kl"] == pytest.approx(sum(distances) / STEPS, rel=1e-3)
    assert found["kl"] > 1e-4
    assert found["kl_by_position"][0] == pytest.approx(sum(distances[:BIN]) / BIN, rel=1e-3)
    assert found["agreement"] == pytest.approx(sum(same) / STEPS)
    assert len(found["agreement_by_position"]) == 3


def test_a_selector_is_its_own_shadow(prefill, tokens):
    found = autoregressive(prefill, "full", "full", tokens[-STEPS - 1], STEPS, BIN)
    assert found["kl"] == pytest.approx(0, abs=1e-9)
    assert found["agreement"] == 1.0


def chosen(given, **fields):
    return Stability(StabilityConfig(**fields)).selectors(given)


def test_variants_and_exact_references():
    given = {"full": make_config("full"), "retopk": make_config("retopk", topk=9), "quest": make_config("quest")}
    found = chosen(given)
    assert list(found) == [
        "exact_topk,topk=9",
        "exact_topk,topk=512",
        "full",
        *(f"retopk,refresh_interval={value}" for value in (0, 32, 128, 512)),
        "quest",
    ]
    assert found["retopk,refresh_interval=32"] == make_config("retopk", topk=9, refresh_interval=32)
    assert found["exact_topk,topk=9"] == make_config("exact_topk", topk=9)


def test_what_is_there_is_not_made_again():
    given = {"mine": make_config("exact_topk", topk=8), "other": make_config("retopk", topk=8, refresh_interval=3)}
    given["again"] = make_config("retopk", topk=8)
    assert list(chosen(given, values=(3, 4))) == ["mine", "other,refresh_interval=3", "other,refresh_interval=4"]


def test_without_a_field_each_is_measured_once():
    given = {"retopk": make_config("retopk"), "exact_topk": make_config("exact_topk")}
    assert chosen(given, field="") == given
    layered = {
        "file": LayeredConfig(layers={"0-": make_config("retopk", topk=512)}),
        "exact": make_config("exact_topk"),
    }
    assert chosen(layered) == layered


def test_any_field_can_be_varied():
    found = chosen({"retopk,topk=8": make_config("retopk", topk=8)}, field="topk", values=(4, "5%"))
    assert list(found) == ["exact_topk,topk=4", "exact_topk,topk=5%", "retopk,topk=4", "retopk,topk=5%"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"field": "refresh_intervall"}, "Did you mean 'refresh_interval'"),
        ({"values": (-1,)}, "refresh_interval"),
    ],
)
def test_what_no_selector_takes_is_refused(fields, error):
    with pytest.raises(InputError, match=error):
        chosen({"retopk": make_config("retopk")}, **fields)


@pytest.mark.parametrize(
    ("fields", "error"), [({"steps": 118}, "at most 117"), ({"bin_size": 0}, "bin_size"), ({"values": ()}, "values")]
)
def test_a_task_that_makes_no_sense_is_refused(model_folder, text_file, fields, error):
    with pytest.raises(InputError, match=error):
        run("stability", str(model_folder), ["retopk"], contexts=[120], texts=[str(text_file)], **fields)


def test_a_list_as_one_value_is_refused_with_how_to_give_several():
    with pytest.raises(InputError, match="repeat the option: --values 0 --values 16") as error:
        registry().make_task_config("stability", {"values": [[0, 16]]})
    assert "sparsesel show stability" in error.value.remedy
    with pytest.raises(InputError, match="repeat the option: --variants single --variants multikey"):
        registry().make_task_config("niah", {"variants": ["single, multikey"]})
    with pytest.raises(InputError) as error:
        registry().make_task_config("stability", {"values": [None]})
    assert "repeat" not in error.value.remedy


def test_a_run_reports(model_folder, text_file):
    results = run(
        "stability",
        str(model_folder),
        ["full", "retopk,similarity_threshold=0.3", "streaming_llm,sink_size=2"],
        contexts=[80],
        set={"topk": 8},
        texts=[str(text_file)],
        steps=STEPS,
        bin_size=BIN,
        documents=2,
        values=[0, 5],
    )
    by_name = {line["selector"]: line["metrics"] for line in results.lines}
    assert list(by_name) == [
        "exact_topk,topk=8",
        "full",
        *(f"retopk,similarity_threshold=0.3,refresh_interval={value}" for value in (0, 5)),
        "streaming_llm,sink_size=2",
    ]
    assert by_name["exact_topk,topk=8"]["shadow"] is None
    assert {metrics["shadow"] for name, metrics in by_name.items() if "exact" not in name} == {"exact_topk,topk=8"}
    assert by_name["retopk,similarity_threshold=0.3,refresh_interval=5"]["refresh_share"] > 0
    assert by_name["retopk,similarity_threshold=0.3,refresh_interval=0"]["refresh_share"] == 0
    (section,) = results.report()
    table, _ = section.tables
    assert list(table.rows)[:2] == ["full", "exact_topk,topk=8"]
    change = dict(zip(table.rows, table.columns[1].values, strict=True))
    assert change["exact_topk,topk=8"] == 0
    exact, other = (
        sum(line["metrics"]["nll"] for line in results.lines if line["selector"] == name)
        for name in ("exact_topk,topk=8", "streaming_llm,sink_size=2")
    )
    assert change["streaming_llm,sink_size=2"] == pytest.approx(math.expm1((other - exact) / 2 / STEPS))
    by_bin, running, kl, agreement = section.figures
    for figure in section.figures:
        assert [series.name for series in figure.series] == [name for name in table.rows if "exact" not in name]
        assert all(list(series.x) == [8, 16, 22] and len(series.y) == 3 for series in figure.series)
    last = {series.name: series.y[-1] for series in running.series}
    assert last["streaming_llm,sink_size=2"] == pytest.approx(change["streaming_llm,sink_size=2"])
    assert by_bin.series[0].y[0] == running.series[0].y[0]
    assert all(value >= 0 for series in kl.series for value in series.y)
    assert all(0 <= value <= 1 for series in agreement.series for value in series.y)
    assert Stability.report([]) == []
