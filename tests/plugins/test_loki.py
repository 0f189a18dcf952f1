"""Loki against its plain-loop reference over random lives of a cache, its calibration files, and what a step costs."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sparsesel.config import resolve_topk
from sparsesel.errors import InputError
from sparsesel.registry import make_config, make_selector, registry
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import HOSTILE, LAYER_IDX, DenseLayout, PagedLayout, hostile_stream, random_stream
from sparsesel.testing.replay import Replay
from sparsesel_loki import reference
from sparsesel_loki.config import LokiConfig
from sparsesel_loki.header import read_header
from sparsesel_loki.state import LokiState

LAYER = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
HEAD_DIM = 6


def check_step(step, state, config, fitted):
    """A step against the loops, by the components in the state, which are checked by the variance they capture.

    Near a tie float32 may choose otherwise than float64, so what was chosen must be as good as what the loops chose;
    the output is held against the loops' output for the support that was chosen.
    """
    group = step.query.shape[1] // step.keys.shape[1]
    for row, length in enumerate(step.lengths.tolist()):
        topk = resolve_topk(config.topk, length)
        assert int(state.fitted[row]) == fitted[row]
        for head in range(step.query.shape[1]):
            kv_head = head // group
            query = step.query[row, head, 0].tolist()
            keys, values = (part[row, kv_head, :length].tolist() for part in (step.keys, step.values))
            support = step.mask[row, head].nonzero().flatten().tolist()
            if length <= topk:
                assert support == list(range(length))
            else:
                basis = state.basis[row, kv_head].tolist()
                if head % group == 0:
                    check_basis(basis, keys[: fitted[row]])
                check_choice(support, reference.merits(query, keys, basis), topk)
            expected = torch.tensor(reference.attend(query, keys, values, support, scale=step.scale)).double()
            if expected.isfinite().all():
                torch.testing.assert_close(step.output[row, head, 0].double(), expected, rtol=1e-4, atol=1e-5)


def check_choice(support, merit, topk):
    wanted = reference.support(merit, topk)
    assert len(support) == len(wanted)
    others = zip(sorted(set(support) - set(wanted)), sorted(set(wanted) - set(support)), strict=True)
    for taken, missed in others:
        assert merit[taken] == pytest.approx(merit[missed], rel=1e-4, abs=1e-4)


def check_basis(basis, keys):
    """Orthonormal, and capturing as much variance as any so many components can."""
    dim, rank = len(basis), len(basis[0])
    columns = [[basis[d][r] for d in range(dim)] for r in range(rank)]
    for a in range(rank):
        for b in range(rank):
            product = sum(x * y for x, y in zip(columns[a], columns[b], strict=True))
            assert product == pytest.approx(float(a == b), abs=1e-5)
    covariance = reference.covariance(keys)
    best = sum(reference.eigenvalues(covariance)[:rank])
    assert reference.variance_along(covariance, basis) == pytest.approx(best, rel=1e-5, abs=1e-5)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 9)),
        st.tuples(st.just("steps"), st.integers(1, 4)),
        st.tuples(st.just("attend"), st.integers(1, 3)),
        st.tuples(st.just("skip"), st.integers(1, 4)),
        st.tuples(st.just("crop"), st.integers(1, 20)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=7,
)


class Life:
    """A replay, and by how many keys each of its sequences should be calibrated."""

    def __init__(self, replay):
        self.replay = replay
        self.config = replay.selector.config
        self.fitted = [0] * replay.stream.batch_size

    def live(self, operation, argument):
        replay, rows = self.replay, self.replay.stream.batch_size
        match operation:
            case "steps" | "attend":
                for _ in range(argument):
                    self._fit(replay.length + 1)
                    if operation == "attend":
                        replay.attend()
                    else:
                        check_step(replay.step(), replay.state, self.config, self.fitted)
            case "crop":
                longest = 0 if replay.stream.starts is None else int(replay.stream.starts.max())
                replay.crop(min(argument, replay.length - longest - 1))
                replay.stream = replay.stream.diverging(replay.length, seed=argument + replay.length)
                lengths = replay.stream.lengths(replay.length).tolist()
                self.fitted = [n if n <= length else 0 for n, length in zip(self.fitted, lengths, strict=True)]
            case "reorder" | "select":
                index = (torch.arange(rows) + argument) % rows
                index = index if operation == "reorder" else index[: 1 + argument % rows]
                getattr(replay, operation)(index)
                self.fitted = [self.fitted[i] for i in index.tolist()]
            case "repeat" if rows < 3:
                replay.repeat(argument)
                self.fitted = [n for n in self.fitted for _ in range(argument)]
            case "reset":
                replay.state.reset()
                self.fitted = [0] * rows
            case "prefill" | "skip":
                getattr(replay, operation)(argument)

    def _fit(self, columns):
        """To all keys but the current one, at the first step with more keys than the budget."""
        for row, length in enumerate(self.replay.stream.lengths(columns).tolist()):
            if not self.fitted[row] and length > resolve_topk(self.config.topk, length):
                self.fitted[row] = length - 1


@given(
    topk=st.sampled_from([1, 3, 8, 13, "20%", "45%"]),
    rank=st.integers(1, HEAD_DIM),
    lengths=st.sampled_from([[120], [120, 120], [120, 117], [115, 120, 118]]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 10_000),
    paged=st.booleans(),
    prompt=st.sampled_from([6, 20]),
    operations=OPERATIONS,
)
def test_any_life_matches_the_loops(topk, rank, lengths, heads, seed, paged, prompt, operations):
    stream = random_stream(
        seed, lengths=lengths, head_dim=HEAD_DIM, num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    layout = PagedLayout(block_size=3, order="channel") if paged else DenseLayout()
    life = Life(Replay(make_selector("loki", topk=topk, rank=rank), stream, layout=layout).prefill(prompt))
    for operation, argument in [*operations, ("steps", 3)]:
        life.live(operation, argument)


@given(seed=st.integers(0, 1000), kind=st.sampled_from(HOSTILE), rank=st.sampled_from([1, 3, HEAD_DIM]))
def test_hostile_input_matches_the_loops(seed, kind, rank):
    stream = hostile_stream(random_stream(seed, lengths=[40, 31], head_dim=HEAD_DIM), kind)
    life = Life(Replay(make_selector("loki", topk=7, rank=rank), stream).prefill(32))
    if kind in ("huge keys", "clustered keys", "equal keys"):  # merits beyond the tolerances above, or all tied
        life.replay.steps(8)
    else:
        life.live("steps", 8)


def test_all_components_rank_as_exact_top_k_does():
    """A rotation by all D components changes no product."""
    stream = random_stream(3, batch=2, length=90)
    loki, exact = (
        Replay(make_selector(name, topk=11), stream).prefill(70).steps(20) for name in ("loki,rank=64", "exact_topk")
    )
    for one, other in zip(loki, exact, strict=True):
        assert torch.equal(one.mask, other.mask)


def test_few_components_are_enough_for_keys_that_have_few():
    stream = random_stream(4, length=120, head_dim=32)
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(32, 3, generator=generator)).Q
    offset = torch.randn(32, generator=generator)
    stream = dataclasses.replace(stream, key=stream.key[..., :3] @ plane.T + offset)
    loki, exact = (
        Replay(make_selector(name, topk=9), stream).prefill(100).steps(20) for name in ("loki,rank=3", "exact_topk")
    )
    for one, other in zip(loki, exact, strict=True):
        assert torch.equal(one.mask, other.mask)


def test_the_prompt_calibrates_once():
    """In the first step, whatever the chunks; the counter says so, and what follows changes nothing."""
    stream = random_stream(5, length=130)
    states = []
    for chunks in ([60], [20, 15, 25]):
        replay = Replay(make_selector("loki,topk=8,rank=16"), stream).prefill(*chunks)
        assert not replay.state.is_fitted
        replay.step()
        states.append(replay.state.basis)
        assert replay.state.fitted.tolist() == [60]
        replay.prefill(20).steps(20)
        assert torch.equal(replay.state.basis, states[-1])
        counters = replay.state.counters.read()
        assert torch.equal(counters["prompt_calibrated"], counters["steps"])
    assert torch.equal(*states)


def test_a_prompt_that_the_budget_covers_calibrates_when_it_no_longer_does():
    replay = Replay(make_selector("loki,topk=20,rank=16"), random_stream(6, length=40)).prefill(5)
    replay.steps(15)
    assert replay.state.fitted.tolist() == [0]
    assert not replay.state.counters.read()["prompt_calibrated"].any()
    replay.step()
    assert replay.state.fitted.tolist() == [20]


# Calibration files


def calibrated(path, stream, *, model="", layer_idx=LAYER_IDX, **provenance):
    """A calibration from the first 100 tokens of a stream."""
    calibrator = registry().make_calibrator("loki")
    spec = dataclasses.replace(stream.layer_spec(layer_idx), model=model)
    for first in range(0, 100, 25):
        kv = DenseLayout()(stream.key[:, :, : first + 25], stream.value[:, :, : first + 25], stream.starts)
        calibrator.observe(spec, stream.query[:, :, first : first + 25], kv)
    return calibrator.save(path, provenance)


@pytest.fixture
def stream():
    return random_stream(8, length=140)


@pytest.fixture
def file(tmp_path, stream):
    path = tmp_path / "calibration.safetensors"
    calibrated(path, stream, model="abc", text_sha256="123")
    return path


def test_a_file_of_the_prompts_keys_selects_as_the_prompt_does(file, stream):
    steps = [
        Replay(make_selector("loki,topk=9,rank=12", calibration=calibration), stream).prefill(100).steps(30)
        for calibration in ("prompt", str(file))
    ]
    for one, other in zip(*steps, strict=True):
        assert torch.equal(one.mask, other.mask)


def test_a_file_says_where_it_comes_from(tmp_path, stream):
    path = tmp_path / "calibration"
    summary = calibrated(path, stream, model="abc", text_sha256="123")
    assert "2 key-value heads, 64 components" in summary
    header = read_header(path)
    assert header["model_fingerprint"] == "abc"
    assert header["text_sha256"] == "123"
    assert json.loads(header["shapes"]) == {str(LAYER_IDX): [2, 64]}
    explained = json.loads(header["explained_variance"])
    assert list(explained) == ["8", "16", "32", "64"]
    assert explained["64"] == pytest.approx(1)
    assert sorted(explained.values()) == list(explained.values())
    tensors = load_file(path)
    assert tensors[f"layers.{LAYER_IDX}.variance"].shape == (2, 64)


def test_state_keeps_the_files_components(file, stream):
    replay = Replay(make_selector("loki,topk=9,rank=12", calibration=str(file)), stream).prefill(100)
    before = replay.state.basis.clone()
    replay.steps(3)
    replay.crop(80)
    replay.step()
    replay.state.reset()
    replay.step()
    assert torch.equal(replay.state.basis, before)
    assert "prompt_calibrated" not in replay.state.counters.read()


def test_a_calibrator_takes_what_is_new_and_no_padding(tmp_path):
    """Tokens shown in chunks count once each, a short sequence's padding never."""
    padded = random_stream(9, lengths=[100, 60])
    calibrated(tmp_path / "batch", padded)
    variance = load_file(tmp_path / "batch")[f"layers.{LAYER_IDX}.variance"]
    keys = torch.cat([padded.alone(row).key[0].double() for row in (0, 1)], dim=1)
    expected = torch.stack([torch.linalg.eigvalsh(torch.cov(k.T, correction=0)) for k in keys]).flip(-1)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5, atol=1e-6)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(path):
    path.write_bytes(path.read_bytes()[:20])


def _foreign(path):
    save_file({"weight": torch.ones(2, 2)}, path)


def _later_version(path):
    save_file(load_file(path), path, metadata={**read_header(path), "version": "99"})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_truncate, "truncated"),
        (_cut_header, "truncated"),
        (_foreign, "no calibration"),
        (_later_version, "format 99"),
        (lambda path: path.write_text("hello"), "not a safetensors file"),
        (lambda path: path.write_bytes(b""), "not a safetensors file"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: (path.unlink(), path.mkdir()), "a folder"),
    ],
)
def test_files_that_are_none_are_refused_with_the_configuration(file, spoil, complaint):
    spoil(file)
    with pytest.raises(InputError, match=complaint) as caught:
        make_config("loki", calibration=str(file))
    assert caught.value.field == "loki.calibration"
    assert "sparsesel calibrate loki" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "other"}, "this model"),
        ({"num_key_value_heads": 4}, r"shape \(4, 64, 64\)"),
        ({"head_dim": 32}, r"shape \(2, 32, 32\)"),
        ({"layer_idx": 3}, "layer 3.*layers 16"),
    ],
)
def test_a_file_of_something_else_is_refused(file, stream, changes, complaint):
    selector = make_selector("loki,rank=16", calibration=str(file))
    layer = dataclasses.replace(stream.layer_spec(), model="abc")
    selector.init_state(layer)
    with pytest.raises(InputError, match=complaint) as caught:
        selector.init_state(dataclasses.replace(layer, **changes))
    assert caught.value.field == "loki.calibration"
    assert "sparsesel calibrate loki" in caught.value.remedy


def test_a_damaged_file_is_refused(file, stream):
    tensors = load_file(file)
    tensors[f"layers.{LAYER_IDX}.basis"][0, 0] = math.nan
    save_file(tensors, file, metadata=read_header(file))
    with pytest.raises(InputError, match="damaged"):
        make_selector("loki,rank=16", calibration=str(file)).init_state(stream.layer_spec())


def test_a_file_that_was_replaced_is_read_again(file, stream):
    selector = make_selector("loki,rank=16", calibration=str(file))
    first = selector.init_state(stream.layer_spec()).basis
    calibrated(file, random_stream(80, length=140), model="abc", note="longer than before")
    assert not torch.equal(selector.init_state(stream.layer_spec()).basis, first)


def test_too_little_text_is_refused(tmp_path):
    calibrator = registry().make_calibrator("loki")
    with pytest.raises(InputError, match="got 0"):
        calibrator.save(tmp_path / "none", {})
    stream = random_stream(1, length=40)
    calibrator.observe(stream.layer_spec(), stream.query, DenseLayout()(stream.key, stream.value, None))
    with pytest.raises(InputError, match=r"at least 64 tokens.*got 40"):
        calibrator.save(tmp_path / "none", {})
    assert not list(tmp_path.iterdir())


# Costs and configuration


@pytest.mark.parametrize("group", [1, 3])
def test_a_step_reads_what_its_cost_says(gathered, group):
    """Bytes gathered in a step. The design counts keys and values of a group's heads once, as if their supports were
    one; eager attention gathers each head's own, G times as much."""
    stream = random_stream(2, batch=2, length=201, num_attention_heads=2 * group, num_key_value_heads=2)
    selector = make_selector("loki,topk=16,rank=8")
    replay = Replay(selector, stream).prefill(199)
    replay.step()
    gathered.clear()
    gathered.count(LokiState, "seen", "reduced")
    replay.attend()
    cost = selector.cost(stream.layer_spec(), 201)
    appended = 2 * 2 * 64 * 4  # the current token's key, taken into the state
    assert gathered == {
        "keys": group * cost.key_bytes + appended,
        "values": group * cost.value_bytes,
        "reduced": cost.metadata_bytes - replay.state.basis.numel() * 4,
    }


def test_costs_are_the_stated_fractions_of_dense_attention():
    """r/2D + K/L of dense attention at 128K: 0.254 for r = 64, 0.129 for r = 32."""
    length = 128 * 1024
    dense = make_selector("full").cost(LAYER, length).bytes_read
    for rank, fraction in ((64, 0.254), (32, 0.129)):
        cost = make_selector("loki:strict", rank=rank).cost(LAYER, length)
        assert (cost.key_bytes + cost.value_bytes + cost.metadata_bytes) / dense == pytest.approx(fraction, abs=1e-3)
        assert cost.attended == 512
        assert cost.state_bytes / dense == pytest.approx(rank / 256, abs=1e-3)
    assert make_selector("loki:paper").cost(LAYER, length).attended == length / 4


def test_state_is_what_its_cost_says():
    """But for room to grow: by half at most, and what rounding up takes."""
    stream = random_stream(3, batch=2, length=700)
    replay = Replay(make_selector("loki,rank=32"), stream).prefill(699)
    replay.step()
    stated = replay.selector.cost(stream.layer_spec(), 700).state_bytes
    assert stated <= replay.state.nbytes() <= 1.6 * stated


def test_presets_and_defaults():
    assert make_config("loki") == make_config("loki:strict") == LokiConfig(topk=512, rank=64, calibration="prompt")
    assert make_config("loki:paper") == LokiConfig(topk="25%", rank=32)


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("rank", 2.5), ("calibration", ""), ("topk", 0)])
def test_refused(field, value):
    with pytest.raises(InputError) as caught:
        make_config("loki", **{field: value})
    assert field in caught.value.field
    assert caught.value.remedy


def test_rank_is_held_against_the_layer():
    with pytest.raises(InputError, match=r"at most 128.*got 129"):
        make_selector("loki,rank=129").init_state(LAYER)
    make_selector("loki,rank=128").init_state(LAYER)


def test_who_is_not_calibrated_says_so():
    with pytest.raises(InputError, match=r"exact_topk.*calibrated are: loki"):
        registry().make_calibrator("exact_topk")
    with pytest.raises(InputError, match="Did you mean 'loki'"):
        registry().make_calibrator("lokki")
