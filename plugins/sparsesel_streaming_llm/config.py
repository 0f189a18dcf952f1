"""Configuration of `streaming_llm`."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparsesel.config import SelectorConfig, Topk


class StreamingLLMConfig(SelectorConfig):
    """How many first tokens and, from the budget, how many recent ones; and the positions they are scored at."""

    name: Literal["streaming_llm"] = "streaming_llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    sink_size: int = Field(
        4,
        ge=0,
        description="S: first tokens of the sequence that are always attended (attention sinks), counted within "
        "`topk`. In tokens, from 0 to below an absolute `topk`; of a budget in percent that is smaller, all but the "
        "current token.",
    )
    positions: Literal["original", "cache"] = Field(
        "original",
        description="Positions that scores see. `original`: those of the text, as keys are cached. `cache`: those "
        "within the kept set, 0 to K - 1, the published rule; needs a model whose rotary embedding is known.",
    )

    @field_validator("sink_size")
    @classmethod
    def _leaves_a_window(cls, value: int, info: ValidationInfo) -> int:
        topk = info.data.get("topk")
        if isinstance(topk, int) and value >= topk:
            raise ValueError(f"must be below topk={topk}, so that the current token is attended too")
        return value
