"""`python -m sparsesel` is the `sparsesel` command."""

from sparsesel.cli import main

main()
