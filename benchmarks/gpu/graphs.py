"""A decode step captured in a CUDA graph and replayed while the sequences grow, against the same steps not captured."""

from collections.abc import Callable
from typing import Any

import torch
from gpu.inputs import Geometry, make_case
from gpu.selectors import build
from torch import Tensor

from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.selector import Selector, SelectorState

Outputs = tuple[Tensor, ...]
PAGE = 16
SETTLING = 3
"""Steps before any is captured: the first has a prompt to catch up on, and memory is taken once."""


def captured(step: Callable[[], Outputs], device: str) -> Callable[[], Outputs]:
    """`step` as a graph; a call replays it, and gives the same memory anew."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class Sequences:
    """Two sequences of different lengths in memory that does not move, growing by a number on the device."""

    def __init__(self, geometry: Geometry, steps: int, device: str, *, paged: bool) -> None:
        case = make_case(geometry, device, seed=3, queries=40 + steps, on_grid=True, jump=0.2)
        self.layer = case.stream.layer_spec()
        self._queries = case.query
        self._shown = self._queries.shape[2] - steps
        self.query = self._queries[:, :, :1].clone()
        prompt = case.columns - steps
        self.lengths = torch.tensor([prompt, prompt - prompt // 3], device=device)
        key, value = case.stream.key, case.stream.value
        self.kv = self._in_pages(key, value) if paged else KVView.dense(key, value, lengths=self.lengths)

    def _in_pages(self, key: Tensor, value: Tensor) -> KVView:
        batch, heads, length, dim = key.shape
        blocks = -(-length // PAGE)
        table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).view(batch, blocks)
        table = table.to(key.device)

        def pooled(base: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(base, (0, 0, 0, blocks * PAGE - length))
            pool = padded.view(batch, heads, blocks, PAGE, dim).transpose(1, 2).flatten(0, 1)
            return pool[table.flatten().argsort()].contiguous()

        return KVView.paged(pooled(key), pooled(value), block_table=table, lengths=self.lengths, max_length=length)

    def prompt(self) -> Tensor:
        """Queries at the end of the prompt."""
        return self._queries[:, :, : self._shown]

    def advance(self, step: int) -> None:
        """One more token, with the query of that step."""
        self.lengths.add_(1)
        self.query.copy_(self._queries[:, :, self._shown + step : self._shown + step + 1])


def check_graph(
    spec: str,
    level: int | None,
    geometry: Geometry,
    steps: int,
    paged: bool,
    device: str,
    capture: Callable[[Callable[[], Outputs], str], Callable[[], Outputs]] = captured,
) -> dict[str, Any]:
    """Both ways through a step: the same outputs, supports, state and counts, bit for bit."""
    selector, scale = build(spec, level), geometry.head_dim**-0.5
    sequences = Sequences(geometry, SETTLING + steps, device, paged=paged)
    with backend.using("triton"):
        settled = selector.init_state(sequences.layer)
        selector.observe_prefill(sequences.prompt(), sequences.kv, settled, scale=scale)
        for at in range(SETTLING):
            sequences.advance(at)
            selector.attend(sequences.query, sequences.kv, settled, scale=scale)
        begin = sequences.lengths.clone()
        for name, way in (("attend", _attend), ("discover and aggregate", _in_two)):
            runs = []
            for how in (lambda step, _: step, capture):
                sequences.lengths.copy_(begin)
                state = settled.clone()
                runs.append((_replayed(selector, sequences, state, way, how, steps, scale, device), state))
            _compare(*runs, f"{spec}, {name}")
    return {"replays": 2 * steps}


def _replayed(
    selector: Selector,
    sequences: Sequences,
    state: SelectorState,
    way: Callable[..., Outputs],
    how: Callable[[Callable[[], Outputs], str], Callable[[], Outputs]],
    steps: int,
    scale: float,
    device: str,
) -> list[Outputs]:
    """Outputs of all steps; the first is taken as it is in any case, so that a new state has taken its memory."""
    outputs = []
    run = lambda: way(selector, sequences, state, scale)  # noqa: E731 -- what is captured
    for at in range(steps):
        sequences.advance(SETTLING + at)
        if at == 1:
            run = how(run, device)
        outputs.append(tuple(part.clone() for part in run()))
    return outputs


def _attend(selector: Selector, sequences: Sequences, state: SelectorState, scale: float) -> Outputs:
    return (selector.attend(sequences.query, sequences.kv, state, scale=scale),)


def _in_two(selector: Selector, sequences: Sequences, state: SelectorState, scale: float) -> Outputs:
    support = selector.discover(sequences.query, sequences.kv, state, scale=scale)
    output = selector.aggregate(sequences.query, sequences.kv, support, state, scale=scale)
    return (output, support.counts) if support.indices is None else (output, support.counts, support.indices)


def _compare(one: tuple[list[Outputs], SelectorState], other: tuple[list[Outputs], SelectorState], what: str) -> None:
    for at, (usual, replayed) in enumerate(zip(one[0], other[0], strict=True)):
        for part, (first, second) in enumerate(zip(usual, replayed, strict=True)):
            if not _identical(first, second):
                name = ("output", "counts", "indices")[part]
                raise AssertionError(f"{what}: {name} of replay {at} differ from those not captured")
    for name, tensor in one[1].tensors().items():
        if not _identical(tensor, other[1].tensors()[name]):
            raise AssertionError(f"{what}: state.{name} differs from the one not captured")
    counted = [{name: sums.tolist() for name, sums in run[1].counters.read().items()} for run in (one, other)]
    if counted[0] != counted[1]:
        raise AssertionError(f"{what}: counts {counted[1]}, not captured {counted[0]}")


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
