"""Operations on no sequences, on no positions, on sequences without a key: nothing, or zeros, whatever runs them."""

import pytest
import torch

from sparsesel import ops
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.ops.launch import MAX_HEAD_DIM


@pytest.fixture(params=backend.NAMES[1:], autouse=True)
def running(request):
    with backend.using(request.param):
        yield request.param


@pytest.mark.parametrize(("batch", "slots"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_no_sequences_and_no_positions(batch, slots, lists):
    query = torch.randn(batch, 4, 1, 8)
    kv = KVView.dense(torch.randn(batch, 2, 9, 8), torch.randn(batch, 2, 9, 6))
    indices = torch.zeros(batch, lists, slots, dtype=torch.int32)
    assert ops.dense_attention(query, kv, scale=1.0).shape == (batch, 4, 1, 6)
    assert ops.qk_scores(query, kv, scale=1.0).shape == (batch, 4, 9)
    assert ops.indexed_qk(query, kv, indices, scale=1.0).shape == (batch, 4, slots)
    for output in (
        ops.sparse_attention(query, kv, indices[:, :, None], scale=1.0),
        ops.softmax_values(torch.randn(batch, 4, slots), kv, indices),
    ):
        assert output.shape == (batch, 4, 1, 6)
        assert not output.any()


@pytest.mark.parametrize("topk", [0, 3])
def test_rows_without_scores(topk):
    for rows in ((2,), (0,), (3, 0)):
        lengths = torch.zeros(rows, dtype=torch.int64)
        assert ops.topk_indices(torch.empty(*rows, 0), topk, lengths).shape == (*rows, 0)


@pytest.mark.parametrize("of", ["keys", "values"])
def test_more_channels_than_a_tile_holds_are_refused_where_there_are_tiles(running, of):
    key_dim, value_dim = {"keys": (MAX_HEAD_DIM + 1, 8), "values": (8, MAX_HEAD_DIM + 1)}[of]
    kv = KVView.dense(torch.randn(1, 1, 3, key_dim), torch.randn(1, 1, 3, value_dim))
    query = torch.randn(1, 1, 1, key_dim)
    if running == "eager":
        assert ops.dense_attention(query, kv, scale=1.0).shape == (1, 1, 1, value_dim)
    else:
        with pytest.raises(InputError, match=r"head_dim.*at most 512.*backend=eager"):
            ops.dense_attention(query, kv, scale=1.0)
