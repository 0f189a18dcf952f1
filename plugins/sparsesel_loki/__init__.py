"""Loki: keys are ranked by their first principal components, the best are attended to exactly."""
