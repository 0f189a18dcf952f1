"""Entry point: says what there is, imports neither torch nor the selector nor the task."""

import sparsesel


@sparsesel.hookimpl
def sparsesel_selectors() -> list[sparsesel.SelectorPlugin]:
    """The one selector of this package."""
    return [
        sparsesel.SelectorPlugin(
            name="strided",
            summary="Attends to the newest tokens and to every s-th one before them.",
            config="sparsesel_strided.config:StridedConfig",
            factory="sparsesel_strided.selector:StridedSelector",
            paper="Generating Long Sequences with Sparse Transformers, arXiv 1904.10509 (fixed pattern)",
        )
    ]


@sparsesel.hookimpl
def sparsesel_tasks() -> list[sparsesel.TaskPlugin]:
    """The one task of this package."""
    return [
        sparsesel.TaskPlugin(
            name="agreement",
            summary="How often the model's next token is the one that dense attention would have chosen.",
            config="sparsesel_strided.task:AgreementConfig",
            factory="sparsesel_strided.task:Agreement",
        )
    ]
