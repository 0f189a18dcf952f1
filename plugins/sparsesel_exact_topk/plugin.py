"""Gives the selector `exact_topk` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="exact_topk",
            summary="The K highest-scoring keys of each query head, found by scoring every key.",
            config="sparsesel_exact_topk.config:ExactTopKConfig",
            factory="sparsesel_exact_topk.selector:ExactTopKSelector",
            presets="sparsesel_exact_topk",
        )
    ]
