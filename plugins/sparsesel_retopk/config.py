"""Configuration of `retopk`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from sparsesel.config import SelectorConfig, Topk


def _switch(value: Any) -> Any:
    """`on` and `off`, as one writes a switch on a command line."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


class ReTopKConfig(SelectorConfig):
    """Defaults are the paper's (arXiv 2607.27692).

    Each ablation of the paper is one field: `retrieval=recent`, `fallback=off`, `window_size=0`,
    `refresh_interval=0`.
    """

    name: Literal["retopk"] = "retopk"  # pyright: ignore[reportIncompatibleVariableOverride] -- frozen
    topk: Topk = 512
    cache_size: int = Field(
        32, ge=1, description="C: past queries kept per query head, with their supports. In tokens, at least 1."
    )
    window_size: int = Field(
        32, ge=0, description="W: most recent keys that are always candidates. In tokens, at least 0; 0 for none."
    )
    recall_size: int = Field(
        4, ge=1, description="R: past queries whose supports are recalled in a step. From 1 to `cache_size`."
    )
    similarity_threshold: float = Field(
        0.85,
        description="tau: least cosine similarity of the best recalled query; below it the step is exact. Above 1 "
        "every step is exact.",
    )
    refresh_interval: int = Field(
        128, ge=0, description="Tr: decode steps from one exact step to the next. In tokens, at least 0; 0 for never."
    )
    retrieval: Literal["similarity", "recent"] = Field(
        "similarity", description="Which R past queries are recalled: the most similar (the paper's) or the latest."
    )
    fallback: Annotated[bool, BeforeValidator(_switch)] = Field(
        True, description="Whether a step whose best similarity is below tau is exact: true or false, on or off."
    )
    fallback_scope: Literal["head", "group-any", "group-mean"] = Field(
        "head",
        description="Who falls back together: each query head by itself (the paper's); all heads of a key-value "
        "head if any of them is below tau; or all if their mean best similarity is.",
    )

    @field_validator("recall_size")
    @classmethod
    def _within_cache(cls, value: int, info: ValidationInfo) -> int:
        cache_size = info.data.get("cache_size")
        if cache_size is not None and value > cache_size:
            raise ValueError(f"must be at most cache_size={cache_size}")
        return value
