"""Gives the selector `full` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="full",
            summary="Every visible key: dense attention, the reference of all comparisons.",
            config="sparsesel_full.config:FullConfig",
            factory="sparsesel_full.selector:FullSelector",
        )
    ]
