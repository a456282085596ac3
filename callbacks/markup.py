"""Text for TensorBoard's text tab, which renders Markdown and the tags used here.

What comes from data is always escaped: a policy can write ``<img>`` or ``[x](javascript:...)``, and
Markdown is not applied inside these tags.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def escape(text: str) -> str:
    """Safe inside any tag; control characters that a page cannot hold are shown as a box."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return html.escape(shown)


def heading(text: str) -> str:
    """One line in bold; line breaks become blanks."""
    return f"<h4>{escape(' '.join(text.split()))}</h4>"


def block(text: str) -> str:
    """Text as it is, in type of fixed width."""
    return f"<pre>{escape(text)}</pre>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain cells; line breaks in them are kept."""
    lines = ["<table>", _row("th", header), *(_row("td", row) for row in rows), "</table>"]
    return "".join(lines)


def page(*parts: str) -> str:
    """Parts below each other; the blank line lets Markdown see where a tag ends."""
    return "\n\n".join(parts)


def _row(tag: str, cells: Sequence[str]) -> str:
    inner = "".join(f"<{tag}>{escape(cell).replace(chr(10), '<br>')}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"
