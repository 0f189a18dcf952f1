"""Configuration of `exact_topk`."""

from typing import Literal

from sparsesel.config import SelectorConfig, Topk


class ExactTopKConfig(SelectorConfig):
    """Exact Top-K has its budget alone to set."""

    name: Literal["exact_topk"] = "exact_topk"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
