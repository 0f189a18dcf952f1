"""The evaluation tasks that ship with sparsesel, each in a module of its own."""
