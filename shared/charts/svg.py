"""SVG and HTML elements as text. Whatever comes from outside is escaped, and characters XML forbids are removed."""

import re

from markupsafe import Markup, escape

_EMPTY = {"circle", "image", "line", "path", "rect"}  # elements that may end at once
_LARGEST = 1e12
# XML 1.0 allows no control characters but these three, no surrogates and no noncharacters, not even as references.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text(value: object) -> Markup:
    """Return text that can stand anywhere in XML or HTML, also in attributes."""
    return value if isinstance(value, Markup) else escape(_FORBIDDEN.sub("\ufffd", str(value)))


def shortened(value: str, most: int) -> str:
    """Return the text with at most this many characters."""
    return value if len(value) <= most else value[: most - 1].rstrip() + "…"


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    shown = f"{value:.1f}".removesuffix(".0")
    return "0" if shown == "-0" else shown


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Return an element. Attributes that are None are left out; `_` in their names means `-`, at the end nothing."""
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, float) else text(value)
            parts.append(f' {name.rstrip("_").replace("_", "-")}="{shown}"')
    inner = "".join(text(part) for part in content)
    parts.append(f">{inner}</{tag}>" if inner or tag not in _EMPTY else "/>")
    return Markup("".join(parts))  # noqa: S704 - every part has been escaped


def joined(*parts: object) -> Markup:
    """Return the parts one after the other."""
    return Markup("").join(text(part) for part in parts)


def picture(width: float, height: float, description: str, *content: object, kind: str = "") -> Markup:
    """Return a whole `<svg>` whose text alternative is the description."""
    return element(
        "svg",
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=description,
        class_=f"plot {kind}".strip(),
    )


def is_number(value: float | None) -> bool:
    """Return whether a value can be drawn: measurements may be missing, NaN, infinite or absurd."""
    return value is not None and abs(value) <= _LARGEST  # false for NaN
