"""Configuration of `strided`."""

from typing import Literal

from pydantic import Field

from sparsesel import SelectorConfig


class StridedConfig(SelectorConfig):
    """Which positions are attended to, whatever they hold."""

    name: Literal["strided"] = "strided"
    topk: int = Field(512, ge=1, description="K: keys attended per step, the current token included.")
    stride: int = Field(16, ge=1, description="s: distance in tokens between the far positions, counted from 0.")
