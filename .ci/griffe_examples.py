"""Lets the docs read a docstring's "Example:" as they read "Examples:": as code, not as prose."""

from __future__ import annotations

import re

import griffe


class ExampleSections(griffe.Extension):
    """Renames the sections before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each module, class, function and attribute that is loaded."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
