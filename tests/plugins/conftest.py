"""Counting what the eager selectors really read."""

from collections import Counter

import pytest

from sparsesel.kv import KVView


@pytest.fixture
def gathered(monkeypatch) -> Counter:
    """Bytes of keys and of values taken out of any KVView from here on; clear it to start anew."""
    read = Counter()

    def counting(method: str, what: str) -> None:
        original = getattr(KVView, method)

        def counted(self, *args):
            taken = original(self, *args)
            read[what] += taken.numel() * taken.element_size()
            return taken

        monkeypatch.setattr(KVView, method, counted)

    for what in ("keys", "values"):
        counting(f"gather_{what}", what)
        counting(f"logical_{what}", what)
    return read
