"""Kernels reach keys and values further apart than int32 counts: of heads, of sequences, of a paged cache's blocks."""

import pytest
import torch

from sparsesel import ops
from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.registry import make_selector, registry
from sparsesel.testing import Replay, random_stream

APART = 1 << 30
KINDS = ["heads", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("rows", "blocks"))]
BLOCK = 4

SELECTORS = [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]
VARIANTS = [
    "retopk:group,topk=5,cache_size=4,recall_size=2,window_size=3",
    "streaming_llm,topk=5,sink_size=2,positions=cache",
    "sparq,topk=5,rank=4,reallocate=false",
]


def small(name):
    fields = {"quest": "page_size=1", "sparq": "rank=4", "loki": "rank=4", "streaming_llm": "sink_size=2"}
    fields |= {"tokenselect": "sink_size=1,local_size=1", "retopk": "cache_size=4,recall_size=2,window_size=3"}
    return ",".join(part for part in (name, "topk=5" * (name != "full"), fields.get(name)) if part)


class Far:
    """Views of a cache in a file that is mostly holes: rows, heads or blocks of 2^30 numbers."""

    def __init__(self, path, kind):
        self.kind = kind
        self.storage = torch.from_file(str(path / "cache"), shared=True, size=6 * APART, dtype=torch.float16)

    def __call__(self, key, value, starts):
        heads, total, dim = key.shape[1:]
        if self.kind == "blocks":
            return self._paged(key, value, starts)
        strides = (heads * APART, APART, dim, 1) if self.kind == "heads" else (APART * 2, total * dim, dim, 1)
        far = [self.storage[at:].as_strided(key.shape, strides) for at in (0, APART // 2)]
        for room, tensor in zip(far, (key, value), strict=True):
            room.copy_(tensor)
        return KVView.dense(*far, starts=starts)

    def _paged(self, key, value, starts):
        """The first and the last block of a sequence lie far apart, all others near the first."""
        batch, heads, total, dim = key.shape
        blocks = -(-total // BLOCK)
        size = heads * BLOCK * dim
        # Block n of the pool lies n · size numbers from its beginning.
        distance = 5 * APART // 2 // size
        table = torch.arange(batch * blocks).view(batch, blocks)
        table[:, -1] += distance
        padded = torch.zeros(2, batch, heads, blocks * BLOCK, dim, dtype=key.dtype)
        padded[0, :, :, :total], padded[1, :, :, :total] = key, value
        pools = []
        for at, tensor in zip((0, 3 * APART), padded, strict=True):
            pool = self.storage[at:].as_strided(
                (distance + batch * blocks, heads, BLOCK, dim), (size, BLOCK * dim, dim, 1)
            )
            pool[table] = tensor.view(batch, heads, blocks, BLOCK, dim).transpose(1, 2)
            pools.append(pool)
        lengths = torch.full((batch,), total) if starts is None else total - starts
        return KVView.paged(*pools, block_table=table, lengths=lengths, max_length=int(lengths.max()), starts=starts)


def stream_of(seed, length):
    stream = random_stream(seed, length=length, batch=2, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    return stream.to(torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [*map(small, SELECTORS), *VARIANTS])
def test_selectors(tmp_path, spec, kind):
    """A step and a fused one, over the far cache and over a near one: the same to the bit."""
    found = []
    for layout in (Far(tmp_path, kind), None):
        replay = Replay(make_selector(spec), stream_of(3, 24), layout=layout)
        with backend.using("triton"):
            replay.prefill(20)
            found.append([replay.step().output, replay.attend()])
    assert all(torch.equal(far, near) for far, near in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["heads", "rows", "blocks"])
def test_operations(tmp_path, kind):
    stream = stream_of(4, 23)
    query = stream.query[:, :, -1:]
    chosen = torch.randint(0, 23, (2, 6, 5), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    views = [Far(tmp_path, kind)(stream.key, stream.value, None), KVView.dense(stream.key, stream.value)]
    with backend.using("triton"):
        for op in (
            lambda kv: ops.dense_attention(query, kv, scale=0.3),
            lambda kv: ops.qk_scores(query, kv, scale=0.3),
            lambda kv: ops.indexed_qk(query, kv, chosen, scale=0.3),
            lambda kv: ops.sparse_attention(query, kv, chosen[:, :, None], scale=0.3),
            lambda kv: ops.softmax_values(torch.ones(2, 6, 5), kv, chosen),
        ):
            far, near = map(op, views)
            assert torch.equal(far, near)
