"""Gives the selector `streaming_llm` to sparsesel."""

from sparsesel.hookspecs import SelectorPlugin, hookimpl


@hookimpl
def sparsesel_selectors() -> list[SelectorPlugin]:
    """Return the one selector of this package."""
    return [
        SelectorPlugin(
            name="streaming_llm",
            summary="The first tokens (attention sinks) and the most recent ones, whatever the query.",
            config="sparsesel_streaming_llm.config:StreamingLLMConfig",
            factory="sparsesel_streaming_llm.selector:StreamingLLMSelector",
            paper="Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453)",
            presets="sparsesel_streaming_llm",
            stages={
                "sink_window_attention_kernel": "QK + aggregate",
            },
        )
    ]
