"""Configuration of `quest`."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparsesel.config import SelectorConfig, Topk


class QuestConfig(SelectorConfig):
    """A budget of whole pages, the size of a page, and how many first layers are left dense."""

    name: Literal["quest"] = "quest"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    page_size: int = Field(
        16,
        ge=1,
        description="P: keys per page. In tokens, at least 1; must divide an absolute `topk`. A budget in percent "
        "gives as many whole pages as fit, the last, possibly partial one counted by what it holds.",
    )
    dense_layers: int = Field(
        2, ge=0, description="First layers of the model that attend to everything. A number of layers, at least 0."
    )

    @field_validator("page_size")
    @classmethod
    def _divides_the_budget(cls, value: int, info: ValidationInfo) -> int:
        topk = info.data.get("topk")
        if isinstance(topk, int) and value >= 1 and topk % value:
            raise ValueError(f"must divide topk={topk}, a budget of whole pages")
        return value
