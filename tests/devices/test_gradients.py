"""Every op's backward, double backward and forward mode, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp

from gradwire.devices import (
    broadcast,
    broadcast_coalesced,
    gather,
    reduce_add,
    reduce_add_coalesced,
    scatter,
)

# Torch's own forward mode loads deprecated parts of torch the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

DTYPES = [torch.float64, torch.complex128]


def check(op: Callable[..., Any], *inputs: Tensor) -> None:
    assert gradcheck(op, inputs, check_forward_ad=True)
    assert gradgradcheck(op, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


def leaf(
    *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", grad: bool = True
) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=grad)


def jvp_of_jvp(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    along = torch.ones_like(x)
    return jvp(lambda y: jvp(op, (y,), (along,))[1], (x,), (along,))[1]


FEW = [["cpu"], ["cpu"] * 2]
"""Complex numbers on four devices take as long as all the rest, and are wide."""
REAL_OR_FEW = pytest.mark.narrow(
    {"dtype": torch.float64}, {"dtype": torch.complex128, "places": FEW}
)


@REAL_OR_FEW
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_broadcast(places: list[str], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(lambda x: broadcast(x, places), leaf(*shape, dtype=dtype, device=places[0]))


@pytest.mark.narrow(
    {"dtype": torch.float64, "frozen": [None, 1]},
    {"dtype": torch.complex128, "frozen": 0, "places": FEW},
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_broadcast_coalesced(places: list[str], dtype: torch.dtype, frozen: int | None) -> None:
    inputs = [leaf(2, i, dtype=dtype, device=places[0], grad=i != frozen) for i in (0, 1, 2)]

    def op(*tensors: Tensor) -> list[Tensor]:
        followed = [i for i in range(3) if i != frozen]
        return [r[i] for r in broadcast_coalesced(tensors, places, 40) for i in followed]

    check(lambda *tensors: tuple(op(*tensors)), *inputs)


@pytest.mark.narrow(
    {"dtype": torch.float64, "frozen": [None, 1]},
    {"dtype": torch.complex128, "frozen": 0, "places": FEW},
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 2)])
def test_reduce_add(
    places: list[str], dtype: torch.dtype, frozen: int | None, shape: tuple[int, ...]
) -> None:
    if len(places) == 1 and frozen == 0:
        pytest.skip("its only input is frozen")
    inputs = [leaf(*shape, dtype=dtype, device=p, grad=i != frozen) for i, p in enumerate(places)]
    check(lambda *tensors: reduce_add(tensors), *inputs)


@REAL_OR_FEW
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_add_coalesced(places: list[str], dtype: torch.dtype) -> None:
    inputs = [
        leaf(2, i, dtype=dtype, device=p, grad=i not in (1, 2)) for p in places for i in range(4)
    ]

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        lists = [tensors[i : i + 4] for i in range(0, len(tensors), 4)]
        return tuple(reduce_add_coalesced(lists, buffer_size=40)[i] for i in (0, 3))

    check(op, *inputs)


@pytest.mark.narrow(
    {"dtype": torch.float64, "dim": 0}, {"dtype": torch.complex128, "dim": [1, -1], "places": FEW}
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("conjugated", [False, True])
def test_scatter(places: list[str], dtype: torch.dtype, dim: int, conjugated: bool) -> None:
    x = leaf(4, 3, dtype=dtype, device=places[0])
    if dim:
        x = leaf(2, 5, dtype=dtype, device=places[0])
    check(lambda t: scatter(t.conj() if conjugated else t, places, dim=dim), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("sizes", [(1, 0, 3), (0, 4, 0), (0, 0, 4)])
def test_scatter_in_uneven_and_empty_chunks(
    dtype: torch.dtype, dim: int, sizes: tuple[int, ...]
) -> None:
    x = leaf(4, 2, dtype=dtype) if dim == 0 else leaf(2, 4, dtype=dtype)
    check(lambda t: scatter(t, ["cpu"] * 3, sizes, dim), x)


@pytest.mark.narrow(
    {"dtype": torch.float64, "dim": 0}, {"dtype": torch.complex128, "dim": [1, -1], "places": FEW}
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("frozen", [None, 0])
def test_gather(places: list[str], dtype: torch.dtype, dim: int, frozen: int | None) -> None:
    if len(places) == 1 and frozen == 0:
        pytest.skip("its only input is frozen")
    shapes = [(i, 2) if dim == 0 else (2, i) for i, _ in enumerate(places, 1)]
    inputs = [
        leaf(*shape, dtype=dtype, device=p, grad=i != frozen)
        for i, (shape, p) in enumerate(zip(shapes, places, strict=True))
    ]
    check(lambda *tensors: gather(tensors, dim), *inputs)


def channels_last() -> Tensor:
    x = torch.randn(1, 2, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    return x.requires_grad_()


def flat(lists: Any) -> tuple[Tensor, ...]:
    return tuple(t for one in lists for t in one)


TWO, THREE, C128 = ["cpu"] * 2, ["cpu"] * 3, torch.complex128


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
def test_inputs_of_other_kinds() -> None:
    """Scalars, empty chunks, conjugated tensors, channels_last, and one given more than once."""
    check(lambda *tensors: gather(tensors), leaf(), leaf())
    check(lambda *tensors: gather(tensors), leaf(0, 2), leaf(3, 2), leaf(0, 2))
    check(lambda *tensors: gather(tensors, -1), leaf(2, 0), leaf(2, 3, grad=False), leaf(2, 1))
    x, y = leaf(2, 2, dtype=C128), leaf(2, 2, dtype=C128)
    for dim in (0, -1):
        check(lambda a, b, dim=dim: gather([a.conj(), b], dim), x, y)
    check(lambda a, b: reduce_add([a.conj(), b, b.conj()]), x, y)
    check(lambda a: broadcast(a.conj(), TWO), x)
    check(lambda a, b: flat(broadcast_coalesced([a.conj(), b], TWO)), x, y)
    x, y = channels_last(), channels_last()
    check(lambda a, b: reduce_add([a, b, a]), x, y)
    check(lambda a: broadcast(a, THREE), x)
    check(lambda a, b: tuple(reduce_add_coalesced([[a, b], [b, a]])), x, y)
    x, y = leaf(3), leaf(3)
    for k in (1, 2, 3):
        lists = lambda a, b, k=k: [[a, b], [b, a], [a, a]][:k]  # noqa: E731
        check(lambda a, b, lists=lists: tuple(reduce_add_coalesced(lists(a, b))), x, y)
        check(lambda a, b, k=k: flat(broadcast_coalesced([a, b, a], ["cpu"] * k)), x, y)
    check(lambda a, b: gather([a, b, a]), x, y)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_channels_last_gradients(k: int) -> None:
    x = leaf(k * 2, 3, 2, 2).detach().to(memory_format=torch.channels_last).requires_grad_()
    chunks = scatter(x, ["cpu"] * k)
    whole = gather(chunks)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    whole.backward(whole.detach())
    assert torch.equal(x.grad, x.detach())
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    check(lambda t: gather(scatter(t, ["cpu"] * k, dim=1), dim=1), x)


def test_nothing_is_recorded_under_no_grad() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    with torch.no_grad():
        results = [*broadcast(x, ["cpu"] * 2)[1:], *scatter(x, ["cpu"] * 2)[1:], gather([x, x])]
        results += [reduce_add([x, x])]
    assert not any(t.requires_grad for t in results)


def test_what_was_not_used_adds_nothing() -> None:
    x, y, frozen = (torch.randn(3, requires_grad=wanted) for wanted in (True, True, False))
    first, second, third = broadcast_coalesced([x, y, frozen], THREE)
    assert first[2] is frozen
    assert [t.requires_grad for t in third] == [True, True, False]
    (2 * second[0] + 3 * third[0]).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    assert y.grad is None
    x = torch.randn(4, 2, requires_grad=True)
    scatter(x, TWO)[0].backward(torch.full((2, 2), 2.0))
    assert torch.equal(x.grad, torch.tensor([[2.0] * 2] * 2 + [[0.0] * 2] * 2))


def test_gradients_are_summed_in_index_order() -> None:
    grads = [torch.randn(100) * 10**i for i in range(5)]
    x = torch.zeros(100, requires_grad=True)
    replicas = broadcast(x, ["cpu"] * 5)
    torch.autograd.backward(
        [replicas[i] for i in (3, 0, 4, 2, 1)], [grads[i] for i in (3, 0, 4, 2, 1)]
    )
    assert torch.equal(x.grad, reduce_add(grads))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_without_a_tangent_beside_one_with(requires_grad: bool) -> None:
    x, y = torch.randn(3, requires_grad=requires_grad), torch.randn(3)
    tangent = torch.randn(3)
    with fwd.dual_level():
        dual = fwd.make_dual(y, tangent)
        for replica in broadcast_coalesced([x, dual], ["cpu"] * 3):
            found = [fwd.unpack_dual(t).tangent for t in replica]
            assert found[0] is None or not found[0].any()
            assert torch.equal(found[1], tangent)
        assert fwd.unpack_dual(x).tangent is None
        whole = torch.arange(3)
        totals = reduce_add_coalesced([[x, dual, whole], [x, y, whole]])
        assert not fwd.unpack_dual(totals[0]).tangent.any()
        assert torch.equal(fwd.unpack_dual(totals[1]).tangent, tangent)
        with torch.no_grad():
            totals[1].mul_(2)
        assert torch.equal(fwd.unpack_dual(dual).tangent, tangent)


def test_places_have_gradients_of_their_own() -> None:
    """The adjoint's results may be written without changing each other."""
    inputs = [torch.randn(3, requires_grad=True) for _ in range(3)]
    reduce_add(inputs).sum().backward()
    inputs[0].grad.zero_()
    assert torch.equal(inputs[1].grad, torch.ones(3))
    assert len({t.grad.data_ptr() for t in inputs}) == 3


def test_forward_mode_in_forward_mode(places: list[str]) -> None:
    devices = [torch.device(p) for p in places]
    x = torch.randn(len(places) + 1, dtype=torch.float64, device=places[0])

    def sent(y: Tensor) -> Tensor:
        return gather(scatter(y**3, places), destination=places[0])

    def copied(y: Tensor) -> Tensor:
        return sum((t.to(places[0]) for t in broadcast(y**3, places)), torch.zeros_like(x))

    def summed(y: Tensor) -> Tensor:
        return reduce_add([(y**3).to(d) for d in devices], places[0])

    for op, factor in ((sent, 1), (copied, len(places)), (summed, len(places))):
        torch.testing.assert_close(jvp_of_jvp(op, x), factor * 6 * x)
