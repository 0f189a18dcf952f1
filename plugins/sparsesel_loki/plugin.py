"""Gives the selector `loki` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="loki",
            summary="The K keys of each query head that score highest in the first r principal components of keys.",
            config="sparsesel_loki.config:LokiConfig",
            factory="sparsesel_loki.selector:LokiSelector",
            paper="Loki: Low-rank Keys for Efficient Sparse Attention (arXiv 2406.02542)",
            presets="sparsesel_loki",
            calibrate="sparsesel_loki.calibrator:LokiCalibrator",
            stages={
                "project_kernel": "estimate",
            },
        )
    ]
