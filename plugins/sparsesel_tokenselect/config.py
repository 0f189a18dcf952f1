"""Configuration of `tokenselect`."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from sparsesel.config import SelectorConfig, Topk, resolve_topk


class TokenSelectConfig(SelectorConfig):
    """A budget, the parts of it that are fixed, and how alike queries must be to share a selection."""

    name: Literal["tokenselect"] = "tokenselect"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    sink_size: int = Field(
        64,
        ge=0,
        description="n_init: first tokens of the sequence that are always attended, counted within `topk`. In tokens, "
        "at least 0. Of a budget in percent that is too small they get what `local_size` leaves.",
    )
    local_size: int = Field(
        32,
        ge=1,
        description="n_local: most recent tokens that are always attended, the current one included, counted within "
        "`topk`. In tokens, at least 1; with `sink_size` at most an absolute `topk`. The rest of the budget, the "
        "paper's k, is selected.",
    )
    similarity_threshold: float = Field(
        0.9,
        description="theta: least cosine similarity, of the queries of all heads put together, to the query of the "
        "last selection for that selection to be used again. Above 1 every step selects.",
    )

    @field_validator("local_size")
    @classmethod
    def _fits_the_budget(cls, value: int, info: ValidationInfo) -> int:
        topk, sink_size = info.data.get("topk"), info.data.get("sink_size")
        if isinstance(topk, int) and sink_size is not None and sink_size + value > topk:
            raise ValueError(f"must be at most topk={topk} less sink_size={sink_size}")
        return value

    def selected(self, length: int) -> int:
        """How many tokens are selected of `length` visible ones: the budget less the first and the last."""
        return max(0, min(resolve_topk(self.topk, length), length) - self.sink_size - self.local_size)
