"""Text for terminals and log lines."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with its control characters, line breaks among them, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
