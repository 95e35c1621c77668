"""Checks in `join()`: ranks that have run out of input wait for one backward per forward."""

from __future__ import annotations

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.ddp.reducer.backward import Backward
from gradwire.errors import ReductionError
from gradwire.recorder import failed


def check_over(backward: Backward) -> None:
    """Raise if ranks wait for this backward. Called before other communication.

    The check includes backwards of the group's other modules, as in `Join([generator,
    discriminator])`: a rank that has run out of input takes part in the forward and the backward of
    one module, then in those of the next.

    Raises:
        ReductionError: A forward had no backward.
    """
    shadowed = [b for b in (backward, *backward.others()) if b.shadowed]
    if any(b.state is BackwardState.AWAITING for b in shadowed):
        backward.raise_not_finalized()
    if any(b.state in (BackwardState.EXPECTED, BackwardState.SHORT) for b in shadowed):
        backward.recover()
        backward.domain.fail(
            ReductionError(
                "a forward in join() had no backward, for which ranks that have run out of input "
                "wait: run it under no_sync() or torch.no_grad(), or its backward first"
            )
        )


def check_first(backward: Backward) -> None:
    """Raise for a second backward of one forward, before its first message.

    Ranks that have run out of input take part in the first one only. Then they wait for the next
    forward, and do not resynchronize before it. As nothing was sent, the ranks stay in step.

    Raises:
        ReductionError: This is the second backward of a forward.
    """
    if backward.shadowed and backward.state is BackwardState.RUNNING_AGAIN:
        backward.buckets.take_back()
        backward.reset()
        error = ReductionError(
            "a second backward of one forward in join(), for which ranks that have run out of "
            "input do not wait: run one backward of the sum of the losses"
        )
        failed(error)
        raise error
