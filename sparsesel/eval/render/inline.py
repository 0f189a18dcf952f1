"""Drawings as parts of a page: no style attributes, which its policy forbids, no names that clash, its own colours."""

import re
import xml.etree.ElementTree as ET

from sparsesel.eval.render.draw import GAP, GRID, INK, PAPER

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_THEMED = {INK: "var(--ink)", PAPER: "var(--paper)", GRID: "var(--grid)", GAP: "var(--gap)"}
_PIXELS = 1.5  # for each point of a drawing, where there is room
_WIDE = 360  # points; what is wider scrolls on a phone rather than becoming too small to read
_FAMILY = re.compile(r"font-family:[^;]*;?")
_REFERRING = re.compile(r"([\w-]+): *(url\(#[^)]*\));?")
# What matplotlib writes for every element of its files.
_EVERYWHERE = ".plot svg *{stroke-linejoin:round;stroke-linecap:butt}"


class Inliner:
    """Takes drawings into one page; what they look like becomes rules of its style sheet."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}
        self._drawings = 0

    def inline(self, svg: str, title: str) -> str:
        """An `<svg>` element of the drawing.

        Args:
            svg: As matplotlib writes it.
            title: Read aloud in its place.
        """
        self._drawings += 1
        ET.register_namespace("", _SVG)
        ET.register_namespace("xlink", _XLINK)
        root = ET.fromstring(svg)
        for parent in root.iter():
            for child in list(parent):
                if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                    parent.remove(child)
        for element in root.iter():
            self._restyle(element)
            self._rename(element)
        for name in ("height", "version"):
            root.attrib.pop(name, None)
        width = float(root.attrib["viewBox"].split()[2])
        root.set("width", str(round(_PIXELS * width)))
        if width > _WIDE:
            root.set("class", "wide")
        root.set("role", "img")
        root.set("aria-label", title)
        return ET.tostring(root, encoding="unicode", short_empty_elements=True)

    @property
    def rules(self) -> str:
        """The style sheet's part for all drawings so far."""
        return "\n".join([_EVERYWHERE, *(f".plot .{name}{{{style}}}" for style, name in self._classes.items())])

    def _restyle(self, element: ET.Element) -> None:
        style = element.attrib.pop("style", "")
        for name in ("fill", "stroke"):  # of hatches; an attribute cannot have the page's colours
            if element.get(name) in _THEMED:
                style += f"; {name}: {element.attrib.pop(name)}"
        style = _FAMILY.sub("", style).strip(" ;")
        for colour, themed in _THEMED.items():
            style = style.replace(colour, themed)
        # What refers to a part of the drawing, such as a hatch, cannot stand in rules for all drawings.
        for name, value in _REFERRING.findall(style):
            element.set(name, value)
        style = _REFERRING.sub("", style).strip(" ;")
        if style:
            element.set("class", self._classes.setdefault(style, f"s{len(self._classes)}"))

    def _rename(self, element: ET.Element) -> None:
        """Names are those of one file; here they are told apart by the drawing's number."""
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"d{self._drawings}-{value}")
            elif value.startswith("url(#"):
                element.set(key, f"url(#d{self._drawings}-{value[5:]}")
            elif key in ("href", f"{{{_XLINK}}}href") and value.startswith("#"):
                element.set(key, f"#d{self._drawings}-{value[1:]}")
