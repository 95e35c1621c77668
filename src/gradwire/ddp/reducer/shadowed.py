"""What ranks that have run out of input wait for: in `join()`, one backward for each forward."""

from __future__ import annotations

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.ddp.reducer.backward import Backward
from gradwire.errors import ReductionError
from gradwire.recorder import failed


def check_over(backward: Backward) -> None:
    """Before the ranks meet outside of a backward: let none wait for this one.

    Nor for one of another module of the group, as in `Join([generator, discriminator])`: who has
    run out takes part in the forward and the backward of one, then in those of the next.

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
    """Before the first message of a backward: the others wait for the first one of a forward alone.

    From then on they wait for the next forward, and take part in no resynchronization before it.
    Nothing was sent: without this backward, the ranks are in step.

    Raises:
        ReductionError: It is a second one.
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
