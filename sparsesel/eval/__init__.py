"""Measuring selectors on real models: what is run, what is written, what is shown."""
