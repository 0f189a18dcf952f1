"""Gives the selector `quest` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="quest",
            summary="The pages of keys whose channel-wise minima and maxima allow the highest scores.",
            config="sparsesel_quest.config:QuestConfig",
            factory="sparsesel_quest.selector:QuestSelector",
            paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv 2406.10774)",
            presets="sparsesel_quest",
            stages={
                "plan_pages_kernel": "select",
                "page_support_kernel": "select",
                "page_attention_kernel": "QK + aggregate",
                "page_scores_kernel": "estimate",
                "page_scores": "estimate",
            },
        )
    ]
