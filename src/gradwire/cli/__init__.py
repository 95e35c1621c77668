"""The `gradwire` command.

What it shows on the terminal needs packages that the library itself does without (the extra `cli`,
and `demo` for the demo's data), so this file imports none of them until it knows that they are
there.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec

__all__ = ["main"]

_COMMAND = ("click", "rich")
_DEMO = (*_COMMAND, "sklearn", "numpy")


def main() -> None:
    """Run the command line in `sys.argv`; ends the interpreter with the command's exit code."""
    extra, needed = ("demo", _DEMO) if sys.argv[1:2] == ["demo"] else ("cli", _COMMAND)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.exit(
            f"gradwire: the command needs {', '.join(missing)}, not installed here.\n"
            f'Install what is missing with:  pip install "gradwire[{extra}]"'
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # for what a terminal's encoding lacks, such as µ
    from gradwire.cli.app import app

    app(prog_name="gradwire")
