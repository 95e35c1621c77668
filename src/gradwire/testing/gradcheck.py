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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
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

EPS = 1e-6
"""Half the distance of the two points of a finite difference."""
ATOL, RTOL = 1e-5, 1e-3
ROUNDINGS = 8
"""Tolerance of `adjoint_check`, in units of the coarsest dtype's rounding error."""
MAX_LINES = 8


class GradientError(DistributedError, AssertionError):
    """A derivative is wrong: the message names the rank, the input's entry, and both values.

    Every rank of the check raises it, with the same message.
    """


def gradcheck(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
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
        arguments = _as_list(inputs)
        for i in _variables(arguments):
            if arguments[i].dtype not in (torch.float64, torch.complex128):
                raise ArgumentError(
                    f"inputs[{i}] is {arguments[i].dtype}, in which finite differences are too "
                    "coarse: use torch.float64 or torch.complex128; adjoint_check takes every dtype"
                )
    ys = _compare_backward("first derivatives", fn, arguments, ranks)

    def gradient(*moved: Any) -> list[Tensor]:
        # of all leaves, so that a rank takes part whose own input the function does not use
        given, cotangents = moved[: len(arguments)], moved[len(arguments) :]
        xs = [given[i] for i in _variables(given)]
        return _vjp(_outputs_of(fn, given), xs, cotangents, create_graph=True)

    _compare_backward("second derivatives", gradient, [*arguments, *ys], ranks)
    return True


def adjoint_check(
    op: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    group: ProcessGroup | None = None,
) -> bool:
    """Check that a linear op's backward is its adjoint: ⟨op(x), y⟩ = ⟨x, backward(y)⟩.

    Called on every rank of the group; the inner products are real parts, summed over ranks. They
    are compared for each unit vector x: `op` is called once for each entry of each rank, so keep
    inputs small. Since `op` is linear, this needs no small steps, and so holds in every floating or
    complex dtype: the two sides may differ by 8 roundings of the
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
            entry and both values.
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
        arguments = _as_list(inputs)
    _compare_backward("adjoint", op, arguments, ranks, linear=True)
    return True


def _compare_backward(
    what: str,
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    ranks: _Ranks,
    *,
    linear: bool = False,
) -> list[Tensor]:
    """Compare backward's gradients of all ranks with the change of L; return the cotangents."""
    mine = [(i, [*_real(inputs[i]).shape], inputs[i].is_complex()) for i in _variables(inputs)]
    entries = [
        (rank, number, index, is_complex)
        for rank, found in enumerate(ranks.gather(f"shapes, {what}", mine))
        for number, shape, is_complex in found
        for index in itertools.product(*map(range, shape))
    ]
    if not entries:
        raise ArgumentError(
            "inputs have no entry that requires grad on any rank: call requires_grad_() on those "
            "that are to be checked"
        )
    with ranks.guarded():
        here = _leaves(inputs)
        outputs = _outputs_of(fn, here)
        ys = _random_like(outputs, ranks.rank)
        xs = [here[i] for i in _variables(here)]
        gradients = _vjp(outputs, xs, ys)[: len(xs)]

        def terms(rank: int, number: int, index: tuple[int, ...], step: float) -> Tensor:
            moved = _leaves(inputs)
            for i in _variables(moved) if linear else ():
                moved[i].detach().zero_()
            if rank == ranks.rank:
                _real(moved[number].detach())[index] += step
            return _flat(_outputs_of(fn, moved)) * _flat(ys)

        shares = []
        for entry in entries:
            # The change is L at the unit vector if L is linear, else a finite difference.
            if linear:
                found = terms(*entry[:3], 1.0)
            else:
                found = (terms(*entry[:3], EPS).sum() - terms(*entry[:3], -EPS).sum()) / (2 * EPS)
            shares.append((found.sum().item(), found.abs().sum().item()))
        coarsest = max((torch.finfo(t.dtype).eps for t in [*xs, *outputs]), default=0.0)
    gathered = ranks.gather(what, [_flat(gradients).tolist(), shares, coarsest, len(outputs)])
    if not any(rank[3] for rank in gathered):  # every derivative would pass the check
        raise ArgumentError(
            "fn returned no floating-point or complex tensor on any rank, so that there is nothing "
            "to check: return a tensor, or tensors in lists, dicts and the like"
        )
    have = [number for rank in gathered for number in rank[0]]
    rounding = ROUNDINGS * max(rank[2] for rank in gathered)
    wrong = []
    for k, (entry, a) in enumerate(zip(entries, have, strict=True)):
        b, size = (sum(rank[1][k][part] for rank in gathered) for part in (0, 1))
        # not "greater", which NaN never is
        if not abs(a - b) <= (rounding * max(size, abs(a)) if linear else ATOL + RTOL * abs(b)):
            source = "the adjoint" if linear else "finite differences"
            wrong.append(f"{_name(*entry)}: backward gives {a:.9g}, {source} {b:.9g}")
    if wrong:
        shown = [f"  {text}" for text in wrong[:MAX_LINES]]
        if len(wrong) > MAX_LINES:
            shown.append(f"  … and {len(wrong) - MAX_LINES} more")
        raise GradientError(
            "\n".join([f"{what}: {len(wrong)} of {len(entries)} entries differ", *shown])
        )
    return [y.requires_grad_() for y in ys]


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
        """Return every rank's value, in rank order; values are converted to JSON and back."""

        def check() -> None:
            if self._store.check(["failed"]):
                text = self._store.get("failed").decode()
                raise PeerFailedError(f"the check ended because it raised elsewhere, on {text}")

        self._gathers += 1
        self._store.set(f"{self._gathers}/{self.rank}", json.dumps([what, value]))
        doing = "finish the check, which every rank of the group must call,"
        key = str(self._gathers)
        values = values_of_ranks(self._store, key, self._size, doing, check=check, poll=0.05)
        whats, gathered = zip(*map(json.loads, values), strict=True)
        if len(set(whats)) > 1:
            raise MismatchError(f"ranks check different derivatives: {', '.join(whats)}", whats)
        return list(gathered)


# --- the point, and functions of it ---


def _name(rank: int, number: int, index: Sequence[int], is_complex: bool) -> str:
    """Return the name of an input's entry; the last index of a complex one is its part."""
    part = ""
    if is_complex:
        *index, imaginary = index
        part = " (imaginary part)" if imaginary else " (real part)"
    entry = f"[{', '.join(map(str, index))}]" if index else ""
    return f"rank {rank}, inputs[{number}]{entry}{part}"


def _as_list(inputs: Any) -> list[Any]:
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


def _leaves(inputs: Sequence[Any]) -> list[Any]:
    """Return copies of the inputs as leaves, with the same strides if these are dense."""
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]


def _outputs_of(fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can carry gradients in what the function returns, in order."""
    return [leaf for leaf in tensors_in(fn(*inputs)) if _differentiable(leaf)]


def _random_like(tensors: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Return normal values, equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in tensors]


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors' entries as one vector of float64, in the order of the entries' names."""
    # cloned: autograd's zeros may be tensors without storage
    parts = [_real(t.detach().clone()).to("cpu", torch.float64).flatten() for t in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _vjp(
    outputs: Sequence[Tensor],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    """Return the vector-Jacobian product: gradients of the inputs, then of all other leaves."""
    pairs = [(out, y) for out, y in zip(outputs, ys, strict=True) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    kept, given = zip(*pairs, strict=True)
    known = {id(x) for x in xs}
    # Other leaves are differentiated too, as in training: autograd would skip a node that leads to
    # them only, and the other ranks would wait for that node's collective.
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
