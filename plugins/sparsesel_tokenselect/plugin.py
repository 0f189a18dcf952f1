"""Gives the selector `tokenselect` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="tokenselect",
            summary="First, recent and, by a vote of all heads, best tokens; kept while queries stay alike.",
            config="sparsesel_tokenselect.config:TokenSelectConfig",
            factory="sparsesel_tokenselect.selector:TokenSelectSelector",
            paper="TokenSelect: Dynamic Token-Level KV Cache Selection (arXiv 2411.02886)",
            presets="sparsesel_tokenselect",
            stages={
                "between_scores_kernel": "QK",
                "votes_kernel": "select",
                "compare_kernel": "match",
                "set_kernel": "union",
                "soft_vote": "select",
                "similarity": "match",
                "_merged": "union",
            },
        )
    ]
