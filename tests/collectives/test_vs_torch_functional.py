"""Cases in which torch.distributed.nn.functional is wrong, one test each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.errors import ArgumentError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def gradient(fn, x, weight=None):
    """The gradient of Σ over ranks of rank r's Σ weight·fn(x), and the values."""
    x = x.clone().requires_grad_()
    y = fn(x)
    weight = dist.get_rank() + 1.0 if weight is None else weight
    (y * weight).sum().backward()
    return y.tolist(), x.grad.tolist()


def test_max_min_product_through_all_reduce():
    def main():
        x = torch.tensor([[0.0, 2.0, 5.0], [3.0, 2.0, 0.0], [0.0, 2.0, 1.0]])[dist.get_rank()]
        ops = ("max", "min", "product")
        return [gradient(lambda x, op=op: C.all_reduce(x, op), x) for op in ops]

    cotangent = 6.0  # 1 + 2 + 3
    results = run_ranks(main, 3)
    for rank, (top, bottom, product) in enumerate(results):
        shares = [[0, 1 / 3, 1], [1, 1 / 3, 0], [0, 1 / 3, 0]][rank]
        assert top == ([3.0, 2.0, 5.0], pytest.approx([cotangent * s for s in shares]))
        shares = [[1 / 2, 1 / 3, 0], [0, 1 / 3, 1], [1 / 2, 1 / 3, 0]][rank]
        assert bottom == ([0.0, 2.0, 0.0], pytest.approx([cotangent * s for s in shares]))
        # Two zeros, none, one: the product of the others, exactly.
        others = [[0.0, 4.0, 0.0], [0.0, 4.0, 5.0], [0.0, 4.0, 0.0]][rank]
        assert product == ([0.0, 8.0, 0.0], [cotangent * o for o in others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@on_ranks(3)
def test_nan_and_infinity_through_max_and_min(dtype):
    nan, inf = float("nan"), float("inf")
    table = [[nan, 1, -inf, -0.5, inf], [1, nan, inf, -1.5, 3], [2, 3, 0, -2.5, nan]]
    x = torch.tensor(table, dtype=dtype)
    for op in ("max", "min"):
        want = x.amax(0) if op == "max" else x.amin(0)
        torch.testing.assert_close(
            C.all_reduce(x[dist.get_rank()], op), want, equal_nan=True, rtol=0, atol=0
        )


@on_ranks(2)
def test_zeros_without_memory():
    """Autograd's own, which say that they are contiguous."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    ops = (
        lambda x: C.all_gather(x),
        lambda x: C.gather(x, 0),
        lambda x: C.scatter([x, x], 0, like=x),
        lambda x: C.broadcast(x, 0),
        lambda x: C.reduce(x, 0),
        lambda x: C.reduce_scatter(x),
        lambda x: C.all_to_all(x),
        lambda x: C.all_reduce(x, "max"),
        lambda x: C.all_reduce(x, async_op=True).wait(),
    )
    for op in ops:
        y = op(x)
        (gradient,) = torch.autograd.grad(y, x, torch._efficientzerotensor(tuple(y.shape)))
        assert gradient.tolist() == [0.0, 0.0]
    # On PyTorch 2.13 the second derivative of a magnitude is such zeros.
    size = C.all_gather(x**2).abs().sum()
    (gradient,) = torch.autograd.grad(size, x, create_graph=True)
    gradient.sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


def test_buffers_may_be_refilled_and_results_changed_in_place():
    def main():
        x = torch.ones(4, requires_grad=True)
        inputs = x * 2
        ys = [
            C.all_to_all(inputs),
            C.reduce_scatter(inputs),
            C.all_reduce(inputs),
            C.all_gather(inputs),
            C.all_gather_list(inputs)[1],
            C.broadcast(inputs, 0),
            C.shift(inputs),
            C.all_reduce(inputs, "max"),
            C.reduce(inputs, 0, "max"),
        ]
        for y in ys:
            y.mul_(3)
        sum(y.sum() for y in ys).backward()
        grads = x.grad.tolist()
        # The input of a product is kept for backward: a refill is noticed.
        kept = x * 2
        product = C.all_reduce(kept, "product")
        with torch.no_grad():
            kept.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        return grads

    # 2·3·(1 + 1 + 2 + 2 + [0 or 2] + [2 or 0] + 1 + 1 + 1/2)
    first, second = run_ranks(main, 2)
    assert first == [6 * (1 + 1 + 2 + 2 + 0 + 2 + 1 + 1 + 0.5)] * 4
    assert second == [6 * (1 + 1 + 2 + 2 + 2 + 0 + 1 + 1 + 0.5)] * 4


def test_the_tensors_of_a_list_are_apart():
    def main():
        x = torch.full((2,), dist.get_rank() + 2.0, requires_grad=True)
        for first, second in (C.all_gather_list(x), C.all_to_all([x, x])):
            squares = first * first  # keeps the first for backward
            second.add_(second)
            first.retain_grad()
            (squares + second).sum().backward()
            assert first.tolist() == [2.0] * 2
            assert second.tolist() == [6.0] * 2
            assert first.grad.tolist() == [4.0] * 2
        return x.grad.tolist()

    # Rank 0's is the first of two lists on two ranks, each with a gradient of 2·2; rank 1's the
    # second, with one of 2.
    assert run_ranks(main, 2) == [[16.0] * 2, [8.0] * 2]


@on_ranks(2)
def test_a_linear_op_keeps_nothing_of_its_input():
    x = torch.ones(4, requires_grad=True)
    inputs = x * 2
    y = C.all_to_all(inputs)
    with torch.no_grad():
        inputs.fill_(7.0)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([2.0] * 4, [2.0] * 4)


@on_ranks(2)
def test_a_rank_outside_the_group_gets_an_error():
    group = dist.new_group([1])
    x = torch.ones(1)
    if dist.get_rank() == 0:
        for op in (C.all_reduce, C.all_gather, C.all_to_all, C.reduce_scatter, C.vary):
            with pytest.raises(ArgumentError, match="does not contain this rank"):
                op(x, group=group)
    return


@on_ranks(2)
def test_every_dtype_moves_and_integers_reduce():
    rank = dist.get_rank()
    kinds = (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bfloat16)
    for dtype in (*kinds, torch.float8_e4m3fn, torch.complex128):
        x = torch.tensor([rank, 1, 0, 1]).to(dtype)
        want = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 1]]).to(dtype)
        assert C.all_gather(x, stack=True).float().equal(want.float())
        assert C.broadcast(x, 1).float().equal(want[1].float())
        assert C.all_to_all(x).float().equal(want[:, 2 * rank : 2 * rank + 2].flatten().float())
        assert C.gather(x, 0, stack=True).float().equal(want.float() * (rank == 0))
    for dtype in kinds[1:]:
        x = torch.tensor([rank + 1, 3]).to(dtype)
        assert C.all_reduce(x).tolist() == [3, 6]
        assert C.all_reduce(x, "product").tolist() == [2, 9]
        assert C.all_reduce(x, "max").tolist() == [2, 3]
        assert C.reduce_scatter(x).tolist() == [[3], [6]][rank]


@on_ranks(2)
def test_lists_of_0d_tensors_with_and_without_sizes():
    x = torch.tensor(dist.get_rank() + 1.0, requires_grad=True)
    for sizes in (None, [1, 1], "find"):
        x.grad = None
        first, second = C.all_gather_list(x, sizes=sizes)
        (first + 2 * second).backward()
        assert (first.item(), second.item(), first.dim()) == (1.0, 2.0, 0)
        assert x.grad.item() == 2 * (dist.get_rank() + 1)
    with pytest.raises(ArgumentError, match="x is 0-d"):
        C.all_gather_list(x, sizes=[1, 2][:: 1 - 2 * dist.get_rank()])


@on_ranks(2)
def test_a_tensor_of_one_number_with_any_stride():
    """A dim of size 1 may have any stride in a contiguous tensor, where bytes want a 1."""
    x = torch.zeros(1, dtype=torch.complex64).as_strided((1,), (2,))
    with C.checks():
        same = C.invariant(x)
    assert (C.all_gather(x).tolist(), C.all_reduce(x, "product").tolist(), same.tolist()) == (
        [0j, 0j],
        [0j],
        [0j],
    )


@on_ranks(2, timeout=20)
def test_a_group_of_one_rank_has_a_place_in_the_graph():
    """The product of no other ranks is constant, but a second backward continues through it."""
    alone = [dist.new_group([rank]) for rank in range(2)][1]
    x = torch.ones(2, requires_grad=True)
    y = C.all_reduce(x * x)
    z = y * y if dist.get_rank() == 0 else C.all_reduce(y, "product", group=alone)
    (gradient,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), x)[0].tolist() == [26.0, 26.0]
