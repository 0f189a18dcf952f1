"""Selectors measured against each other on the same work."""
