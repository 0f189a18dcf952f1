"""Turning vectors on to another position."""

import math

import pytest
import torch

from sparsesel.rotary import Rotary


def plainly(vector, position, inv_freq, interleaved):
    """One vector turned by `position`, pair by pair."""
    turned = list(vector)
    for n, frequency in enumerate(inv_freq):
        first, second = (2 * n, 2 * n + 1) if interleaved else (n, n + len(inv_freq))
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        turned[first] = vector[first] * cos - vector[second] * sin
        turned[second] = vector[second] * cos + vector[first] * sin
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_turns_by_its_own_offset(interleaved, dtype):
    inv_freq = [1.0, 0.3, 0.01]
    vectors = torch.randn(3, 2, 1, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    offsets = [0, -5, 100_000]
    turned = Rotary(torch.tensor(inv_freq), interleaved).rotate(vectors, torch.tensor(offsets))
    assert turned.dtype == torch.float32
    for row, offset in enumerate(offsets):
        for head in range(2):
            exact = torch.tensor(inv_freq).double().tolist()
            expected = plainly(vectors[row, head, 0].double().tolist(), offset, exact, interleaved)
            torch.testing.assert_close(turned[row, head, 0].double(), torch.tensor(expected).double())


def test_a_layer_without_positions_leaves_vectors_as_they_are():
    vectors = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Rotary(torch.zeros(0)).rotate(vectors, torch.tensor([3, -2])), vectors)
