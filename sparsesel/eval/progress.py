"""How a run's progress is shown: a bar with the time left on a terminal, plain lines elsewhere, or nothing."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsesel.eval.line import Point


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def start(self, units: float) -> None:
        """Nothing."""

    def doing(self, text: str) -> None:
        """Nothing."""

    def advance(self, units: float) -> None:
        """Nothing."""

    def measured(self, point: Point, metrics: Mapping[str, Any], done: int, total: int) -> None:
        """Nothing."""


class TerminalProgress:
    """Lines for what was measured, and on a terminal a bar below them. A context manager.

    Args:
        console: Where.
        several: Whether the run has several tasks, which lines then name.
    """

    def __init__(self, console: Console, *, several: bool = False) -> None:
        self._console = console
        self._several = several
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
        """Write a line for the point: what it is about and its first number."""
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if isinstance(value, int | float)][:1]
        if isinstance(milliseconds := metrics.get("ms_per_step"), int | float):
            shown.append(f"{milliseconds:.1f} ms per step")
        task = f"{point.task}, " if self._several else ""
        where = f"{point.selector}, {task}context {point.context}, document {point.document}"
        self.say(f"[{done}/{total}] {where}: {', '.join(shown)}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
