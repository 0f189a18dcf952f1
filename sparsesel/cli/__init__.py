"""The `sparsesel` command."""

import io
import sys


def main() -> None:
    """Run the command line: exit code 0, 2 for input that was refused, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from sparsesel.cli.app import app

        app()
    except KeyboardInterrupt:  # before a command had begun
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
