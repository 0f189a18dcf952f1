"""Where the command line writes, and how text that others wrote is made safe to show."""

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sparsesel.errors import InputError

out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)

_HARMLESS = "\n\t\u200c\u200d"  # the last two join letters and emoji


def safe(text: object) -> str:
    """`text` with every character that could drive the terminal written as its escape.

    That is control and formatting characters (ANSI sequences, text direction) and lone surrogates. Names,
    summaries and errors of third-party plugins, generated text and the user's own input all pass here.
    """
    return "".join(
        char if char in _HARMLESS or unicodedata.category(char) not in ("Cc", "Cf", "Cs") else ascii(char)[1:-1]
        for char in str(text)
    )


def print_json(data: Any) -> None:
    """Write `data` to standard output as JSON, control characters escaped."""
    out.out(json.dumps(data, indent=2, default=str))


def print_error(error: InputError) -> None:
    """Write what was wrong, what was expected, what came and what to do to standard error."""
    text = Text.assemble(("error", "bold red"), " in ", (safe(error.field), "bold"))
    for label, value in (("expected", error.expected), ("got", error.got), ("remedy", error.remedy)):
        text.append(f"\n  {label:<9} ", "dim").append(safe(value).replace("\n", "\n" + " " * 12))
    err.print(text, soft_wrap=True)


def print_differences(notes: Sequence[str]) -> None:
    """Mark on standard output what results were not measured alike."""
    for note in notes:
        out.print(Text.assemble(("Not measured alike: ", "bold yellow"), safe(note)))
