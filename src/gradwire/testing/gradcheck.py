"""`gradcheck`: first and second derivatives of a function that runs on several ranks.

All ranks' inputs are one point, and L = Σ over ranks of Re⟨cotangent, output⟩ is a function of it.
Moving one entry on one rank changes outputs everywhere; the change of L is what backward must
have given to that entry, on the rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.testing import coordinates
from gradwire.testing.coordinates import Coordinate, Fn
from gradwire.testing.report import StoreGather, check_same_options, line, raise_if_wrong


@dataclass(frozen=True)
class _Options:
    second: bool
    forward: bool
    eps: float
    atol: float
    rtol: float
    seed: int

    def far(self, have: float, want: float) -> bool:
        """Return True if two numbers differ by more than the tolerances; NaN always does."""
        return not abs(have - want) <= self.atol + self.rtol * abs(want)


def gradcheck(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
    *,
    second: bool = True,
    forward: bool = False,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    seed: int = 0,
) -> bool:
    """Compare the derivatives of `fn` with finite differences across the ranks of a group.

    Called on every rank of the group. `fn` is called with moved inputs, twice for each entry of
    each rank: keep inputs small. The objective is the sum over ranks of Re⟨cotangent, output⟩ with
    random cotangents, so that a gradient that is right for one rank's share but misses, doubles or
    permutes another's is found. To try other layouts, transpose or expand inside `fn`.

    If `fn` raises on one rank, that rank raises at once; the others raise `PeerFailedError` as
    soon as they are back from `fn`, at the latest when the group's timeout ends the collective in
    which they wait for that rank.

    Args:
        fn: Takes the inputs; returns a tensor or a pytree with tensors. The same point must give
            the same values, and the shapes must not depend on values.
        inputs: A tensor, or a sequence of arguments. Those float64 and complex128 tensors that
            require grad are what is differentiated by. Shapes may differ by rank.
        group: Process group whose ranks' inputs form the point; None for the default group.
        second: Check second derivatives too: those of the gradient, by inputs and cotangents.
        forward: Check forward mode (`torch.autograd.forward_ad`) too.
        eps: Half the distance of the two points of a finite difference.
        atol: A derivative d may differ from the finite difference f by atol + rtol·abs(f).
        rtol: See `atol`.
        seed: Seed of cotangents and tangents.

    Returns:
        True.

    Raises:
        GradientError: On every rank: a derivative is wrong. The message names the rank, the
            input's entry and both values.
        MismatchError: Ranks were given different options.
        PeerFailedError: `fn`, or the check of this rank's inputs, raised on another rank.
        CollectiveTimeoutError: A rank of the group did not call.
        ArgumentError, ArgumentTypeError: An input is not of double precision, none requires grad,
            or `fn` returned no tensor on any rank.

    Example:
        Σx, written with torch.distributed alone, forgets what other ranks' losses get from x:

        >>> from gradwire.testing import GradientError, gradcheck
        >>> class Total(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):  # rank 0: [1.], rank 1: [2.]
        ...         total = x.clone()
        ...         dist.all_reduce(total)  # both: [3.]
        ...         return total
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad  # the adjoint sums it over the ranks
        >>> def check():
        ...     x = torch.tensor([dist.get_rank() + 1.0], dtype=torch.float64, requires_grad=True)
        ...     try:
        ...         gradcheck(Total.apply, x)
        ...     except GradientError as error:
        ...         return str(error)
        >>> print(run_ranks(check)[1])
        first derivatives: 2 of 2 entries differ
          rank 0, inputs[0][0]: backward gives ..., finite differences ...
          rank 1, inputs[0][0]: backward gives ..., finite differences ...
    """
    options = _Options(second, forward, eps, atol, rtol, seed)
    store = StoreGather(group)
    with store.guarded():
        arguments = coordinates.as_inputs(inputs)
        _check_precision(arguments)
    check_same_options(store, asdict(options))
    cotangents = _check_backward("first derivatives", fn, arguments, store, options)
    if forward:
        _check_forward(fn, arguments, store, options)
    if second:
        with store.guarded():
            ys = [y.requires_grad_() for y in cotangents]
        gradient = _gradient_of(fn, len(arguments))
        _check_backward("second derivatives", gradient, [*arguments, *ys], store, options)
    return True


def _check_precision(inputs: Sequence[Any]) -> None:
    for i in coordinates.variables(inputs):
        if inputs[i].dtype not in (torch.float64, torch.complex128):
            raise ArgumentError(
                f"inputs[{i}] is {inputs[i].dtype}, in which finite differences are too coarse: "
                "use torch.float64 or torch.complex128; adjoint_check takes every dtype"
            )


def _check_backward(
    what: str, fn: Fn, inputs: Sequence[Any], store: StoreGather, options: _Options
) -> list[Tensor]:
    """Compare the gradient by backward with finite differences; the cotangents that were used."""
    everyone = coordinates.all_coordinates(store.all_gather(coordinates.shapes(inputs)))
    with store.guarded():
        here = coordinates.leaves(inputs)
        outputs = coordinates.outputs_of(fn, here)
        generator = torch.Generator().manual_seed(options.seed + store.rank)
        ys = coordinates.random_like(outputs, generator)
        xs = [here[i] for i in coordinates.variables(here)]
        gradients = coordinates.vjp(outputs, xs, ys, create_graph=False)
        have = coordinates.parts(gradients[: len(xs)])
        shares = [_slope(fn, inputs, ys, c, store.rank, options.eps) for c in everyone]
    gathered = store.all_gather([have, shares, len(outputs)])
    coordinates.check_outputs(rank[2] for rank in gathered)
    slopes = [math.fsum(rank[1][k] for rank in gathered) for k in range(len(everyone))]
    gradient = [number for rank in gathered for number in rank[0]]
    wrong = [
        line(c, ("backward gives", a), ("finite differences", b))
        for c, a, b in zip(everyone, gradient, slopes, strict=True)
        if options.far(a, b)
    ]
    raise_if_wrong(what, wrong, len(everyone))
    return ys


def _slope(
    fn: Fn, inputs: Sequence[Any], ys: Sequence[Tensor], to: Coordinate, rank: int, eps: float
) -> float:
    """Return this rank's share of the change of L along a coordinate of any rank."""

    def loss(step: float) -> float:
        def change(number: int, x: Tensor) -> Tensor:
            if (to.rank, to.number) == (rank, number):
                x[to.index] += step * to.unit
            return x

        return coordinates.inner(
            coordinates.outputs_of(fn, coordinates.leaves(inputs, change)), ys
        )[0]

    return (loss(eps) - loss(-eps)) / (2 * eps)


def _gradient_of(fn: Fn, count: int) -> Fn:
    """Return the gradient as a function of the inputs and the cotangents.

    Of all leaves, so that a rank takes part whose own input the function does not use.
    """

    def gradient(*arguments: Any) -> list[Tensor]:
        inputs, ys = arguments[:count], arguments[count:]
        xs = [inputs[i] for i in coordinates.variables(inputs)]
        return coordinates.vjp(coordinates.outputs_of(fn, inputs), xs, ys, create_graph=True)

    return gradient


def _check_forward(fn: Fn, inputs: Sequence[Any], store: StoreGather, options: _Options) -> None:
    """Compare each output's tangent, along a random direction of all ranks' inputs."""
    with store.guarded():
        generator = torch.Generator().manual_seed(options.seed + store.rank)
        numbers = coordinates.variables(inputs)
        drawn = coordinates.random_like([inputs[i] for i in numbers], generator)
        direction = dict(zip(numbers, drawn, strict=True))

        def outputs_at(step: float) -> list[Tensor]:
            moved = coordinates.leaves(inputs, lambda i, x: x + step * direction[i])
            return [out.detach() for out in coordinates.outputs_of(fn, moved)]

        have = _tangents(fn, inputs, direction)
        pairs = zip(outputs_at(options.eps), outputs_at(-options.eps), strict=True)
        want = [(high - low) / (2 * options.eps) for high, low in pairs]
        wrong = _wrong_tangents(have, want, store.rank, options)
        count = len(coordinates.parts(want))
    gathered = store.all_gather([wrong, count])
    wrong = [text for rank in gathered for text in rank[0]]
    raise_if_wrong("forward mode", wrong, sum(rank[1] for rank in gathered))


def _tangents(fn: Fn, inputs: Sequence[Any], direction: dict[int, Tensor]) -> list[Tensor]:
    with forward_ad.dual_level():
        duals = coordinates.leaves(inputs)
        for i, tangent in direction.items():
            duals[i] = forward_ad.make_dual(duals[i], tangent)
        unpacked = [forward_ad.unpack_dual(out) for out in coordinates.outputs_of(fn, duals)]
        return [
            torch.zeros_like(u.primal) if u.tangent is None else u.tangent.detach()
            for u in unpacked
        ]


def _wrong_tangents(
    have: Sequence[Tensor], want: Sequence[Tensor], rank: int, options: _Options
) -> list[str]:
    entries = [
        Coordinate(rank, number, *entry, of="outputs")
        for number, out in enumerate(want)
        for entry in coordinates.entries(out.shape, out.is_complex())
    ]
    triples = zip(entries, coordinates.parts(have), coordinates.parts(want), strict=True)
    return [
        line(c, ("forward mode gives", a), ("finite differences", b))
        for c, a, b in triples
        if options.far(a, b)
    ]
