"""What the documentation takes from the code when it is built, through comments in its pages.

    <!-- config: retopk -->                     fields and presets of a selector
    <!-- model: sparsesel.config:RunConfig -->  fields of another configuration
    <!-- configs -->                            fields and presets of every selector that ships with sparsesel
    <!-- selectors -->                          the selectors that ship with sparsesel
    <!-- costs: 131072 -->                      what a step costs with each of them at that context

mkdocs calls `on_config` and `on_page_markdown`.
"""

import importlib
import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sparsesel.cli.show import field_type
from sparsesel.eval.cost import CostConfig, cost_rows, strict_specs
from sparsesel.registry import registry

MARK = re.compile(r"^<!-- (config|model|configs|selectors|costs)(?:: (\S+))? -->$", re.MULTILINE)
REFERENCES = ("full", "exact_topk")


def on_config(config: Any) -> Any:
    """Give every selector that ships with sparsesel its page in the navigation, the references first."""
    (section,) = (entry["Selectors"] for entry in config["nav"] if "Selectors" in entry)
    section += [{name: f"selectors/{name}.md"} for name in ours()]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill a page's comments."""
    return MARK.sub(lambda mark: filled(mark[1], mark[2] or ""), markdown)


def ours() -> list[str]:
    """Names of the selectors that ship with sparsesel, the references first."""
    names = [name for name, found in registry().selectors.items() if found.distribution == "sparsesel"]
    return sorted(names, key=lambda name: (name not in REFERENCES, name))


def filled(what: str, argument: str) -> str:
    """The Markdown that a comment stands for."""
    match what:
        case "config":
            return fields_of(registry().config_class(argument)) + presets_of(argument)
        case "model":
            module, _, name = argument.partition(":")
            return fields_of(getattr(importlib.import_module(module), name))
        case "configs":
            parts = [f"### [`{name}`](selectors/{name}.md)\n\n{filled('config', name)}" for name in ours()]
            return "\n\n".join(parts)
        case "selectors":
            return selectors_table()
        case _:
            return costs_table(int(argument))


def fields_of(model: type[BaseModel]) -> str:
    """Table of a configuration's fields."""
    fields = {name: field for name, field in model.model_fields.items() if name != "name"}
    if not fields:
        return "It has no fields to configure."
    rows = [
        [f"`{name}`", cell(field_type(field)), default_of(field), cell(field.description or "")]
        for name, field in fields.items()
    ]
    return table(["field", "type", "default", "meaning"], rows)


def default_of(field: FieldInfo) -> str:
    """A field's default as one would write it in a file."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{json.dumps(value)}`"


def presets_of(name: str) -> str:
    """Table of a selector's presets, empty if it has none."""
    rows = [
        [f"`{name}:{preset}`", ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in values.items())]
        for preset, values in registry().presets(name).items()
    ]
    return "\n\n" + table(["preset", "sets"], rows) if rows else ""


def selectors_table() -> str:
    """Table of the selectors, with a link to the page of each."""
    rows = []
    for name in ours():
        plugin = registry().get(name).plugin
        presets = ", ".join(f"`{preset}`" for preset in registry().presets(name))
        rows.append([f"[`{name}`]({name}.md)", cell(plugin.summary), presets, cell(plugin.paper)])
    return table(["selector", "what it attends to", "presets", "paper"], rows)


def costs_table(context: int) -> str:
    """Table of costs at the budget of comparisons."""
    known = [spec for spec in strict_specs() if spec.partition(":")[0] in ours()]
    configs = {spec: registry().make_config(spec) for spec in known}
    found = cost_rows(CostConfig(heads=28, kv_heads=4, head_dim=128, layers=28, contexts=(context,)), configs)
    found.sort(key=lambda row: row.bytes_read, reverse=True)
    rows = [
        [
            f"`{row.selector}`",
            f"{row.attended:.0f}",
            *(
                f"{value / 1e6:.1f}"
                for value in (row.key_bytes, row.value_bytes, row.metadata_bytes, row.score_bytes, row.bytes_read)
            ),
            f"{row.state_bytes / 1e6:.1f}",
            f"{row.speedup_full:.2f}×",
            f"{row.speedup_exact:.2f}×",
        ]
        for row in found
    ]
    headings = "selector|attended|keys|values|metadata|scores|read|extra state|over full|over exact"
    return table([*headings.split("|")], rows, numbers=True)


def table(headings: list[str], rows: list[list[str]], *, numbers: bool = False) -> str:
    """Markdown table; with `numbers` all but the first column are aligned to the right."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rule, *rows])


def cell(text: str) -> str:
    """Text that stays within its cell."""
    return text.replace("|", "\\|").replace("\n", " ")
