"""Derivatives of every collective: adjoints in all groups, handles, transforms, compiled graphs."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from gradwire import collectives as C
from gradwire.collectives import wire
from gradwire.errors import MismatchError, NotSupportedError
from gradwire.testing import adjoint_check, run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

LINEAR = {  # with a handle, too
    "all_reduce": lambda x, **o: C.all_reduce(x, **o),
    "all_reduce avg": lambda x, **o: C.all_reduce(x, "avg", **o),
    "reduce": lambda x, **o: C.reduce(x, group_dst=1, **o),
    "reduce avg": lambda x, **o: C.reduce(x, op="avg", group_dst=1, **o),
    "broadcast": lambda x, **o: C.broadcast(x, group_src=1, **o),
    "all_gather": lambda x, **o: C.all_gather(x, **o),
    "all_gather dim 1": lambda x, **o: C.all_gather(x, 1, **o),
    "all_gather_list": lambda x, **o: C.all_gather_list(x, **o),
    "gather": lambda x, **o: C.gather(x, group_dst=1, **o),
    "gather dim 1": lambda x, **o: C.gather(x, group_dst=1, dim=1, **o),
    "scatter": lambda x, **o: C.scatter(x, group_src=1, like=x[: len(x) // size(o)], **o),
    "scatter list": lambda x, **o: C.scatter(
        list(x.chunk(size(o))), group_src=1, like=x[: len(x) // size(o)], **o
    ),
    "reduce_scatter": lambda x, **o: C.reduce_scatter(x, **o),
    "reduce_scatter avg": lambda x, **o: C.reduce_scatter(x, "avg", **o),
    "reduce_scatter list": lambda x, **o: C.reduce_scatter(list(x.chunk(size(o))), **o),
    "all_to_all": lambda x, **o: C.all_to_all(x, **o),
    "all_to_all list": lambda x, **o: C.all_to_all(list(x.chunk(size(o))), **o),
    "ppermute": lambda x, **o: C.ppermute(x, [(0, 1)], **o),
    "shift": lambda x, **o: C.shift(x, **o),
    "shift off": lambda x, **o: C.shift(x, -1, wrap=False, **o),
}
WITHOUT_HANDLE = {
    "all_gather stacked": lambda x, **o: C.all_gather(x, -1, stack=True, **o),
    "all_to_all dims": lambda x, **o: C.all_to_all(x, split_dim=0, concat_dim=1, **o),
    "vary of invariant": lambda x, **o: C.vary(C.all_reduce(x, invariant=True, **o), **o),
}
UNEVEN = {
    "all_gather uneven": lambda x, **o: C.all_gather(ragged(x, o), sizes="find", **o),
    "gather uneven": lambda x, **o: C.gather(ragged(x, o), group_dst=1, sizes="find", **o),
    "reduce_scatter uneven": lambda x, **o: C.reduce_scatter(x, dim=1, sizes=cut(x, o), **o),
    "all_to_all uneven": lambda x, **o: C.all_to_all(x, input_splits=cut(x.mT, o), **o),
}
NONLINEAR = {
    "max": lambda x, **o: C.all_reduce(x, "max", **o),
    "product": lambda x, **o: C.all_reduce(x, "product", **o),
    "reduce max": lambda x, **o: C.reduce(x, 1, "max", **o),
    "reduce_scatter product": lambda x, **o: C.reduce_scatter(x, "product", **o),
}
SENDS = {
    "send_recv": lambda x: C.send_recv(x, 1 - dist.get_rank(), 1 - dist.get_rank()),
    "halo_exchange": lambda x: C.halo_exchange(x, 1),
}


def size(options):
    return dist.get_world_size(options.get("group"))


def ragged(x, options):
    """As many rows as the rank in the group, and so none on the first."""
    return x[: dist.get_rank(options["group"])]


def cut(x, options):
    """Sizes of a cut of dim 1, with an empty one: the last rank gets most."""
    world = size(options)
    return [0] + [1] * (world - 2) + [x.shape[1] - (world - 2)]


def each(check, ops):
    """Call a function with every op; say which one failed."""
    for name, op in ops.items():
        torch.manual_seed(dist.get_rank())
        try:
            check(op)
        except Exception as error:
            raise AssertionError(name) from error


@on_ranks(3, timeout=60)
def test_linear_ops_in_every_group():
    """Other layouts and dtypes are drawn by tests/fuzz, and so are second derivatives."""
    sub = dist.new_group([1, 2])
    for group in [None, sub][: 1 + (dist.get_rank() in (1, 2))]:

        def check(op, group=group):
            world = dist.get_world_size(group)
            x = torch.randn(world, world, dtype=torch.complex64, requires_grad=True)
            assert adjoint_check(lambda x: op(x, group=group), x, group)

        each(check, LINEAR | WITHOUT_HANDLE | UNEVEN)


# -- handles


WITH_HANDLE = (
    LINEAR | NONLINEAR | {"invariant": lambda x, **o: C.all_reduce(x, invariant=True, **o)}
)


def waited(op, x):
    out = op(x, async_op=True).wait()
    return torch.cat([y.reshape(-1) for y in out]) if isinstance(out, tuple) else out


def derivatives_of_cotangents(op):
    """Of batched cotangents, and of those with tangents."""
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    y = waited(op, x)
    cotangents = torch.randn(3, *y.shape, dtype=torch.float64, requires_grad=True)

    def pulled(cotangent, **options):
        options |= {"retain_graph": True, "create_graph": True}
        return torch.autograd.grad(y, x, cotangent, **options)[0]

    loop = torch.stack([pulled(c) for c in cotangents])
    batched = pulled(cotangents, is_grads_batched=True)
    torch.testing.assert_close(batched, loop)
    torch.testing.assert_close(
        *(torch.autograd.grad(total.square().sum(), cotangents)[0] for total in (batched, loop))
    )
    torch.testing.assert_close(torch.func.vmap(pulled)(cotangents), loop)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(cotangents[0].detach(), cotangents[1].detach())
        torch.testing.assert_close(forward_ad.unpack_dual(pulled(dual)).tangent, loop[1])
    assert C.all_reduce(torch.ones(1)).item() == 2  # the group still works


def refuses_a_tangent(op):
    """Before anything is sent."""
    x = torch.ones(2, 2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotSupportedError, match="with a tangent: use async_op=False"):
            op(dual, async_op=True)
        without = waited(op, x)
    assert torch.equal(without, waited(op, x))


def gives_the_synchronous_result(op):
    results = []
    for options in ({}, {"async_op": True}):
        torch.manual_seed(dist.get_rank())
        x = torch.randn(2, 2, requires_grad=True)
        out = op(x, **options)
        out = out.wait() if options else out
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((y**3).sum() for y in outs)
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        without = op(x.detach(), **options)
        plain = without.wait() if options else without
        results.append(([y.tolist() for y in outs], first.tolist(), second.tolist(), len(plain)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "check", [derivatives_of_cotangents, refuses_a_tangent, gives_the_synchronous_result]
)
def test_every_op_with_a_handle(check):
    run_ranks(lambda: each(check, WITH_HANDLE), 2, timeout=60)


def test_both_passes_overlap_with_computation():
    def main():
        events = []
        start, wait = wire.all_reduce, wire.Pending.wait

        def started(*args):
            events.append("start")
            return start(*args)

        def waited(pending):
            events.append("wait")
            return wait(pending)

        wire.all_reduce, wire.Pending.wait = started, waited
        try:
            x = torch.ones(2, requires_grad=True)
            z = torch.ones(2, requires_grad=True)
            handle = C.all_reduce(x, async_op=True)
            between = z * 2
            between.register_hook(lambda grad: events.append("compute"))
            events.append("compute")
            (handle.wait() * between).sum().backward()
        finally:
            wire.all_reduce, wire.Pending.wait = start, wait
        return events, x.grad.tolist(), z.grad.tolist()

    events = ["start", "compute", "wait"]
    assert run_ranks(main, 2) == [(events * 2, [4.0, 4.0], [4.0, 4.0])] * 2


@on_ranks(2)
def test_several_at_once_in_any_order_of_waiting():
    x = torch.ones(2, requires_grad=True)
    handles = [C.all_reduce(x * i, async_op=True) for i in range(4)]
    sum(h.wait().sum() for h in handles).backward()
    again = handles[0].wait() is handles[0].wait()
    assert (again, x.grad.tolist()) == (True, [12.0, 12.0])


@on_ranks(2)
def test_a_dropped_handle_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        C.all_gather(torch.ones(1), async_op=True)
        gc.collect()
    dist.barrier()
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "a handle of all_gather was dropped without wait()"
    ]


@on_ranks(1)
def test_handles_are_refused_inside_transforms():
    with pytest.raises(NotSupportedError, match="async_op"):
        torch.func.grad(lambda x: C.all_reduce(x, async_op=True).wait().sum())(torch.ones(1))


@on_ranks(2)
def test_backwards_of_handles_are_compared_too():
    x = torch.ones(1, requires_grad=True)
    with C.checks():
        ys = [C.all_reduce(x * i, async_op=True).wait() for i in (1, 2)]
        if dist.get_rank():
            ys.reverse()
        with pytest.raises(MismatchError, match="order of backward"):
            ys[0].sum().backward()


@on_ranks(2)
def test_a_handle_that_was_handed_on_or_failed_may_be_waited_for_again():
    first = C.all_reduce(torch.ones(2), async_op=True)
    second = first.then(lambda y: y + 1)
    failing = first.then(lambda y: y.view(3))
    for _ in range(2):
        assert second.wait().tolist() == [3.0, 3.0]
        assert first.wait().tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="invalid for input of size 2"):
            failing.wait()


# -- transforms and compiled graphs


def flat(op):
    """An op whose result is one tensor."""

    def call(x):
        out = op(x)
        return torch.cat(out) if isinstance(out, tuple) else out

    return call


TRANSFORMED = {name: flat(op) for name, op in (LINEAR | WITHOUT_HANDLE | NONLINEAR | SENDS).items()}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_jvp_is_linear_in_the_tangent_and_equals_forward_ad():
    def run(op):
        x, t = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
        _, tangent = jvp(op, (x,), (t,))
        step = 1e-6
        close(tangent / 1e3, ((op(x + step * t) - op(x - step * t)) / (2 * step)) / 1e3)
        with forward_ad.dual_level():
            dual = op(forward_ad.make_dual(x, t))
            close(forward_ad.unpack_dual(dual).tangent, tangent)

    run_ranks(lambda: each(run, TRANSFORMED), 2)


def test_vmap_equals_a_loop():
    def run(op):
        xs = torch.randn(2, 4, 3, dtype=torch.float64)  # the batch is dim 1
        loop = torch.stack([op(xs[:, i]) for i in range(4)])
        close(vmap(op, in_dims=1)(xs), loop)

    run_ranks(lambda: each(run, TRANSFORMED), 2)


def test_grad_equals_backward_and_goes_through_vmap():
    def run(op):
        def loss(x):
            return (op(x) ** 2).sum()

        x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
        loop = [torch.autograd.grad(loss(x[i]), x)[0][i] for i in range(4)]
        close(grad(loss)(x.detach()[0]), loop[0])
        close(vmap(grad(loss))(x.detach()), torch.stack(loop))

    run_ranks(lambda: each(run, TRANSFORMED), 2)


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

    run_ranks(lambda: each(run, TRANSFORMED), 2)


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

    run_ranks(lambda: each(run, TRANSFORMED | {"tie": tied}), 2)


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

    run_ranks(lambda: each(run, dict(list(TRANSFORMED.items())[first::12])), 2, timeout=110)


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
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(cotangents[0], cotangents[1])
            (gradient,) = torch.autograd.grad(y, x, dual)
            close(forward_ad.unpack_dual(gradient).tangent, loop[1])

    run_ranks(lambda: each(run, TRANSFORMED), 2)
