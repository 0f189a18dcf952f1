"""The hooks through which a package gives selectors and evaluation tasks to sparsesel.

A package declares an entry point in the group `sparsesel`, pointing at a module, and that module implements
`sparsesel_selectors`, `sparsesel_tasks` or both:

```python
import sparsesel


@sparsesel.hookimpl
def sparsesel_selectors():
    return [
        sparsesel.SelectorPlugin(
            name="mine",
            summary="Attends to every other key.",
            config="my_package.config:MineConfig",
            factory="my_package.selector:MineSelector",
        )
    ]
```

The module is imported to list what there is, so it must import neither torch nor triton: `config` and `factory` are
strings, resolved when the selector or task is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pluggy

PROJECT = "sparsesel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class SelectorPlugin:
    """One selector, described without importing it.

    Attributes:
        name: How users name it, `[a-z][a-z0-9_]*`, unique among everything installed.
        summary: One line that says what it attends to.
        config: `"module:Class"` of its `SelectorConfig`.
        factory: `"module:Class"` called with the config; the result is a `Selector`.
        paper: Title and arXiv number or address, empty if it has none.
        presets: Package whose folder `presets/` holds `<preset>.toml`, empty if it has none.
        calibrate: `"module:Class"` that `sparsesel calibrate` calls without arguments; the result is a
            `sparsesel.selector.Calibrator`. Empty if the selector learns nothing from text.
        stages: What functions and kernels of its package do in a step, by their names: `{"page_scores": "estimate"}`.
            The task `latency` shows their time so; what is done by sparsesel's own operations it knows.
    """

    name: str
    summary: str
    config: str
    factory: str
    paper: str = ""
    presets: str = ""
    calibrate: str = ""
    stages: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TaskPlugin:
    """One evaluation task, described without importing it.

    Attributes:
        name: How users name it, `[a-z][a-z0-9_-]*`, unique among the tasks installed.
        summary: One line that says what it measures.
        config: `"module:Class"` of its `TaskConfig`. Its module should not import torch: options and their help
            are made from it.
        factory: `"module:Class"` called with the config; the result is a `sparsesel.eval.task.Task`.
        paper: Title and arXiv number or address, empty if it has none.
    """

    name: str
    summary: str
    config: str
    factory: str
    paper: str = ""


@hookspec
def sparsesel_selectors() -> list[SelectorPlugin]:  # pyright: ignore[reportReturnType]
    """Return the selectors that this package provides."""


@hookspec
def sparsesel_tasks() -> list[TaskPlugin]:  # pyright: ignore[reportReturnType]
    """Return the evaluation tasks that this package provides."""
