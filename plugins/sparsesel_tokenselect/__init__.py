"""TokenSelect: one set of tokens for all heads of a layer, chosen by their vote and kept while queries stay alike."""
