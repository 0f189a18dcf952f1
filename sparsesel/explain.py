"""What a decode step would launch and where, found out without a device and without numbers."""

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend
from sparsesel.selector import LayerSpec, Selector, StepCost, discover_and_aggregate

if TYPE_CHECKING:  # importing it takes triton, which not every machine has
    from sparsesel.ops.launch import Launch

SHORTEST = 3
"""Visible keys at the last step of the shortest trace: a prompt of one token and two steps."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a phase of a generation takes.

    Attributes:
        launches: Its kernels, in order.
        torch_ops: PyTorch operations that do more than allocate or view, each a launch of its own.
        workspace: Bytes that are allocated, outputs among them; all of them, though some are free again before others
            are needed. Room that is made in the state is not among them, nor is what allocators round up to.
    """

    launches: "list[Launch]"
    torch_ops: int
    workspace: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one layer takes, by phase of a generation.

    Attributes:
        prefill: A prompt.
        first: The first decode step, which may have to catch up on the prompt.
        step: Any later one.
        state: The selector's state after it, on the device "meta".
    """

    prefill: Phase
    first: Phase
    step: Phase
    state: Any

    @property
    def launches(self) -> "list[Launch]":
        """The kernels of all phases."""
        return [*self.prefill.launches, *self.first.launches, *self.step.launches]


def trace(
    selector: Selector,
    layer: LayerSpec,
    length: int,
    *,
    page_size: int = 0,
    left_padded: bool = False,
    fused: bool = True,
) -> Trace:
    """Record the kernels of a prompt of `length - 2` tokens and two decode steps, the last at `length` visible keys.

    Everything lies on the device "meta", whose tensors have no content: a step that waited for its device fails here.

    Args:
        selector: The selector; on the Triton backend, whatever it is made of.
        layer: Its layer; the device is replaced.
        length: Visible keys at the last step, at least `SHORTEST`.
        page_size: Tokens of a block of a paged cache, 0 for a dense one.
        left_padded: Whether every sequence begins at a column of its own.
        fused: Whether a step is `attend`, rather than `discover` and `aggregate`.

    Raises:
        NotImplementedError: A step looks at the content of a tensor. torch says at which; in some places it calls this
            a RuntimeError.
    """
    from sparsesel.ops.launch import recording

    meta = torch.device("meta")
    layer = dataclasses.replace(layer, device=meta)
    batch, heads, dim = layer.batch_size, layer.num_attention_heads, layer.head_dim
    scale = dim**-0.5
    phases = []
    with torch.no_grad(), backend.using("triton"):
        state = selector.init_state(layer)
        for tokens, visible in ((length - 2, length - 2), (1, length - 1), (1, length)):
            kv = meta_view(layer, visible, length, page_size=page_size, left_padded=left_padded)
            query = torch.empty(batch, heads, tokens, dim, dtype=layer.dtype, device=meta)
            with recording() as launches, _Counter() as counter:
                if visible == length - 2:
                    selector.observe_prefill(query, kv, state, scale=scale)
                elif fused:
                    selector.attend(query, kv, state, scale=scale)
                else:
                    discover_and_aggregate(selector, query, kv, state, scale=scale)
            allocated = counter.allocated(beside=state.tensors().values())
            phases.append(Phase(launches, counter.operations, allocated))
    prefill, first, step = phases
    return Trace(prefill, first, step, state)


class _Counter(TorchDispatchMode):
    """Counts what PyTorch itself does: operations, and memory that did not exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        # Storages by address, kept alive so that none takes the place of another.
        self._known: dict[int, torch.UntypedStorage] = {}
        self._fresh: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._known |= _storages((args, kwargs))
        result = func(*args, **kwargs)
        fresh = {address: one for address, one in _storages(result).items() if address not in self._known}
        self._known |= fresh
        self._fresh |= {address: one.nbytes() for address, one in fresh.items()}
        if func._schema.is_mutable or (fresh and "empty" not in func._schema.name):
            self.operations += 1
        return result

    def allocated(self, *, beside: Iterable[torch.Tensor]) -> int:
        """Bytes of memory that is new, that of some tensors left out."""
        others = _storages(list(beside))
        return sum(size for address, size in self._fresh.items() if address not in others)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


def meta_view(layer: LayerSpec, visible: int, length: int, *, page_size: int = 0, left_padded: bool = False) -> KVView:
    """View `visible` tokens of a cache that has room for `length`, on the device "meta"; arguments as for `trace`."""

    def empty(*shape: int, dtype: torch.dtype = layer.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, dim, batch = layer.num_key_value_heads, layer.head_dim, layer.batch_size
    starts = empty(batch, dtype=torch.int64) if left_padded else None
    if not page_size:
        keys, values = (empty(batch, heads, length, dim)[:, :, :visible] for _ in range(2))
        return KVView.dense(keys, values, starts=starts)
    blocks = -(-length // page_size)
    keys, values = (empty(batch * blocks, heads, page_size, dim) for _ in range(2))
    return KVView.paged(
        keys,
        values,
        block_table=empty(batch, blocks, dtype=torch.int64),
        lengths=empty(batch, dtype=torch.int64),
        max_length=visible,
        starts=starts,
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What becomes of a selector in one layer at one length.

    Attributes:
        backend: The backend that runs.
        why: Why that one, for people.
        refused: Why that backend refuses such a layer, None where it serves it.
        trace: Its kernels, None where there are none to be told.
        remark: Why there are none, or what to know about them; may be empty.
        cost: What a step must read, by the selector's own account.
    """

    backend: Literal["triton", "eager"]
    why: str
    refused: str | None
    trace: Trace | None
    remark: str
    cost: StepCost


def explain(
    selector: Selector,
    layer: LayerSpec,
    length: int,
    *,
    name: str = "auto",
    device: torch.device | str = "cuda",
    page_size: int = 0,
) -> Explanation:
    """Explain what a selector does in `layer` at `length` visible keys on `device`, which need not be there.

    Args:
        selector: The selector.
        layer: Its layer, whose own device is not looked at.
        length: Visible keys, at least `SHORTEST`.
        name: The backend asked for.
        device: Where tensors would lie.
        page_size: Tokens of a block of a paged cache, 0 for a dense one.

    Raises:
        InputError: There is no such backend or it cannot run there, the selector cannot serve such a layer, or
            `length` is too short.
    """
    if length < SHORTEST:
        raise InputError(
            "contexts", expected=f"at least {SHORTEST}: a prompt and two steps", got=length, remedy="Give a longer one."
        )
    device = torch.device(device)
    runs = backend.resolve(name, device)  # pyright: ignore[reportArgumentType] -- others are refused there
    why = _why(runs, name, device)
    cost = selector.cost(layer, length)
    if runs == "eager":
        return Explanation(runs, why, None, None, "There are no kernels: every operation is PyTorch's own.", cost)
    try:
        found = trace(selector, layer, length, page_size=page_size)
    except InputError as error:
        return Explanation(runs, f"{why}, but it refuses this layer", str(error), None, "", cost)
    except RuntimeError as error:  # NotImplementedError is one, too
        return Explanation(runs, why, None, None, _cannot_be_traced(error), cost)
    return Explanation(runs, why, None, found, _remark(found), cost)


def _why(runs: str, name: str, device: torch.device) -> str:
    kinds = {found.name: found.why for found in backend.available()}
    if runs == name:
        return f"asked for ({kinds[runs]})"
    if runs == "triton":
        return f"the best one for tensors on {device.type} ({kinds[runs]})"
    if device.type == "cuda":
        return f"the only one for tensors on cuda: {kinds['triton']}"
    return f"the only one for tensors on {device.type}: Triton's kernels need a CUDA or ROCm device"


def _cannot_be_traced(error: RuntimeError) -> str:
    what = re.split(r"\.?\s*\n|\. ", str(error).strip())[0]  # torch goes on with advice that does not apply
    if isinstance(error, NotImplementedError) or "meta tensor" in what:
        what = f"it looks at the content of tensors on the way, which waits for the device ({what})"
    return f"Its kernels cannot be told beforehand: {what}"


def _remark(found: Trace) -> str:
    kernels = {launch.kernel for launch in [*found.first.launches, *found.step.launches]}
    if not kernels:
        return "A step launches no kernel of Triton's: the selector is made of PyTorch operations alone."
    if all(kernel.startswith("sparsesel.ops.") for kernel in kernels):
        return "The selector has no kernels of its own: these are those of the operations it is made of."
    return ""
