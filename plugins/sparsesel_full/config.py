"""Configuration of `full`."""

from typing import Literal

from sparsesel.config import SelectorConfig


class FullConfig(SelectorConfig):
    """Dense attention has nothing to set."""

    name: Literal["full"] = "full"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
