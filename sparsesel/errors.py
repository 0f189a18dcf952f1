"""What sparsesel raises when it is given something it cannot work with."""

from typing import Self


class InputError(ValueError):
    """Bad input: which field, what was expected, what came, and what to do about it.

    Args:
        field: Name of the offending argument, option or configuration field.
        expected: What would have been accepted.
        got: What was given instead.
        remedy: The next thing to try, as a sentence.
    """

    def __init__(self, field: str, *, expected: str, got: object, remedy: str) -> None:
        self.field = field
        self.expected = expected
        self.got = str(got)
        self.remedy = remedy
        super().__init__(f"{field}: expected {expected}; got {self.got}. {remedy}")

    def within(self, place: str) -> Self:
        """The same of a field that is part of something: "suffix of task perplexity"."""
        return type(self)(f"{self.field} of {place}", expected=self.expected, got=self.got, remedy=self.remedy)


class UnknownNameError(InputError):
    """A selector, preset, field or model of that name is not installed."""


class BrokenPluginError(InputError):
    """The plugin is installed but cannot be used: its import failed, or its name is taken twice."""


class UnsupportedModelError(InputError):
    """A model whose attention cannot be replaced faithfully."""
