"""Entry point: which tasks there are. Imports neither torch nor the tasks."""

from sparsesel.hookspecs import TaskPlugin, hookimpl


@hookimpl
def sparsesel_tasks() -> list[TaskPlugin]:
    """The tasks of this package."""
    return [
        TaskPlugin(
            name="perplexity",
            summary="Perplexity of the last tokens of long documents, every one of them decoded through the selector.",
            config="sparsesel.eval.tasks.perplexity:PerplexityConfig",
            factory="sparsesel.eval.tasks.perplexity:Perplexity",
        ),
        TaskPlugin(
            name="niah",
            summary="Numbers hidden in a long text and asked for at its end: one, one of four, four of one name.",
            config="sparsesel.eval.tasks.niah:NiahConfig",
            factory="sparsesel.eval.tasks.niah:Niah",
            paper="Parameters of RULER: What's the Real Context Size of Your Long-Context Language Models? "
            "arXiv 2404.06654",
        ),
    ]
