"""Search for mistakes in data-parallel programs that raise no error: `gradwire check`.

Each rank of a checked program records what it does, by hooks and patches in that process alone
(`gradwire.check.__main__`). Afterwards the checks compare the ranks' records (`conclude`).
"""

from gradwire.check import data, gradient_checks, state_checks
from gradwire.check.records import Check, Finding, Run, choose, conclude
from gradwire.check.records import Outcome as Outcome
from gradwire.check.records import run_checked as run_checked

del data, gradient_checks, state_checks  # imported to define the checks

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["CHECKS", "Check", "Finding", "Run", "choose", "conclude"]

CHECKS = tuple(kind() for kind in Check.__subclasses__())
"""All checks, in the order of their definitions, which is that of the report."""
