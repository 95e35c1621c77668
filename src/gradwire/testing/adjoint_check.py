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

from gradwire.testing import coordinates
from gradwire.testing.coordinates import Coordinate, Fn
from gradwire.testing.report import (
    GradientError,
    StoreGather,
    check_same_options,
    line,
    raise_if_wrong,
)

ROUNDINGS = 8
"""The default tolerance, in units of the coarsest dtype's rounding error."""


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
    of each rank, so keep inputs small. Inputs may have any floating or complex dtype. To test other
    layouts, transpose or expand inside `op`. If `op` raises on one rank, the check ends as
    described for `gradcheck`.

    Args:
        op: Takes the inputs; returns a tensor or a pytree with tensors. Linear in the tensors that
            require grad, taken together over all ranks.
        inputs: A tensor, or a sequence of arguments; x is those that require grad. Shapes may
            differ by rank.
        group: Process group of the ranks that take part; None for the default group.
        rtol: The two sides may differ by rtol times the sum of their terms' magnitudes; None for
            8 roundings of the coarsest dtype among inputs and outputs.
        seed: Seed of the cotangents y, which are normally distributed.

    Returns:
        True.

    Raises:
        GradientError: On every rank: the sides differ. The message names the rank, the input's
            entry and both values; or says that `op` is not linear.
        MismatchError, PeerFailedError, CollectiveTimeoutError: See `gradcheck`.
        ArgumentError, ArgumentTypeError: Inputs cannot be used, none requires grad, or `op`
            returned no tensor on any rank.

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
    store = StoreGather(group)
    with store.guarded():
        arguments = coordinates.as_inputs(inputs)
    check_same_options(store, {"rtol": rtol, "seed": seed})
    everyone = coordinates.all_coordinates(store.all_gather(coordinates.shapes(arguments)))
    with store.guarded():
        here = coordinates.leaves(arguments)
        outputs = coordinates.outputs_of(op, here)
        ys = coordinates.random_like(outputs, torch.Generator().manual_seed(seed + store.rank))
        xs = [here[i] for i in coordinates.variables(here)]
        gradients = coordinates.vjp(outputs, xs, ys, create_graph=False)[: len(xs)]
        forward, backward = coordinates.inner(outputs, ys), coordinates.inner(xs, gradients)
        units = [_at_unit(op, arguments, ys, c, store.rank) for c in everyone]
        coarsest = max((torch.finfo(t.dtype).eps for t in [*xs, *outputs]), default=0.0)
    mine = [coordinates.parts(gradients), units, forward, backward, coarsest, len(outputs)]
    gathered = store.all_gather(mine)
    coordinates.check_outputs(rank[5] for rank in gathered)
    have = [number for rank in gathered for number in rank[0]]
    tolerance = ROUNDINGS * max(rank[4] for rank in gathered) if rtol is None else rtol
    wrong = []
    for k, (c, a) in enumerate(zip(everyone, have, strict=True)):
        b, size = _summed(rank[1][k] for rank in gathered)
        if not abs(a - b) <= tolerance * max(size, abs(a)):
            wrong.append(line(c, ("backward gives", a), ("the adjoint", b)))
    raise_if_wrong("adjoint", wrong, len(everyone))
    sides = _summed(rank[2] for rank in gathered), _summed(rank[3] for rank in gathered)
    _check_linear(*sides, tolerance)
    return True


def _at_unit(
    op: Fn, inputs: Sequence[Any], ys: Sequence[Tensor], to: Coordinate, rank: int
) -> tuple[float, float]:
    """Return this rank's share of ⟨op(e), y⟩ for a unit vector e, and of its terms' magnitudes."""

    def change(number: int, x: Tensor) -> Tensor:
        x.zero_()
        if (to.rank, to.number) == (rank, number):
            x[to.index] = to.unit
        return x

    return coordinates.inner(coordinates.outputs_of(op, coordinates.leaves(inputs, change)), ys)


def _summed(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
    values, sizes = zip(*pairs, strict=True)
    return math.fsum(values), math.fsum(sizes)


def _check_linear(
    forward: tuple[float, float], backward: tuple[float, float], tolerance: float
) -> None:
    """Raise if the sides differ at the given x although they agree on all unit vectors."""
    if not abs(forward[0] - backward[0]) <= tolerance * max(forward[1], backward[1]):
        raise GradientError(
            f"op is not linear: ⟨op(x), y⟩ is {forward[0]:.9g} and ⟨x, backward(y)⟩ is "
            f"{backward[0]:.9g}, though both agree on every unit vector; gradcheck takes any op"
        )
