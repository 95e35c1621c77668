"""Search for mistakes in data-parallel programs that raise no error: `gradwire check`.

Each rank of a checked program records what it does, by hooks and patches in that process alone
(`gradwire.check.__main__`). Afterwards the checks compare the ranks' records (`conclude`).
"""

from collections.abc import Sequence

from gradwire.check import data, state_checks
from gradwire.check.gradient_checks import needs_more_ranks
from gradwire.check.records import CHECKS, Check, Finding, Run, choose, conclude, run_ranks
from gradwire.check.records import Outcome as Outcome

del data, state_checks  # imported to define the checks

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["CHECKS", "Check", "Finding", "Run", "choose", "conclude"]

_MORE_STEPS = 6


def run_checked(program: Sequence[str], ranks: int, steps: int, timeout: float) -> Outcome:
    """Run a program on the ranks of this host, and if it has to be, once more with more ranks."""
    outcome = run_ranks(program, ranks, steps, timeout)
    # a program may need a number of ranks that divides another number
    for more in (ranks + 1, 2 * ranks) if needs_more_ranks(outcome.run) else ():
        wider = run_ranks(program, more, _MORE_STEPS, timeout, trace=True)
        if not wider.failed and not wider.stalled:
            outcome.run.wider = wider.run
            break
    return outcome
