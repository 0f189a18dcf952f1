"""Which implementations of the operations can run here, and why."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    """One implementation of the operations.

    Attributes:
        name: How it is called.
        available: Whether it can run on this machine.
        why: The reason, for people.
    """

    name: str
    available: bool
    why: str


def available() -> list[Backend]:
    """Every backend that this version of sparsesel has."""
    return [Backend("eager", True, f"PyTorch {torch.__version__}, on any of its devices")]
