"""ReTopK: recall the supports of similar past queries, and rank only what they hold."""
