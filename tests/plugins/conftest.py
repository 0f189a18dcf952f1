"""Counting what the eager selectors really read."""

from collections import Counter

import pytest

from sparsesel.kv import KVView


@pytest.fixture
def gathered(monkeypatch) -> Counter:
    """Bytes of keys and of values taken out of any KVView from here on; clear it to start anew.

    `gathered.count(owner, method, what)` counts as `what` the tensors that another method returns.
    """

    class Gathered(Counter):
        def count(self, owner: type, method: str, what: str) -> None:
            original = getattr(owner, method)

            def counted(instance, *args, **kwargs):
                taken = original(instance, *args, **kwargs)
                self[what] += taken.numel() * taken.element_size()
                return taken

            monkeypatch.setattr(owner, method, counted)

    read = Gathered()
    for what in ("keys", "values"):
        read.count(KVView, f"gather_{what}", what)
        read.count(KVView, f"logical_{what}", what)
    return read
