"""The `sparsesel` command."""

import errno
import io
import os
import sys

# What only writing raises: no space, quota or file size left, a device that fails, a reader that has gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def main() -> None:
    """Run the command line: exit code 0, 1 if it failed, 2 for input that was refused, 130 after Ctrl-C."""
    # Read when torch is loaded. Threads that spin while they wait take the cores that the others need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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
    except OSError as error:
        # Files are read and written by name, and refused as input; what is left are the standard streams.
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        sys.exit(1)


def _discard_output() -> None:
    """Let what is still in standard output's buffer go nowhere, or Python complains of it at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
