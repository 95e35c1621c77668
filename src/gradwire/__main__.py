"""`python -m gradwire` is the `gradwire` command."""

from __future__ import annotations

from gradwire.cli import main

if __name__ == "__main__":  # the demo's own processes import this file and must not start it again
    main()
