"""How a run's progress is shown: a bar with the time left on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsesel.eval.results import Point


class TerminalProgress:
    """Lines for what was measured, and on a terminal a bar below them. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

    def say(self, text: str) -> None:
        """Write a line."""
        self._console.print(text, soft_wrap=True)

    def start(self, units: float) -> None:
        """Show the bar, `units` long."""
        self._bar.update(self._task, total=units, visible=True)

    def doing(self, text: str) -> None:
        """What the bar is at."""
        self._bar.update(self._task, description=text)

    def advance(self, units: float) -> None:
        """Move the bar."""
        self._bar.advance(self._task, units)

    def measured(self, point: Point, metrics: Mapping[str, Any], done: int, total: int) -> None:
        """Write a line for the point."""
        self.say(
            f"[{done}/{total}] {point.selector}, context {point.context}, document {point.document}: perplexity "
            f"{metrics['perplexity']:.3f}, {metrics['ms_per_step']:.1f} ms per step"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
