"""Text of files that someone else may have written, on its way to the page."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

#: Longer than any sentence that sagegen writes into a journal.
MOST_CHARACTERS = 300


def cut_text(text: str) -> str:
    """The text, its end left out where it is longer than `MOST_CHARACTERS`."""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def show_text(value: Any) -> Any:
    """What an expression of a template puts on the page: strings in printable characters.

    Control characters, bidirectional overrides and lone surrogates are spelled out, as `\\x1b`; jinja2 escapes after.
    """
    if value is None:
        return "–"
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)
