"""Configuration of `loki`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from sparsesel.config import SelectorConfig, Topk
from sparsesel_loki.header import read_header

PROMPT = "prompt"


class LokiConfig(SelectorConfig):
    """Fields and symbols are those of Loki (arXiv 2406.02542), which gives K and r as fractions."""

    name: Literal["loki"] = "loki"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    rank: int = Field(
        64, ge=1, description="r (the paper's d): principal components that keys are ranked by. From 1 to head_dim."
    )
    calibration: str = Field(
        PROMPT,
        min_length=1,
        description="Where the components come from: a file that `sparsesel calibrate loki` wrote for this model, or "
        '"prompt", the keys that precede the first step in which keys have to be chosen.',
    )

    @field_validator("calibration")
    @classmethod
    def _is_a_calibration(cls, value: str) -> str:
        if value != PROMPT:
            read_header(Path(value))
        return value
