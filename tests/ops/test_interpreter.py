"""Triton's interpreter refuses memory that is no tensor's, and computes as it does without our changes."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from sparsesel.ops.launch import launch


@triton.jit
def doubled(b_x):
    return b_x * 2


@triton.jit
def copy_kernel(p_from, p_to, begin, count, BLOCK: tl.constexpr):
    o = begin + tl.arange(0, BLOCK)
    m = o < begin + count
    tl.store(p_to + o, doubled(tl.load(p_from + o, mask=m)), mask=m)


@triton.jit
def add_kernel(p_to, at):
    tl.atomic_add(p_to + at, 1)


def copy(source, target, *, begin=0, count=8):
    launch(copy_kernel, (1,), p_from=source, p_to=target, begin=begin, count=count, BLOCK=16)
    return target


def test_what_is_masked_is_not_touched():
    assert copy(torch.arange(8), torch.zeros(8, dtype=torch.int64)).tolist() == [2 * i for i in range(8)]
    copy(torch.arange(8), torch.zeros(8, dtype=torch.int64), count=0)


@pytest.mark.parametrize(("begin", "count"), [(0, 9), (1, 8), (-1, 2), (1 << 40, 1), (-(1 << 40), 1)])
def test_reading_past_a_tensor_is_refused(begin, count):
    # The tensors around it do not make it right.
    middle = [torch.arange(8) for _ in range(3)][1]
    with pytest.raises(InterpreterError, match=r"loads from \d of \d addresses that no tensor"):
        copy(middle, torch.zeros(1 << 12, dtype=torch.int64), begin=begin, count=count)


def test_writing_past_a_tensor_is_refused():
    target = torch.zeros(7, dtype=torch.int64)
    with pytest.raises(InterpreterError, match="stores to 1 of 8 addresses"):
        copy(torch.arange(8), target)
    assert not target.any()


def test_adding_past_a_tensor_is_refused():
    sums = torch.zeros(3, dtype=torch.int32)
    launch(add_kernel, (1,), p_to=sums, at=2)
    with pytest.raises(InterpreterError, match="updates 1 of 1 addresses"):
        launch(add_kernel, (1,), p_to=sums, at=3)
    assert sums.tolist() == [0, 0, 1]


def test_a_view_may_be_read_as_far_as_its_storage_reaches():
    base = torch.arange(16)
    assert copy(base[4:8], torch.zeros(12, dtype=torch.int64), count=12).tolist() == [2 * i for i in range(4, 16)]
