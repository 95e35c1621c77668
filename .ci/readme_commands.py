"""README's quick start as commands, so that CI runs the commands that newcomers read.

Prints the NUMBER-th of the two ``sh`` blocks under "Quick start", and fails when there are
not exactly two: `python readme_commands.py README.md NUMBER`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def quick_start_commands(readme: str) -> list[str]:
    """The contents of the two ``sh`` blocks under the heading "Quick start"."""
    section = re.search(r"^## Quick start$(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SystemExit('README has no section "## Quick start" to take commands from')
    blocks = re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    commands = [block.strip() for block in blocks]
    if len(commands) != 2 or not all(commands):
        raise SystemExit(
            f'README\'s "Quick start" must hold exactly two ```sh blocks, each with a command; '
            f"found {len(commands)}: {commands}"
        )
    return commands


if __name__ == "__main__":
    path, number = sys.argv[1:]
    print(quick_start_commands(Path(path).read_text(encoding="utf-8"))[int(number) - 1])
