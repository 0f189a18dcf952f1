"""A sample selector for sparsesel: every s-th position and the newest ones."""
