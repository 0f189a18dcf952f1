"""What a step would launch, found without a device: kernels, memory, and the reason where there are none."""

import pytest
import torch

from sparsesel import LayerSpec, make_selector
from sparsesel.errors import InputError
from sparsesel.explain import SHORTEST, Phase, explain, meta_view, trace
from sparsesel.ops import dense_attention
from sparsesel.registry import registry
from sparsesel.rotary import Rotary

OURS = [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]


def layer(heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, batch=1):
    rotary = Rotary(torch.empty(dim // 2, device="meta"))
    return LayerSpec(8, heads, kv_heads, dim, dtype, torch.device("cpu"), batch, rotary=rotary)


class Custom:
    """A selector whose step is any function of query and view."""

    def __init__(self, step):
        self.step = step
        self.full = make_selector("full")
        self.config, self.init_state, self.cost = self.full.config, self.full.init_state, self.full.cost

    def observe_prefill(self, query, kv, state, *, scale):
        pass

    def attend(self, query, kv, state, *, scale):
        return self.step(query, kv)


def names(launches):
    return [launch.kernel.partition(":")[2] for launch in launches]


def test_full_is_two_kernels_and_their_scratch():
    found = trace(make_selector("full"), layer(batch=3), 10_000)
    assert found.prefill.launches == []
    assert names(found.first.launches) == names(found.step.launches) == ["dense_attention_kernel", "combine_kernel"]
    attention, combine = found.step.launches
    splits = attention.grid[0]
    assert attention.grid == (splits, 2, 3)
    assert combine.grid[0] == 3 * 8
    # Partial results and their log-sum-exp in float32, the output in bfloat16; beside them a few counters.
    scratch = 3 * 8 * (splits * (64 + 2) * 4 + 64 * 2)
    assert scratch <= found.step.workspace <= scratch + 4096
    assert found.state.nbytes() == 0


@pytest.mark.parametrize(
    "changes", [{}, {"page_size": 16}, {"left_padded": True}, {"page_size": 4, "left_padded": True}]
)
def test_the_cache_is_as_asked_for(changes):
    (attention, _) = trace(make_selector("full"), layer(), 100, **changes).step.launches
    constants = dict(attention.constants)
    assert constants["PAGE"] == changes.get("page_size", 0)
    assert ("p_starts" in constants) == (not changes.get("left_padded", False))
    assert ("p_table" in constants) == ("page_size" not in changes)


@pytest.mark.parametrize("length", [SHORTEST, 4, 17])
def test_short_contexts(length):
    assert names(trace(make_selector("exact_topk,topk=8"), layer(), length).step.launches)


def test_steps_in_two_parts_launch_what_each_part_does():
    found = trace(make_selector("full"), layer(), 300, fused=False)
    assert names(found.step.launches) == ["dense_attention_kernel", "combine_kernel"]


def test_work_of_pytorch_is_counted():
    def step(query, kv):
        view = query.view(-1)[3:].unsqueeze(0)  # nothing is done
        scratch = torch.empty(1000, dtype=torch.float32, device=query.device)  # memory, but nothing is done
        scratch.fill_(1.0)
        twice = view + view
        return twice.sum()

    found = trace(Custom(step), layer(), 10)
    assert found.first == found.step == Phase([], torch_ops=3, workspace=4000 + 2 * (8 * 64 - 3) + 2)
    assert found.prefill == Phase([], torch_ops=0, workspace=0)


def test_work_is_told_of_each_phase():
    """What catches up on the prompt is the first step's; what later steps take is theirs alone."""
    found = trace(make_selector("retopk"), layer(), 4096)
    assert found.prefill.launches == []
    assert found.prefill.torch_ops > 0  # queries of the prompt are kept
    assert found.first.torch_ops > found.step.torch_ops == 0
    assert found.first.workspace > 10 * found.step.workspace


def test_work_of_a_prompt_is_counted():
    class Doubling(Custom):
        def observe_prefill(self, query, kv, state, *, scale):
            query + query

    found = trace(Doubling(lambda query, kv: query), layer(), 10)
    assert found.prefill == Phase([], torch_ops=1, workspace=8 * 8 * 64 * 2)
    assert found.first == found.step == Phase([], torch_ops=0, workspace=0)


def test_room_made_in_the_state_is_no_workspace():
    """Of 131072 tokens: where a state that grows by parts has to grow in the very step that is looked at."""
    found = trace(make_selector("sparq"), layer(), 131072)
    copies_of_keys = found.state.nbytes()
    assert copies_of_keys >= 2 * 131072 * 64 * 2
    assert found.step.workspace < copies_of_keys


@pytest.mark.parametrize("name", OURS)
def test_every_selector_has_its_steps_told(name):
    found = explain(make_selector(name), layer(), 700, device="cuda")
    assert found.backend == "triton"
    if found.trace is None:
        assert "looks at the content of tensors" in found.remark
        assert name == "loki"  # it learns its components from the prompt at the first step
        return
    assert names(found.trace.step.launches)


def test_a_group_too_large_is_refused_with_the_reason():
    found = explain(make_selector("full"), layer(heads=17, kv_heads=1), 100)
    assert (found.trace, found.remark) == (None, "")
    assert "at most 16 query heads" in found.refused
    assert found.why.endswith("but it refuses this layer")
    served = explain(make_selector("full"), layer(heads=16, kv_heads=1), 100)
    assert served.trace is not None
    assert served.refused is None
    assert "refuses" not in served.why


def test_on_a_cpu_there_are_no_kernels():
    found = explain(make_selector("retopk"), layer(), 1000, device="cpu")
    assert (found.backend, found.trace) == ("eager", None)
    assert "CUDA or ROCm" in found.why
    assert "no kernels" in found.remark
    assert found.cost == make_selector("retopk").cost(layer(), 1000)


def test_the_backend_asked_for_runs_or_is_refused(monkeypatch):
    found = explain(make_selector("full"), layer(), 100, name="eager")
    assert (found.backend, found.trace) == ("eager", None)
    assert found.why.startswith("asked for")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="backend triton on cpu"):
        explain(make_selector("full"), layer(), 100, name="triton", device="cpu")
    with pytest.raises(InputError, match="one of auto, triton, eager"):
        explain(make_selector("full"), layer(), 100, name="cublas")
    with pytest.raises(InputError, match="at least 3"):
        explain(make_selector("full"), layer(), SHORTEST - 1)


@pytest.mark.parametrize(
    "look",
    [
        lambda kv: int(kv.lengths.max()),
        lambda kv: kv.lengths.nonzero(),
        lambda kv: kv.lengths.tolist(),
        lambda kv: bool((kv.lengths > 3).any()),
        lambda kv: kv.lengths[kv.lengths > 3],
        lambda kv: kv.lengths.cpu(),
    ],
)
def test_a_step_that_waits_for_its_device_is_told(look):
    def step(query, kv):
        look(kv)
        return dense_attention(query, kv, scale=1.0)

    found = explain(Custom(step), layer(), 100)
    assert found.trace is None
    assert "looks at the content of tensors" in found.remark
    assert "\n" not in found.remark


def test_what_a_selector_is_made_of_is_told():
    ours = explain(Custom(lambda query, kv: dense_attention(query, kv, scale=1.0)), layer(), 100)
    assert "no kernels of its own" in ours.remark
    torch_only = explain(Custom(lambda query, kv: query * 2), layer(), 100)
    assert "PyTorch operations alone" in torch_only.remark
    assert explain(make_selector("retopk"), layer(), 100).remark == ""


def test_a_layer_that_a_selector_cannot_serve_is_refused():
    with pytest.raises(InputError, match="rank"):
        explain(make_selector("sparq,rank=65"), layer(), 100)


def test_a_view_without_content_has_the_shape_of_a_cache():
    view = meta_view(layer(batch=3), 33, 40, page_size=16)
    assert view.keys.shape == (9, 2, 16, 64)
    assert (view.batch_size, view.max_length, view.device.type) == (3, 33, "meta")
    assert meta_view(layer(), 33, 40).keys.stride(1) == 40 * 64


def test_a_grid_that_no_device_launches_is_refused():
    found = explain(make_selector("full"), layer(batch=70_000), 700, device="cuda")
    assert found.trace is None
    assert found.refused is not None
    assert "65535" in found.refused
    assert explain(make_selector("full"), layer(batch=65_535), 700, device="cuda").refused is None
