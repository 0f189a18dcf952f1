"""Gives the selector `sparq` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="sparq",
            summary="The K keys that score highest in the query's r largest components; a mean value for the rest.",
            config="sparsesel_sparq.config:SparQConfig",
            factory="sparsesel_sparq.selector:SparQSelector",
            paper="SparQ Attention: Bandwidth-Efficient LLM Inference (arXiv 2312.04985)",
            presets="sparsesel_sparq",
            stages={
                "merit_kernel": "select",
                "mass_outside_kernel": "aggregate",
                "reallocate_kernel": "aggregate",
                "choose_components_kernel": "estimate",
                "approximate_scores_kernel": "estimate",
                "_gather": "gather",
                "choose": "select",
                "mass_outside": "aggregate",
                "_combine": "aggregate",
                "approximate_weights": "estimate",
            },
        )
    ]
