"""Handles: the result is waited for once, and both passes overlap with what lies between."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch.autograd import forward_ad

from gradwire import collectives as C
from gradwire.collectives import wire
from gradwire.errors import MismatchError, NotSupportedError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

OPS = {
    "all_reduce": lambda x, **o: C.all_reduce(x, **o),
    "avg": lambda x, **o: C.all_reduce(x, "avg", **o),
    "max": lambda x, **o: C.all_reduce(x, "max", **o),
    "product": lambda x, **o: C.all_reduce(x, "product", **o),
    "invariant": lambda x, **o: C.all_reduce(x, invariant=True, **o),
    "reduce": lambda x, **o: C.reduce(x, 0, **o),
    "broadcast": lambda x, **o: C.broadcast(x, 0, **o),
    "all_gather": lambda x, **o: C.all_gather(x, 1, **o),
    "all_gather_list": lambda x, **o: C.all_gather_list(x, **o),
    "gather": lambda x, **o: C.gather(x, 0, **o),
    "scatter": lambda x, **o: C.scatter(x, 0, like=x[:1], **o),
    "reduce_scatter": lambda x, **o: C.reduce_scatter(x, **o),
    "all_to_all": lambda x, **o: C.all_to_all(x, **o),
    "all_to_all list": lambda x, **o: C.all_to_all(list(x.split(1)), **o),
    "ppermute": lambda x, **o: C.ppermute(x, [(1, 0)], **o),
    "shift": lambda x, **o: C.shift(x, **o),
}


def waited(op, x):
    out = op(x, async_op=True).wait()
    return torch.cat([y.reshape(-1) for y in out]) if isinstance(out, tuple) else out


def each(check):
    """Call a function with the name of every op; say which one failed."""
    for name in OPS:
        torch.manual_seed(dist.get_rank())
        try:
            check(OPS[name])
        except Exception as error:
            raise AssertionError(name) from error


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
    run_ranks(lambda: each(check), 2, timeout=60)


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
