"""Gives the selector `retopk` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="retopk",
            summary="Recalls the supports of similar past queries and ranks only those and the recent keys.",
            config="sparsesel_retopk.config:ReTopKConfig",
            factory="sparsesel_retopk.selector:ReTopKSelector",
            paper="Recall Before You Rank (arXiv 2607.27692)",
            presets="sparsesel_retopk",
            stages={
                "score_kernel": "QK",
                "scan_kernel": "QK + select",
                "finish_kernel": "select + aggregate",
                "finish_exact_kernel": "select + aggregate",
                "recall_kernel": "match + union",
                "reuse_kernel": "match to aggregate",
                "scan_heads": "QK",
                "choose": "select",
                "best_candidates": "select",
                "recall": "match",
                "gather_candidates": "union",
            },
        )
    ]
