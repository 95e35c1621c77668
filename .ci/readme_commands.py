"""README's commands for contributors, so that CI runs what newcomers read.

Prints the NUMBER-th of the two ``sh`` blocks under "Developing gradwire", and fails when there are
not exactly two: `python readme_commands.py README.md NUMBER`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HEADING = "Developing gradwire"


def commands_for_contributors(readme: str) -> list[str]:
    """The contents of the two ``sh`` blocks under the heading "Developing gradwire"."""
    section = re.search(
        r"^## Developing gradwire$(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL
    )
    if section is None:
        raise SystemExit(f'README has no section "## {HEADING}" to take commands from')
    blocks = re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    commands = [block.strip() for block in blocks]
    if len(commands) != 2 or not all(commands):
        raise SystemExit(
            f'README\'s "{HEADING}" must hold exactly two ```sh blocks, each with a command; '
            f"found {len(commands)}: {commands}"
        )
    return commands


if __name__ == "__main__":
    path, number = sys.argv[1:]
    print(commands_for_contributors(Path(path).read_text(encoding="utf-8"))[int(number) - 1])
