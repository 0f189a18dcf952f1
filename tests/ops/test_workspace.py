"""Scratch memory that is kept from step to step."""

import threading

import pytest
import torch

from sparsesel.ops import workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def released():
    workspace.release()
    yield
    workspace.release()


def wanted(count):
    return {"a": (torch.float32, (2, count)), "b": (torch.int32, (3,)), "c": (torch.float32, (count, 1, 2))}


def test_parts_do_not_overlap_and_are_aligned():
    parts = workspace.carve(CPU, 0, wanted(5))
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == wanted(5)
    for value, part in enumerate(parts.values()):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts.values()] == [[0], [1], [2]]
    first = parts["a"].data_ptr()
    assert all((part.data_ptr() - first) % 256 == 0 for part in parts.values())
    assert all(part.is_contiguous() for part in parts.values())


def test_steps_share_a_buffer_that_grows():
    first = workspace.carve(CPU, 0, wanted(5))["a"]
    assert workspace.carve(CPU, 0, wanted(4000))["a"].data_ptr() == first.data_ptr()
    grown = workspace.carve(CPU, 0, wanted(1 << 20))["a"]
    assert grown.untyped_storage().nbytes() >= 2 * first.untyped_storage().nbytes()
    assert workspace.carve(CPU, 0, wanted(5))["a"].data_ptr() == grown.data_ptr()  # and stays


def test_streams_and_threads_have_their_own():
    found = [workspace.carve(CPU, stream, wanted(5))["a"] for stream in (0, 1)]
    thread = threading.Thread(target=lambda: found.append(workspace.carve(CPU, 0, wanted(5))["a"]))
    thread.start()
    thread.join()
    assert len({tensor.data_ptr() for tensor in found}) == 3


def test_can_be_written_outside_of_inference_mode():
    with torch.inference_mode():
        workspace.carve(CPU, 0, wanted(5))
    part = workspace.carve(CPU, 0, wanted(5))["a"]
    assert not part.is_inference()
    part.fill_(1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elsewhere_each_is_allocated_by_itself(device):
    parts = workspace.scratch(torch.device(device), wanted(5))
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == wanted(5)
    assert len({part.untyped_storage()._cdata for part in parts.values()}) == 3
