"""How far a run is, on a terminal."""

import io
import re

from rich.console import Console

from sparsesel.eval.progress import TerminalProgress


def test_the_bar_says_which_time_is_which():
    screen = io.StringIO()
    with TerminalProgress(Console(file=screen, force_terminal=True, width=120)) as progress:
        progress.start(100)
        progress.doing("retopk, context 64, document 0")
        progress.advance(25)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"retopk, context 64, document 0 .* 25% 0:00:0\d elapsed, (-:--:--|\d:\d\d:\d\d) left", text)
