"""One run on several processes, started by torchrun: who measures what, and how it comes together.

Cases are dealt out by how long they take. Each process appends to a file of its own in the results folder; the first
one holds the folder, and merges the files at the end, or at the next start if this one does not come to its end.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsesel.errors import InputError
from sparsesel.eval.line import point_of
from sparsesel.eval.results import ResultStore, lock_name

_FILES = "results.rank*.jsonl"
_MEETING = datetime.timedelta(minutes=10)
_TIMEOUT = datetime.timedelta(days=30)  # others may measure for long after one is done

ItemT = TypeVar("ItemT")


class LeftAloneError(RuntimeError):
    """Another process of the run has ended, and has said why."""


@dataclass(frozen=True)
class Shard:
    """This process among those of a run.

    Attributes:
        rank: Its number, from 0.
        world: How many there are.
        local: Its number on this machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> "Shard":
        """What torchrun says; alone if it does not.

        Raises:
            InputError: It says nonsense.
        """
        values: list[int] = []
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
            text = os.environ.get(name, str(default))
            if not (text.isascii() and text.isdigit()):
                raise InputError(
                    name, expected="a number, as torchrun sets it", got=repr(text), remedy=f"Unset {name}."
                )
            values.append(int(text))
        rank, world, local = values
        if not rank < max(world, 1):
            raise InputError(
                "RANK", expected=f"less than WORLD_SIZE={world}", got=rank, remedy="Start it by torchrun, or unset it."
            )
        return cls(rank, max(world, 1), local)

    @property
    def is_first(self) -> bool:
        """Whether it holds the folder and shows the report."""
        return self.rank == 0

    @property
    def file(self) -> str:
        """Name of its file of results."""
        return f"results.rank{self.rank}.jsonl"

    def join(self) -> None:
        """Meet the others: over gloo, or nccl where each process has a GPU of its own.

        Raises:
            InputError: There is nobody to be met where the environment says.
        """
        if self.world == 1:
            return
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        if dist.is_initialized():
            return
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices:
            torch.cuda.set_device(self.local % devices)
        each = 0 < int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) <= devices
        try:
            store, rank, world = next(rendezvous("env://", timeout=_MEETING))
            store.set_timeout(_TIMEOUT)
            dist.init_process_group(
                "nccl" if each else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=_TIMEOUT,
                device_id=torch.device("cuda", self.local % devices) if each else None,
            )
        except (RuntimeError, ValueError) as error:  # no address, a port that is taken, nobody who answers
            raise InputError(
                "WORLD_SIZE",
                expected=f"{self.world} processes that can meet, as torchrun starts them",
                got=str(error).partition("\n")[0],
                remedy="Start it by torchrun, with another --master-port if that is taken; "
                "or unset RANK and WORLD_SIZE.",
            ) from error

    def barrier(self) -> None:
        """Wait until all have come here.

        Raises:
            LeftAloneError: One of them has ended.
        """
        if self.world > 1:
            import torch.distributed as dist

            try:
                dist.barrier()
            except RuntimeError as error:
                raise LeftAloneError(
                    f"process {self.rank} stops, as another one of this run has ended; what was measured is kept"
                ) from error

    def leave(self) -> None:
        """Part from the others."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def share(self, items: Sequence[ItemT], work: Callable[[ItemT], float]) -> list[ItemT]:
        """What of `items` is for this process, in their order: the longest are dealt first, to who has least.

        All processes must have the same items.
        """
        loads = [0.0] * self.world
        mine: set[int] = set()
        for index in sorted(range(len(items)), key=lambda i: (-work(items[i]), i)):
            least = min(range(self.world), key=lambda rank: (loads[rank], rank))
            loads[least] += work(items[index])
            if least == self.rank:
                mine.add(index)
        return [item for index, item in enumerate(items) if index in mine]


def merge(store: ResultStore, order: Mapping[Any, int]) -> int:
    """Take the files of all processes into a folder's results, each point once; returns how many lines came.

    Safe to interrupt: a file goes only after all of its lines are there.

    Args:
        store: Of the folder.
        order: Place of points; others come last.

    Raises:
        InputError: A process still writes to its file.
    """
    known = {point_of(line) for line in store.lines}
    with contextlib.ExitStack() as held:
        names = sorted(path.name for path in store.folder.glob(_FILES))
        parts = [held.enter_context(ResultStore(store.folder, name)) for name in names]
        new = {point_of(line): line for part in parts for line in part.lines if point_of(line) not in known}
        for point in sorted(new, key=lambda point: order.get(point, len(order))):
            store.append(new[point])
        for name in names:
            (store.folder / name).unlink()
            (store.folder / lock_name(name)).unlink()
    return len(new)
