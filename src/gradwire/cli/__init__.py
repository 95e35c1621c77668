"""The `gradwire` command.

The command needs packages that the library does not need: the extra `cli`, and `demo` for the demo.
This module imports them only after checking that they are installed.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec

from gradwire_autoload import check_variables

__all__ = ["main"]

_COMMAND = ("click", "rich")
_DEMO = (*_COMMAND, "sklearn", "numpy")


def main() -> None:
    """Run the command line in `sys.argv` and exit with the command's exit code."""
    extra, needed = ("demo", _DEMO) if sys.argv[1:2] == ["demo"] else ("cli", _COMMAND)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.exit(
            f"gradwire: the command needs {', '.join(missing)}, which are not installed.\n"
            f'Install them with:  pip install "gradwire[{extra}]"'
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # for characters that an encoding lacks, such as µ
    try:
        check_variables()
    except ValueError as error:
        sys.exit(f"gradwire: {error}")
    from gradwire.cli.app import app

    app(prog_name="gradwire")
