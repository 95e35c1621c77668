"""Derivatives of a function that runs on several ranks: `gradcheck` and `adjoint_check`.

All ranks' inputs are one point, a real vector in which a complex entry has two coordinates, and
L = Σ over ranks of Re⟨cotangent, output⟩ is a function of it. Moving one entry on one rank changes
outputs everywhere; the change of L is what backward must have given to that entry, on the rank that
holds it.

Values and errors travel through the group's store: the function under test uses the group's
collectives, and may use them wrongly, so that one of the check could be matched with one of the
function.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import PrefixStore, ProcessGroup

from gradwire._containers import tensors_in
from gradwire._groups import check_group, default_group, store_of, values_of_ranks
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    MismatchError,
    PeerFailedError,
)

Fn: TypeAlias = Callable[..., Any]

EPS = 1e-6
"""Half the distance of the two points of a finite difference."""
ATOL, RTOL = 1e-5, 1e-3
ROUNDINGS = 8
"""Tolerance of `adjoint_check`, in units of the coarsest dtype's rounding error."""
SEED = 0
REAL, IMAGINARY = "real part", "imaginary part"
MAX_LINES = 8


class GradientError(DistributedError, AssertionError):
    """A derivative is wrong: the message names the rank, the input's entry, and both values.

    Every rank of the check raises it, with the same message.
    """


def gradcheck(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
    *,
    forward: bool = False,
) -> bool:
    """Compare the derivatives of `fn` with finite differences across the ranks of a group.

    First and second derivatives are compared, the latter by inputs and cotangents. Called on every
    rank of the group. `fn` is called with moved inputs, twice for each entry of each rank: keep
    inputs small. The objective is the sum over ranks of Re⟨cotangent, output⟩ with random
    cotangents, so that a gradient that is right for one rank's share but misses, doubles or
    permutes another's is found. A derivative d may differ from the finite difference f by
    1e-5 + 1e-3·abs(f). To try other layouts, transpose or expand inside `fn`.

    If `fn` raises on one rank, that rank raises at once; the others raise `PeerFailedError` as
    soon as they are back from `fn`, at the latest when the group's timeout ends the collective in
    which they wait for that rank.

    Args:
        fn: Takes the inputs; returns a tensor or a pytree with tensors. The same point must give
            the same values, and the shapes must not depend on values.
        inputs: A tensor, or a sequence of arguments. Those float64 and complex128 tensors that
            require grad are what is differentiated by. Shapes may differ by rank.
        group: Process group whose ranks' inputs form the point; None for the default group.
        forward: Check forward mode (`torch.autograd.forward_ad`) too.

    Returns:
        True.

    Raises:
        GradientError: On every rank: a derivative is wrong. The message names the rank, the
            input's entry and both values.
        MismatchError: Ranks called different checks.
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
    ranks = _Ranks(group)
    with ranks.guarded():
        arguments = _as_inputs(inputs)
        for i in _variables(arguments):
            if arguments[i].dtype not in (torch.float64, torch.complex128):
                raise ArgumentError(
                    f"inputs[{i}] is {arguments[i].dtype}, in which finite differences are too "
                    "coarse: use torch.float64 or torch.complex128; adjoint_check takes every dtype"
                )
    ys = _compare_with_differences("first derivatives", fn, arguments, ranks)
    if forward:
        _check_forward(fn, arguments, ranks)

    def gradient(*moved: Any) -> list[Tensor]:
        # of all leaves, so that a rank takes part whose own input the function does not use
        given, cotangents = moved[: len(arguments)], moved[len(arguments) :]
        xs = [given[i] for i in _variables(given)]
        return _vjp(_outputs_of(fn, given), xs, cotangents, create_graph=True)

    with ranks.guarded():
        ys = [y.requires_grad_() for y in ys]
    _compare_with_differences("second derivatives", gradient, [*arguments, *ys], ranks)
    return True


def adjoint_check(
    op: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
) -> bool:
    """Check that a linear op's backward is its adjoint: ⟨op(x), y⟩ = ⟨x, backward(y)⟩.

    Called on every rank of the group; the inner products are real parts, summed over ranks. They
    are compared for the given inputs and for each unit vector: `op` is called once for each entry
    of each rank, so keep inputs small. Since `op` is linear, this needs no small steps, and so
    holds in every floating or complex dtype: the two sides may differ by 8 roundings of the
    coarsest dtype among inputs and outputs, times the sum of their terms' magnitudes. To test other
    layouts, transpose or expand inside `op`. If `op` raises on one rank, the check ends as
    described for `gradcheck`.

    Args:
        op: Takes the inputs; returns a tensor or a pytree with tensors. Linear in the tensors that
            require grad, taken together over all ranks.
        inputs: A tensor, or a sequence of arguments; x is those that require grad. Shapes may
            differ by rank.
        group: Process group of the ranks that take part; None for the default group.

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
    ranks = _Ranks(group)
    with ranks.guarded():
        arguments = _as_inputs(inputs)

    def at_unit(to: _Coordinate, ys: Sequence[Tensor]) -> tuple[float, float]:
        def unit(number: int, x: Tensor) -> Tensor:
            x.zero_()
            if (to.rank, to.number) == (ranks.rank, number):
                x[to.index] = to.unit
            return x

        return _inner(_outputs_of(op, _leaves(arguments, unit)), ys)

    tolerance = 0.0

    def far(have: float, want: float, size: float, coarsest: float) -> bool:
        nonlocal tolerance
        tolerance = ROUNDINGS * coarsest
        return not abs(have - want) <= tolerance * max(size, abs(have))

    words = ("adjoint", "the adjoint")
    _, forward, backward = _compare(words, op, arguments, ranks, at_unit, far)
    # the sides at the given inputs, although they agree on all unit vectors
    if not abs(forward[0] - backward[0]) <= tolerance * max(forward[1], backward[1]):
        raise GradientError(
            f"op is not linear: ⟨op(x), y⟩ is {forward[0]:.9g} and ⟨x, backward(y)⟩ is "
            f"{backward[0]:.9g}, though both agree on every unit vector; gradcheck takes any op"
        )
    return True


def _compare_with_differences(
    what: str, fn: Fn, inputs: Sequence[Any], ranks: _Ranks
) -> list[Tensor]:
    """Compare backward with finite differences; return the cotangents that were used."""

    def slope(to: _Coordinate, ys: Sequence[Tensor]) -> tuple[float, float]:
        def loss(step: float) -> float:
            def change(number: int, x: Tensor) -> Tensor:
                if (to.rank, to.number) == (ranks.rank, number):
                    x[to.index] += step * to.unit
                return x

            return _inner(_outputs_of(fn, _leaves(inputs, change)), ys)[0]

        return (loss(EPS) - loss(-EPS)) / (2 * EPS), 0.0

    def far(have: float, want: float, size: float, coarsest: float) -> bool:
        return _far(have, want)

    return _compare((what, "finite differences"), fn, inputs, ranks, slope, far)[0]


def _far(have: float, want: float) -> bool:
    """Return True if two numbers differ by more than the tolerances; NaN always does."""
    return not abs(have - want) <= ATOL + RTOL * abs(want)


def _compare(
    words: tuple[str, str],
    fn: Fn,
    inputs: Sequence[Any],
    ranks: _Ranks,
    share: Callable[[_Coordinate, Sequence[Tensor]], tuple[float, float]],
    far: Callable[[float, float, float, float], bool],
) -> tuple[list[Tensor], tuple[float, float], tuple[float, float]]:
    """Compare what backward gives to each entry of each rank with the sum of all ranks' shares.

    Args:
        words: Names of the comparison, and of what backward is compared with.
        fn: Function under test.
        inputs: Its arguments on this rank.
        ranks: Ranks of the check.
        share: This rank's share of L's derivative along a coordinate, and its terms' magnitudes.
        far: True if two derivatives differ, given their terms' magnitudes and the coarsest dtype's
            rounding error.

    Returns:
        Cotangents, and ⟨output, cotangent⟩ and ⟨input, gradient⟩ with their terms' magnitudes.
    """
    shapes = [(i, [*inputs[i].shape], inputs[i].is_complex()) for i in _variables(inputs)]
    everyone = [
        _Coordinate(rank, number, *entry)
        for rank, found in enumerate(ranks.gather(f"shapes, {words[0]}", shapes))
        for number, shape, is_complex in found
        for entry in _entries(shape, is_complex)
    ]
    if not everyone:
        raise ArgumentError(
            "inputs have no entry that requires grad on any rank: call requires_grad_() on those "
            "that are to be checked"
        )
    with ranks.guarded():
        here = _leaves(inputs)
        outputs = _outputs_of(fn, here)
        ys = _random_like(outputs, ranks.rank)
        xs = [here[i] for i in _variables(here)]
        gradients = _vjp(outputs, xs, ys, create_graph=False)[: len(xs)]
        shares = [share(c, ys) for c in everyone]
        coarsest = max((torch.finfo(t.dtype).eps for t in [*xs, *outputs]), default=0.0)
        sides = [_inner(outputs, ys), _inner(xs, gradients)]
    mine = [_parts(gradients), shares, coarsest, sides, len(outputs)]
    gathered = ranks.gather(words[0], mine)
    if not any(rank[4] for rank in gathered):  # every derivative would pass the check
        raise ArgumentError(
            "fn returned no floating-point or complex tensor on any rank, so that there is nothing "
            "to check: return a tensor, or tensors in lists, dicts and the like"
        )
    have = [number for rank in gathered for number in rank[0]]
    coarsest = max(rank[2] for rank in gathered)
    wrong = []
    for k, (c, a) in enumerate(zip(everyone, have, strict=True)):
        b, size = _summed(rank[1][k] for rank in gathered)
        if far(a, b, size, coarsest):
            wrong.append(f"{c}: backward gives {a:.9g}, {words[1]} {b:.9g}")
    _raise_if_wrong(words[0], wrong, len(everyone))
    return ys, _summed(rank[3][0] for rank in gathered), _summed(rank[3][1] for rank in gathered)


def _check_forward(fn: Fn, inputs: Sequence[Any], ranks: _Ranks) -> None:
    """Compare each output's tangent, along a random direction of all ranks' inputs."""
    with ranks.guarded():
        numbers = _variables(inputs)
        drawn = _random_like([inputs[i] for i in numbers], ranks.rank)
        direction = dict(zip(numbers, drawn, strict=True))

        def outputs_at(step: float) -> list[Tensor]:
            moved = _leaves(inputs, lambda i, x: x + step * direction[i])
            return [out.detach() for out in _outputs_of(fn, moved)]

        with forward_ad.dual_level():
            duals = _leaves(inputs)
            for i, tangent in direction.items():
                duals[i] = forward_ad.make_dual(duals[i], tangent)
            unpacked = [forward_ad.unpack_dual(out) for out in _outputs_of(fn, duals)]
            have = [
                torch.zeros_like(u.primal) if u.tangent is None else u.tangent.detach()
                for u in unpacked
            ]
        pairs = zip(outputs_at(EPS), outputs_at(-EPS), strict=True)
        want = [(high - low) / (2 * EPS) for high, low in pairs]
        entries = [
            _Coordinate(ranks.rank, number, *entry, of="outputs")
            for number, out in enumerate(want)
            for entry in _entries(out.shape, out.is_complex())
        ]
        wrong = [
            f"{c}: forward mode gives {a:.9g}, finite differences {b:.9g}"
            for c, a, b in zip(entries, _parts(have), _parts(want), strict=True)
            if _far(a, b)
        ]
    gathered = ranks.gather("forward mode", [wrong, len(entries)])
    wrong = [text for rank in gathered for text in rank[0]]
    _raise_if_wrong("forward mode", wrong, sum(rank[1] for rank in gathered))


def _raise_if_wrong(what: str, wrong: Sequence[str], count: int) -> None:
    if not wrong:
        return
    shown = [f"  {text}" for text in wrong[:MAX_LINES]]
    if len(wrong) > MAX_LINES:
        shown.append(f"  … and {len(wrong) - MAX_LINES} more")
    raise GradientError("\n".join([f"{what}: {len(wrong)} of {count} entries differ", *shown]))


class _Ranks:
    """Ranks of one check, which gather values in the same order."""

    def __init__(self, group: ProcessGroup | None) -> None:
        group = default_group("group") if group is None else check_group(group)
        store = store_of(group, "the check gathers")
        self.rank, self._size = group.rank(), group.size()
        number = store.add(f"gradwire/checks/{self.rank}", 1)
        self._store = PrefixStore(f"gradwire/check{number}", store)
        self._gathers = 0

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, so that none waits for this one."""
        try:
            yield
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._store.set("failed", f"rank {self.rank}: {text}")
            raise

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; values are converted to JSON and back.

        Raises:
            PeerFailedError: Another rank's `guarded` block raised.
            CollectiveTimeoutError: A rank did not call it within the store's timeout.
            MismatchError: Ranks gather something else.
        """
        self._store.set(f"{self._gathers}/{self.rank}", json.dumps([what, value]))
        values = values_of_ranks(
            self._store,
            str(self._gathers),
            self._size,
            "finish the check, which every rank of the group must call,",
            check=self._raise_failure,
            poll=timedelta(milliseconds=50),
        )
        self._gathers += 1
        whats, gathered = zip(*map(json.loads, values), strict=True)
        if len(set(whats)) > 1:
            raise MismatchError(f"ranks check different derivatives: {', '.join(whats)}", whats)
        return list(gathered)

    def _raise_failure(self) -> None:
        if self._store.check(["failed"]):
            text = self._store.get("failed").decode()
            raise PeerFailedError(f"the check ended because it raised elsewhere, on {text}")


# --- the point, and functions of it ---


@dataclass(frozen=True)
class _Coordinate:
    """An entry of one rank's input or output, or the real or imaginary part of a complex one."""

    rank: int
    number: int
    index: tuple[int, ...]
    part: str = ""
    of: str = "inputs"

    def __str__(self) -> str:
        entry = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"rank {self.rank}, {self.of}[{self.number}]{entry}{self.part and f' ({self.part})'}"

    @property
    def unit(self) -> Tensor:
        """Unit step in the direction of this coordinate."""
        if self.part == IMAGINARY:
            return torch.tensor(1j, dtype=torch.complex128)
        return torch.tensor(1.0, dtype=torch.float64)


def _entries(shape: Iterable[int], is_complex: bool) -> list[tuple[tuple[int, ...], str]]:
    """Return a tensor's indices, twice for a complex one, each with the name of the part."""
    names = (REAL, IMAGINARY) if is_complex else ("",)
    return [(index, name) for index in itertools.product(*map(range, shape)) for name in names]


def _as_inputs(inputs: Any) -> list[Any]:
    if isinstance(inputs, Tensor):
        return [inputs]
    if not isinstance(inputs, Sequence):
        raise ArgumentTypeError(
            f"inputs must be a tensor or a sequence of arguments, but is a {type(inputs).__name__}"
        )
    return list(inputs)


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _variables(inputs: Sequence[Any]) -> list[int]:
    """Return the indices of the inputs that the function is differentiated by."""
    return [i for i, x in enumerate(inputs) if _differentiable(x) and x.requires_grad]


def _leaves(inputs: Sequence[Any], change: Callable[[int, Tensor], Tensor] | None = None) -> Any:
    """Return copies of the inputs, changed, as leaves with the same strides if these are dense."""
    numbers = _variables(inputs)
    fresh = list(inputs)
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            copy = x.detach().clone()
            copy = change(i, copy) if change and i in numbers else copy
            fresh[i] = copy.requires_grad_(x.requires_grad)
    return fresh


def _outputs_of(fn: Fn, inputs: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can carry gradients in what the function returns, in order."""
    return [leaf for leaf in tensors_in(fn(*inputs)) if _differentiable(leaf)]


def _random_like(tensors: Iterable[Tensor], rank: int) -> list[Tensor]:
    """Return normal values, equal on every device."""
    generator = torch.Generator().manual_seed(SEED + rank)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in tensors]


def _parts(tensors: Iterable[Tensor]) -> list[float]:
    """Return the tensors' entries as real numbers, in the order of the coordinates."""
    flat = [torch.view_as_real(_wide(t)) if t.is_complex() else t.detach() for t in tensors]
    # cloned: autograd's zeros may be tensors without storage
    return [number for t in flat for number in t.to(torch.float64).clone().flatten().tolist()]


def _inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> tuple[float, float]:
    """Return Re⟨a, b⟩, summed in float64, and the sum of its terms' magnitudes."""
    total = size = 0.0
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:
            raise ArgumentError(
                f"fn returned shape {tuple(x.shape)}, but {tuple(y.shape)} at another point: "
                "outputs' shapes must not depend on inputs' values"
            )
        terms = torch.view_as_real(_wide(x)) * torch.view_as_real(_wide(y))
        total += terms.sum().item()
        size += terms.abs().sum().item()
    return total, size


def _wide(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().to(torch.complex128)


def _summed(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
    values, sizes = zip(*pairs, strict=True)
    return math.fsum(values), math.fsum(sizes)


def _vjp(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], *, create_graph: bool
) -> list[Tensor]:
    """Return the vector-Jacobian product: gradients of the inputs, then of all other leaves.

    Those of inputs that no output depends on are zeros. Other leaves are differentiated too, as in
    training: autograd would skip a node that leads to them only, and the other ranks would wait for
    that node's collective.
    """
    pairs = [(out, y) for out, y in zip(outputs, ys, strict=True) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    kept, given = zip(*pairs, strict=True)
    known = {id(x) for x in xs}
    wanted = [*xs, *(leaf for leaf in _leaves_of(kept) if id(leaf) not in known)]
    gradients = torch.autograd.grad(
        kept, wanted, given, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return list(gradients)


def _leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the outputs' graph, breadth first: one order for the same graph."""
    found = [out for out in outputs if out.grad_fn is None]
    queue: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(queue)
    for node in queue:  # appended to while it is iterated
        if hasattr(node, "variable"):
            found.append(node.variable)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return found
