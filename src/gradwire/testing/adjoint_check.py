"""`adjoint_check`: a linear function on several ranks, and its backward, are each other's adjoint.

⟨F x, y⟩ = ⟨x, F* y⟩, both summed over ranks, for the given x and for every unit vector: since F is
linear this needs no small steps, and so holds in every dtype up to its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.testing import point
from gradwire.testing.exchange import Exchange
from gradwire.testing.point import Coordinate, Fn
from gradwire.testing.verdict import GradientError, agree, conclude, line

__all__ = ["adjoint_check"]

ROUNDINGS = 8
"""How many roundings of the coarsest dtype one entry may have gone through, each way."""


def adjoint_check(
    op: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
    *,
    rtol: float | None = None,
    seed: int = 0,
) -> bool:
    """Check that a linear op's backward is its adjoint: ⟨op(x), y⟩ = ⟨x, backward(y)⟩.

    Called on every rank of the group; the inner products are real parts, summed over ranks. They
    are compared for the given inputs and for each unit vector: `op` is called once for each entry
    of each rank, so keep inputs small. Any floating or complex dtype. To try other layouts,
    transpose or expand inside `op`. An op that raises on one rank ends the check as `gradcheck`
    says.

    Args:
        op: Takes the inputs; returns a tensor or a pytree with tensors. Linear in the tensors that
            require grad, taken together over all ranks.
        inputs: A tensor, or a sequence of arguments; x is those that require grad. Shapes may
            differ by rank.
        group: Whose ranks take part; None for the default group.
        rtol: The two sides may differ by rtol times the sum of their terms' magnitudes; None for
            8 roundings of the coarsest dtype among inputs and outputs.
        seed: Of the cotangents y, which are normal.

    Returns:
        True.

    Raises:
        GradientError: On every rank: the sides differ. The message names the rank, the input's
            entry and both values; or says that `op` is not linear.
        MismatchError, PeerFailedError, CollectiveTimeoutError: As `gradcheck`.
        ArgumentError, ArgumentTypeError: Inputs cannot be used, or none requires grad.

    Example:
        The mean over ranks, whose backward forgets to divide:

        >>> from gradwire.testing import GradientError, adjoint_check
        >>> class Mean(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         total = x.clone()
        ...         dist.all_reduce(total)
        ...         return total / 2
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         total = grad.clone()
        ...         dist.all_reduce(total)
        ...         return total
        >>> def check():
        ...     try:
        ...         adjoint_check(Mean.apply, torch.ones(1, dtype=torch.bfloat16).requires_grad_())
        ...     except GradientError as error:
        ...         return str(error)
        >>> print(run_ranks(check)[0])
        adjoint: 2 of 2 entries differ
          rank 0, inputs[0][0]: backward gives ..., the adjoint ...
          rank 1, inputs[0][0]: backward gives ..., the adjoint ...

    Source:
        R. J. Hewett, T. J. Grady II, "A Linear Algebraic Approach to Model Parallelism in Deep
        Learning", 2020: adjoint tests of communication.
    """
    exchange = Exchange(group)
    with exchange.guarded():
        arguments = point.as_inputs(inputs)
    agree(exchange, {"rtol": rtol, "seed": seed})
    everyone = point.coordinates(exchange.all_gather(point.shapes(arguments)))
    with exchange.guarded():
        here = point.leaves(arguments)
        outputs = point.outputs_of(op, here)
        ys = point.random_like(outputs, torch.Generator().manual_seed(seed + exchange.rank))
        xs = [here[i] for i in point.variables(here)]
        pulled = point.pulled_back(outputs, xs, ys, create_graph=False)[: len(xs)]
        forward, backward = point.inner(outputs, ys), point.inner(xs, pulled)
        units = [_at_unit(op, arguments, ys, c, exchange.rank) for c in everyone]
        coarsest = max((torch.finfo(t.dtype).eps for t in [*xs, *outputs]), default=0.0)
    told = exchange.all_gather([point.parts(pulled), units, forward, backward, coarsest])
    have = [number for rank in told for number in rank[0]]
    tolerance = ROUNDINGS * max(rank[4] for rank in told) if rtol is None else rtol
    wrong = []
    for k, (c, a) in enumerate(zip(everyone, have, strict=True)):
        b, size = _summed(rank[1][k] for rank in told)
        if not abs(a - b) <= tolerance * max(size, abs(a)):
            wrong.append(line(c, ("backward gives", a), ("the adjoint", b)))
    conclude("adjoint", wrong, len(everyone))
    sides = _summed(rank[2] for rank in told), _summed(rank[3] for rank in told)
    _check_linear(*sides, tolerance)
    return True


def _at_unit(
    op: Fn, inputs: Sequence[Any], ys: Sequence[Tensor], to: Coordinate, rank: int
) -> tuple[float, float]:
    """This rank's share of ⟨op(e), y⟩ for the unit vector e, and of the sum of magnitudes."""

    def change(number: int, x: Tensor) -> Tensor:
        x.zero_()
        if (to.rank, to.number) == (rank, number):
            x[to.index] = to.unit
        return x

    return point.inner(point.outputs_of(op, point.leaves(inputs, change)), ys)


def _summed(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
    values, sizes = zip(*pairs, strict=True)
    return math.fsum(values), math.fsum(sizes)


def _check_linear(
    forward: tuple[float, float], backward: tuple[float, float], tolerance: float
) -> None:
    """Both sides at the given x; entries agree by now, so that only op itself can be at fault."""
    if not abs(forward[0] - backward[0]) <= tolerance * max(forward[1], backward[1]):
        raise GradientError(
            f"op is not linear: ⟨op(x), y⟩ is {forward[0]:.9g} and ⟨x, backward(y)⟩ is "
            f"{backward[0]:.9g}, though both agree on every unit vector; gradcheck takes any op"
        )
