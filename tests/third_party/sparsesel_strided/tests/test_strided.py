import pytest
from sparsesel_strided.config import StridedConfig
from sparsesel_strided.selector import StridedSelector

from sparsesel.ops.backend import using
from sparsesel.testing import Replay, assert_close_to_float64, random_stream
from sparsesel.testing.conformance import SelectorConformance


class TestStrided(SelectorConformance):
    selector = "strided"


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(
    ("topk", "stride", "length", "expected"),
    [
        (6, 10, 47, [20, 30, 40, 44, 45, 46]),
        (5, 10, 21, [0, 10, 18, 19, 20]),
        (6, 100, 20, [0, 15, 16, 17, 18, 19]),  # one multiple of 100, so newest ones fill up
        (6, 2, 4, [0, 1, 2, 3]),
    ],
)
def test_attends_to_the_newest_and_to_multiples_of_the_stride(topk, stride, length, expected, backend):
    selector = StridedSelector(StridedConfig(topk=topk, stride=stride))
    with using(backend):
        step = Replay(selector, random_stream(0, length=length)).skip(length - 1).step()
    assert_close_to_float64(step.output, step.expected())
    assert step.mask[0].nonzero()[:, 1].tolist() == expected * 4
