"""The hook through which a package gives selectors to sparsesel.

A package declares an entry point in the group `sparsesel`, pointing at a module, and that module implements
`sparsesel_selectors`:

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

The module is imported to list selectors, so it must import neither torch nor triton: `config` and `factory` are
strings, resolved when the selector is asked for.
"""

from dataclasses import dataclass

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
    """

    name: str
    summary: str
    config: str
    factory: str
    paper: str = ""
    presets: str = ""
    calibrate: str = ""


@hookspec
def sparsesel_selectors() -> list[SelectorPlugin]:  # pyright: ignore[reportReturnType]
    """Return the selectors that this package provides."""
