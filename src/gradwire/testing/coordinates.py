"""The inputs of all ranks as one real vector: its coordinates, and functions of it.

A complex entry is two coordinates. The objective is L = Σ over ranks of Re⟨cotangent, output⟩.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire._containers import tensors_in
from gradwire.errors import ArgumentError, ArgumentTypeError

Fn: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Coordinate:
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


REAL, IMAGINARY = "real part", "imaginary part"


def as_inputs(inputs: Any) -> list[Any]:
    """Return the arguments of the function under test, given a sequence or a single tensor."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if not isinstance(inputs, Sequence):
        raise ArgumentTypeError(
            f"inputs must be a tensor or a sequence of arguments, but is a {type(inputs).__name__}"
        )
    return list(inputs)


def differentiable(value: object) -> bool:
    """Return True if the value is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def variables(inputs: Sequence[Any]) -> list[int]:
    """Return the indices of the inputs that the function is differentiated by."""
    return [i for i, x in enumerate(inputs) if differentiable(x) and x.requires_grad]


def all_coordinates(shapes_by_rank: Iterable[Sequence[Sequence[Any]]]) -> list[Coordinate]:
    """Return the coordinates of all ranks, given each rank's (input, shape, is complex) list.

    Raises:
        ArgumentError: There are none.
    """
    found = []
    for rank, shapes in enumerate(shapes_by_rank):
        for number, shape, is_complex in shapes:
            found += [Coordinate(rank, number, *entry) for entry in entries(shape, is_complex)]
    if not found:
        raise ArgumentError(
            "inputs have no entry that requires grad on any rank: call requires_grad_() on those "
            "that are to be checked"
        )
    return found


def entries(shape: Iterable[int], is_complex: bool) -> list[tuple[tuple[int, ...], str]]:
    """Yield a tensor's indices, twice for a complex one, each with the name of the part."""
    names = (REAL, IMAGINARY) if is_complex else ("",)
    return [(index, name) for index in itertools.product(*map(range, shape)) for name in names]


def shapes(inputs: Sequence[Any]) -> list[tuple[int, list[int], bool]]:
    """Return (input, shape, is complex) of each variable of a rank, for `all_coordinates`."""
    return [(i, list(inputs[i].shape), inputs[i].is_complex()) for i in variables(inputs)]


def parts(tensors: Iterable[Tensor]) -> list[float]:
    """Return the tensors' entries as real numbers, in the order of the coordinates."""
    flat = [torch.view_as_real(_wide(t)) if t.is_complex() else t.detach() for t in tensors]
    # cloned: autograd's zeros may be tensors without storage
    return [number for t in flat for number in t.to(torch.float64).clone().flatten().tolist()]


def leaves(inputs: Sequence[Any], change: Callable[[int, Tensor], Tensor] | None = None) -> Any:
    """Return copies of the inputs, as leaves with the same strides if these are dense.

    Args:
        inputs: The arguments of the function under test.
        change: Called with each variable's index and copy; returns the leaf.
    """
    numbers = variables(inputs)
    fresh = list(inputs)
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            copy = x.detach().clone()
            copy = change(i, copy) if change and i in numbers else copy
            fresh[i] = copy.requires_grad_(x.requires_grad)
    return fresh


def outputs_of(fn: Fn, inputs: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can carry gradients in what the function returns, in order."""
    return [leaf for leaf in tensors_in(fn(*inputs)) if differentiable(leaf)]


def check_outputs(counts: Iterable[int]) -> None:
    """Raise if no rank's function returned a tensor: every derivative would pass the check.

    Args:
        counts: Number of tensors that `outputs_of` found on each rank.

    Raises:
        ArgumentError: No rank has one.
    """
    if not any(counts):
        raise ArgumentError(
            "fn returned no floating-point or complex tensor on any rank, so that there is nothing "
            "to check: return a tensor, or tensors in lists, dicts and the like"
        )


def random_like(tensors: Iterable[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return normal values, equal for equal generators on every device."""
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in tensors]


def inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> tuple[float, float]:
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


def vjp(
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
