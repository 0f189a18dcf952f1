"""Dense attention as a selector: one step is the operation, which also counts it."""

import pytest
import torch

from sparsesel.explain import trace
from sparsesel.ops import backend
from sparsesel.registry import make_selector
from sparsesel.selector import LayerSpec
from sparsesel.testing.inputs import DenseLayout, PagedLayout, random_stream
from sparsesel.testing.replay import Replay
from sparsesel.testing.tolerances import assert_close_to_float64


@pytest.mark.parametrize("layout", [DenseLayout(), DenseLayout(static=True), PagedLayout()])
def test_a_step_attends_to_everything_and_counts_it(layout):
    stream = random_stream(0, lengths=[40, 17], head_dim=24)
    fused, eager = (Replay(make_selector("full"), stream, layout=layout).prefill(37) for _ in range(2))
    for _ in range(3):
        with backend.using("triton"):
            output = fused.attend()
        assert_close_to_float64(output, eager.step().expected_dense())
    counted, expected = (replay.state.counters.read() for replay in (fused, eager))
    assert counted.keys() == expected.keys()
    assert all(torch.equal(counted[name], expected[name]) for name in expected)


@pytest.mark.parametrize("page_size", [0, 16])
def test_two_launches_and_nothing_else(page_size):
    """No operation of PyTorch's but those that make a view of the cache."""
    layer = LayerSpec(0, 28, 4, 128, torch.bfloat16, torch.device("cpu"))
    found = trace(make_selector("full"), layer, 131072, page_size=page_size)
    for launches in (found.first.launches, found.step.launches):
        assert [launch.kernel.split(":")[1] for launch in launches] == ["dense_attention_kernel", "combine_kernel"]
    assert found.step.torch_ops == 0
