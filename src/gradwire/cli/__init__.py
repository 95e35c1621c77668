"""The `gradwire` command.

What it shows on the terminal needs packages that the library itself does without (the extra
`demo`), so this file imports none of them until it knows that they are there.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec

__all__ = ["main"]

_COMMAND = ("click", "rich")
_DEMO = (*_COMMAND, "sklearn", "numpy")
_WITHOUT_DATA = ("doctor", "explain", "plan", "run", "timeline")


def main() -> None:
    """Run the command line in `sys.argv`; ends the interpreter with the command's exit code."""
    needed = _COMMAND if sys.argv[1:2] and sys.argv[1] in _WITHOUT_DATA else _DEMO
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.exit(
            f"gradwire: the command needs {', '.join(missing)}, not installed here.\n"
            'Install what is missing with:  pip install "gradwire[demo]"'
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # for what a terminal's encoding lacks, such as µ
    from gradwire.cli.app import app

    app(prog_name="gradwire")
