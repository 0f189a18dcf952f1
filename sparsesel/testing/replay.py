"""Drives one selector through the life of one layer's cache, over sequences known in advance."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.selector import Selector, Support
from sparsesel.testing.inputs import LAYER_IDX, DenseLayout, Layout, Stream
from sparsesel.testing.tolerances import Expected, expected_attention, rounding_tolerance


@dataclass(frozen=True)
class Step:
    """One decode step and what came of it; all but the support lies on the CPU.

    Attributes:
        query: `[B, Hq, 1, D]`.
        keys: `[B, Hkv, L, D]` by logical position.
        values: Likewise.
        lengths: `[B]` visible tokens.
        support: What was selected.
        mask: The same by query head, `[B, Hq, L]`, True where a head attends.
        output: `[B, Hq, 1, Dv]`.
        scale: Factor of the scores.
    """

    query: Float[Tensor, "B Hq 1 D"]
    keys: Float[Tensor, "B Hkv L D"]
    values: Float[Tensor, "B Hkv L Dv"]
    lengths: Int[Tensor, " B"]
    support: Support
    mask: Bool[Tensor, "B Hq L"]
    output: Float[Tensor, "B Hq 1 Dv"]
    scale: float

    def expected(self) -> Expected:
        """Attention over the support in float64, with its error bound."""
        return expected_attention(self.query, self.keys, self.values, self.mask, scale=self.scale)

    def expected_dense(self) -> Expected:
        """Attention over everything visible in float64, with its error bound."""
        visible = torch.arange(self.mask.shape[2]) < self.lengths[:, None, None]
        return expected_attention(self.query, self.keys, self.values, visible.expand_as(self.mask), scale=self.scale)

    def tolerance(self) -> float:
        """How far apart two correct paths may lie in this step."""
        return rounding_tolerance(self.query, self.keys, self.values, scale=self.scale)


class Replay:
    """A selector, its state, and sequences of which the first `length` columns have been seen.

    Attributes:
        stream: The sequences. Assign another that agrees on what was seen to go on differently.
        length: Columns seen, padding included.
        state: The selector's state.
        scale: Factor of the scores, 1/sqrt(D) unless given.
    """

    def __init__(
        self,
        selector: Selector,
        stream: Stream,
        *,
        layout: Layout | None = None,
        scale: float | None = None,
        layer_idx: int = LAYER_IDX,
    ) -> None:
        self.selector = selector
        self.stream = stream
        self.layout = layout or DenseLayout()
        self.scale = stream.key.shape[3] ** -0.5 if scale is None else scale
        self.length = 0
        self.state: Any = selector.init_state(stream.layer_spec(layer_idx))

    def kv(self) -> KVView:
        """What the cache shows now."""
        key, value = (part[:, :, : self.length] for part in (self.stream.key, self.stream.value))
        return self.layout(key, value, self.stream.starts)

    def prefill(self, *chunks: int) -> "Replay":
        """Attend densely to chunks of that many tokens and show them to the selector."""
        for count in chunks:
            query = self._advance(count)
            self.selector.observe_prefill(query, self.kv(), self.state, scale=self.scale)
        return self

    def skip(self, count: int) -> "Replay":
        """Let tokens into the cache that the selector is not shown."""
        self._advance(count)
        return self

    def step(self) -> Step:
        """One token through `discover` and `aggregate`; the support is checked.

        Raises:
            AssertionError: The support is malformed, see `check_support`.
        """
        query, kv = self._advance(1), self.kv()
        support = self.selector.discover(query, kv, self.state, scale=self.scale)
        mask = self._check(support, kv)
        output = self.selector.aggregate(query, kv, support, self.state, scale=self.scale)
        return self._result(query, support, mask, output)

    def steps(self, count: int) -> list[Step]:
        """That many tokens, see `step`."""
        return [self.step() for _ in range(count)]

    def attend(self) -> Tensor:
        """One token through `attend`, `[B, Hq, 1, Dv]` on the CPU."""
        query = self._advance(1)
        return self.selector.attend(query, self.kv(), self.state, scale=self.scale).cpu()

    def crop(self, count: int) -> "Replay":
        """Take the last `count` tokens of every sequence back."""
        self.length -= count
        self.state.crop(self.stream.lengths(self.length).to(self.stream.key.device))
        return self

    def reorder(self, index: Tensor) -> "Replay":
        """Row i goes on from what row `index[i]` was."""
        self.stream = self.stream.rows(index)
        self.state.reorder(index)
        return self

    def repeat(self, repeats: int) -> "Replay":
        """Every row that many times, neighbours together."""
        self.stream = self.stream.rows(torch.arange(self.stream.batch_size).repeat_interleave(repeats))
        self.state.repeat(repeats)
        return self

    def select(self, index: Tensor) -> "Replay":
        """Keep these rows (integers or a mask)."""
        self.stream = self.stream.rows(index)
        self.state.select(index)
        return self

    def fork(self) -> "Replay":
        """An independent copy that has seen the same."""
        copy = Replay.__new__(Replay)
        copy.__dict__.update(self.__dict__, state=self.state.clone())
        return copy

    def _advance(self, count: int) -> Tensor:
        first, self.length = self.length, self.length + count
        if self.length > self.stream.length:
            raise IndexError(f"the stream ends at column {self.stream.length}, {self.length} asked for")
        return self.stream.query[:, :, first : self.length].clone()

    def _check(self, support: Support, kv: KVView) -> Tensor:
        lengths, heads = self.stream.lengths(self.length), self.stream.query.shape[1]
        check_support(support, lengths, num_attention_heads=heads, num_key_value_heads=self.stream.key.shape[1])
        mask = support.as_mask(kv)[:, :, 0, : int(lengths.max())].cpu()
        return mask.repeat_interleave(heads // mask.shape[1], dim=1)

    def _result(self, query: Tensor, support: Support, mask: Tensor, output: Tensor) -> Step:
        query, keys, values, output = (part.cpu() for part in (query, *self.stream.logical(self.length), output))
        return Step(query, keys, values, self.stream.lengths(self.length), support, mask, output, self.scale)


def check_support(
    support: Support, lengths: Int[Tensor, " B"], *, num_attention_heads: int, num_key_value_heads: int
) -> None:
    """Fail unless a support is well formed.

    Args:
        support: int32, unique and ascending per head, below the sequence's length, padded with -1 at the end,
            counted, at least one position per head.
        lengths: Visible tokens of each sequence.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv.

    Raises:
        AssertionError: Naming what is wrong with it.
    """
    lengths, counts = lengths.cpu(), support.counts.cpu()
    if counts.dtype != torch.int32:
        raise AssertionError(f"counts are {counts.dtype}, expected int32")
    if support.indices is None:
        if counts.ndim != 3 or counts.shape[0] != lengths.shape[0] or bool((counts != lengths[:, None, None]).any()):
            raise AssertionError(f"a full support counts {counts.tolist()}, visible are {lengths.tolist()}")
        return
    indices = support.indices.cpu()
    if indices.dtype != torch.int32:
        raise AssertionError(f"indices are {indices.dtype}, expected int32")
    heads = {1, num_key_value_heads, num_attention_heads}
    if (
        indices.ndim != 4
        or indices.shape[0] != lengths.shape[0]
        or indices.shape[1] not in heads
        or indices.shape[2] != 1
    ):
        raise AssertionError(
            f"indices have shape {tuple(indices.shape)}, expected [{lengths.shape[0]}, one of {heads}, 1, K]"
        )
    used = indices >= 0
    if bool((indices < -1).any()):
        raise AssertionError(f"index {int(indices.min())} below -1")
    stray = indices >= lengths[:, None, None, None]
    if bool(stray.any()):
        raise AssertionError(f"index {int(indices[stray][0])} is not visible, lengths are {lengths.tolist()}")
    if bool((used[..., 1:] & ~used[..., :-1]).any()):
        raise AssertionError("-1 lies before an index, expected all padding at the end")
    falling = used[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
    if bool(falling.any()):
        at = falling.nonzero()[0].tolist()
        raise AssertionError(
            f"indices are not unique and ascending in (row, head) {at[:2]}: {indices[*at[:3]].tolist()}"
        )
    if not torch.equal(counts, used.sum(-1, dtype=torch.int32)):
        raise AssertionError(f"counts {counts.tolist()} do not count the indices")
    if bool((counts == 0).any()):
        raise AssertionError("a head attends to nothing")
