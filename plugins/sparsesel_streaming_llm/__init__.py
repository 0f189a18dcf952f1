"""StreamingLLM: the first tokens and the most recent ones, whatever the query."""
