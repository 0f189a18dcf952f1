"""Configuration of `sparq`."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparsesel.config import SelectorConfig, Topk


class SparQConfig(SelectorConfig):
    """Fields and symbols are those of SparQ Attention (arXiv 2312.04985)."""

    name: Literal["sparq"] = "sparq"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    rank: int = Field(
        32, ge=1, description="r: components of a key that its approximate score is made of. From 1 to head_dim."
    )
    local_size: int | Literal["topk/4"] = Field(
        "topk/4",
        description="l: newest keys that are always attended to. In tokens, from 0 to `topk`, part of it; "
        '"topk/4" for a quarter of `topk`, rounded down.',
    )
    reallocate: bool = Field(
        True,
        description="Whether the weight that the approximate scores give to keys not selected goes to the mean "
        "of all visible values, v̄.",
    )

    @field_validator("local_size")
    @classmethod
    def _within_budget(cls, value: int | str, info: ValidationInfo) -> int | str:
        if isinstance(value, str):
            return value
        topk = info.data.get("topk")
        if value < 0 or (isinstance(topk, int) and value > topk):
            raise ValueError(f"must be from 0 to topk={topk}, which it is part of")
        return value
