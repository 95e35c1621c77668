"""torch.func's transforms and torch.compile go through the collectives; vmap issues one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch.func import grad, jvp, vmap

from gradwire import collectives as C
from gradwire.collectives import wire
from gradwire.errors import NotSupportedError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

OPS = {
    "all_reduce": lambda x: C.all_reduce(x),
    "all_reduce avg": lambda x: C.all_reduce(x, "avg"),
    "all_reduce max": lambda x: C.all_reduce(x, "max"),
    "all_reduce min": lambda x: C.all_reduce(x, "min"),
    "all_reduce product": lambda x: C.all_reduce(x, "product"),
    "invariant": lambda x: C.vary(C.all_reduce(x, invariant=True)),
    "send_recv": lambda x: C.send_recv(x, 1 - dist.get_rank(), 1 - dist.get_rank()),
    "reduce": lambda x: C.reduce(x, 1),
    "reduce max": lambda x: C.reduce(x, 1, "max"),
    "broadcast": lambda x: C.broadcast(x, 1),
    "all_gather": lambda x: C.all_gather(x),
    "all_gather dim 1": lambda x: C.all_gather(x, 1),
    "all_gather stacked": lambda x: C.all_gather(x, stack=True),
    "gather": lambda x: C.gather(x, 1),
    "all_gather_list": lambda x: torch.cat(C.all_gather_list(x)),
    "gather uneven": lambda x: C.gather(x[: dist.get_rank() + 1], 1, sizes=[1, 2]),
    "scatter": lambda x: C.scatter(x, 1, like=x[:1]),
    "scatter list": lambda x: C.scatter(list(x.split(1)), 1, like=x[:1]),
    "reduce_scatter": lambda x: C.reduce_scatter(x),
    "reduce_scatter product": lambda x: C.reduce_scatter(x, "product"),
    "all_to_all": lambda x: C.all_to_all(x),
    "all_to_all list": lambda x: C.all_to_all([x, x * x], output_splits=[2, 2])[1],
    "all_to_all dims": lambda x: C.all_to_all(x, split_dim=0, concat_dim=1),
    "shift": lambda x: C.shift(x, wrap=False),
    "halo_exchange": lambda x: C.halo_exchange(x, 1),
}


def each(run, ops=OPS):
    """Calls it for every op; says which one failed."""
    for name, op in ops.items():
        torch.manual_seed(dist.get_rank())
        try:
            run(op)
        except Exception as error:
            raise AssertionError(name) from error


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_jvp_is_linear_in_the_tangent_and_equals_forward_ad():
    def run(op):
        x, t = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
        _, tangent = jvp(op, (x,), (t,))
        step = 1e-6
        close(tangent / 1e3, ((op(x + step * t) - op(x - step * t)) / (2 * step)) / 1e3)
        with torch.autograd.forward_ad.dual_level():
            dual = op(torch.autograd.forward_ad.make_dual(x, t))
            close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)

    run_ranks(lambda: each(run), 2)


def test_vmap_equals_a_loop():
    def run(op):
        xs = torch.randn(2, 4, 3, dtype=torch.float64)  # the batch is dim 1
        loop = torch.stack([op(xs[:, i]) for i in range(4)])
        close(vmap(op, in_dims=1)(xs), loop)

    run_ranks(lambda: each(run), 2)


def test_grad_equals_backward_and_goes_through_vmap():
    def run(op):
        def loss(x):
            return (op(x) ** 2).sum()

        x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
        loop = [torch.autograd.grad(loss(x[i]), x)[0][i] for i in range(4)]
        close(grad(loss)(x.detach()[0]), loop[0])
        close(vmap(grad(loss))(x.detach()), torch.stack(loop))

    run_ranks(lambda: each(run), 2)


def test_forward_over_reverse():
    def run(op):
        def loss(x):
            return (op(x) ** 3).sum()

        x = torch.randn(2, 2, dtype=torch.float64)
        t = torch.randn(2, 2, dtype=torch.float64)
        _, product = jvp(grad(loss), (x,), (t,))
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        # The Hessian over all ranks is symmetric: reverse over reverse gives the same product.
        (second,) = torch.autograd.grad(first, leaf, t)
        close(product, second)

    run_ranks(lambda: each(run), 2)


def tied(x):
    """Square of the other rank's tensor; `tie` has its own derivatives."""
    first, other, token = dist.get_rank() == 0, 1 - dist.get_rank(), 0 * x.sum()
    if first:
        token = C.send(x, other, token=token)
    y, token = C.recv(x, other, token=token)
    if not first:
        token = C.send(x, other, token=token)
    return C.tie(y * y, token)


def test_forward_mode_in_forward_mode():
    def run(op):
        x, t = (torch.rand(2, 3, dtype=torch.float64) + 0.5 for _ in range(2))

        def first(x):
            return jvp(lambda x: op(x**3), (x,), (t,))[1]

        _, second = jvp(first, (x,), (t,))
        step = 1e-6
        close(second / 1e3, ((first(x + step * t) - first(x - step * t)) / (2 * step)) / 1e3)

    run_ranks(lambda: each(run, OPS | {"tie": tied}), 2)


@on_ranks(2)
def test_vmap_issues_one_collective():
    calls = []
    start = wire.all_reduce

    def counted(*args):
        calls.append(1)
        return start(*args)

    wire.all_reduce = counted
    try:
        vmap(C.all_reduce)(torch.ones(50, 2))
        vmap(grad(lambda x: C.all_reduce(x).sum()))(torch.ones(50, 2))
    finally:
        wire.all_reduce = start
    assert len(calls) == 3


@pytest.mark.narrow({"each_backend": "shm", "first": 0})
@pytest.mark.parametrize("first", range(12))
def test_compile_fullgraph(first):
    def run(op):
        def loss(x):
            return (op(x * 2) ** 2).sum()

        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        (eager,) = torch.autograd.grad(loss(x), x)
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        (traced,) = torch.autograd.grad(compiled(x), x)
        close(traced, eager)

    run_ranks(lambda: each(run, dict(list(OPS.items())[first::12])), 2, timeout=110)


def test_compiled_in_a_subgroup():
    def main():
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return None
        x = torch.ones(2, requires_grad=True)
        fn = torch.compile(
            lambda x: C.all_gather(x, group=group), fullgraph=True, backend="aot_eager"
        )
        y = fn(x)
        (y * dist.get_rank()).sum().backward()
        return y.tolist(), x.grad.tolist()

    assert run_ranks(main, 3) == [None, ([1.0] * 4, [3.0] * 2), ([1.0] * 4, [3.0] * 2)]


@on_ranks(2)
def test_receivers_without_a_tensor_that_is_transformed():
    x = torch.ones(2, 2)
    at_root = dist.get_rank() == 0
    empty = x if at_root else x.to("meta")
    for transform in (vmap, grad, lambda fn: lambda x: jvp(fn, (x,), (x,))):
        with pytest.raises(NotSupportedError, match=r"scatter without like .*: give like on every"):
            transform(lambda x: C.scatter(x, 0).sum())(x)
        with pytest.raises(NotSupportedError, match=r"inside torch\.func transforms"):
            transform(lambda x: C.broadcast(x if at_root else None, 0, check=True).sum())(x)
        if not at_root:
            with pytest.raises(NotSupportedError, match=r"like on meta .*: give a tensor with"):
                transform(lambda _: C.scatter(None, 0, like=empty).sum())(x)
            with pytest.raises(NotSupportedError, match=r"x on meta .*: give a tensor with"):
                transform(lambda _: C.broadcast(empty, 0, check=False).sum())(x)


def test_batched_cotangents_and_cotangents_with_tangents():
    def run(op):
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        y = op(x)
        cotangents = torch.randn(4, *y.shape, dtype=torch.float64)
        loop = [torch.autograd.grad(y, x, c, retain_graph=True)[0] for c in cotangents]
        options = {"retain_graph": True, "is_grads_batched": True}
        close(torch.autograd.grad(y, x, cotangents, **options)[0], torch.stack(loop))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(cotangents[0], cotangents[1])
            (gradient,) = torch.autograd.grad(y, x, dual)
            close(torch.autograd.forward_ad.unpack_dual(gradient).tangent, loop[1])

    run_ranks(lambda: each(run), 2)
