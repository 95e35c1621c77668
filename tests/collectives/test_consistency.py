"""With checks on, a deviating call of one rank in four raises on all ranks, or is resolved."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.collectives import consistency, wire
from gradwire.errors import ArgumentError, MismatchError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")
SOON_S = 5.0  # far below the timeout: a machine may be busy


def deviating(usual, other):
    """Return each rank's result when rank 2 deviates; the group remains usable."""

    def main():
        with C.checks():
            begun = time.monotonic()
            with pytest.raises(MismatchError) as caught:
                (other if dist.get_rank() == 2 else usual)()
            assert time.monotonic() - begun < SOON_S
            assert C.all_reduce(torch.ones(1)).item() == 4
        return str(caught.value)

    messages = set(run_ranks(main, 4))
    assert len({m.partition(":")[2] for m in messages}) == 1  # the op's name may be each rank's own
    return messages.pop()


def ones(*shape, **options):
    return torch.ones(*shape, **options)


@pytest.mark.parametrize(
    ("field", "usual", "other", "values"),
    [
        ("op", lambda: C.all_reduce(ones(2)), lambda: C.all_gather(ones(2)), "all_gather"),
        ("op", lambda: C.all_reduce(ones(2)), lambda: C.reduce(ones(2), 0), "rank 2: reduce;"),
        ("reduce op", lambda: C.all_reduce(ones(2)), lambda: C.all_reduce(ones(2), "max"), "max"),
        ("root", lambda: C.broadcast(ones(2), 0), lambda: C.broadcast(ones(2), 1), "rank 2: 1;"),
        (
            "dtype",
            lambda: C.all_gather(ones(2)),
            lambda: C.all_gather(ones(2).double()),
            "rank 2: torch.float64; rank 3: torch.float32",
        ),
        ("shape", lambda: C.all_reduce(ones(2)), lambda: C.all_reduce(ones(3)), "rank 2: (3,);"),
        ("shape", lambda: C.all_gather(ones(2)), lambda: C.all_gather(ones(3)), "rank 2: (3,);"),
        ("shape", lambda: C.gather(ones(2), 0), lambda: C.gather(ones(2, 1), 0), "rank 2: (2, 1);"),
        (
            "detail",
            lambda: C.all_gather(ones(1, 1), sizes=[1] * 4),
            lambda: C.all_gather(ones(1, 1), sizes=[1, 1, 1, 2]),
            "sizes=[1, 1, 1, 2]",
        ),
        ("detail", lambda: C.shift(ones(1)), lambda: C.shift(ones(1), -1), "pairs="),
        (
            "splits",
            lambda: C.all_to_all(ones(8), input_splits=[2] * 4, output_splits=[2] * 4),
            lambda: C.all_to_all(ones(8), input_splits=[1, 3, 2, 2], output_splits=[2] * 4),
            "rank 2: sends [1, 3, 2, 2]",
        ),
        (
            "splits",
            lambda: C.all_gather(ones(1, 2), 1, sizes=[2] * 4, async_op=True).wait(),
            lambda: C.all_gather(ones(1, 3), 1, sizes=[2] * 4, async_op=True).wait(),
            "rank 2: sends [3, 3, 3, 3], expects [2, 2, 2, 2]",
        ),
        (
            "splits",
            lambda: C.all_gather_list(ones(2), sizes=(2,) * 4),
            lambda: C.all_gather_list(ones(3), sizes=(2,) * 4),
            "rank 2: sends [3, 3, 3, 3]",
        ),
        (
            "splits",
            lambda: C.gather(ones(2), 0, sizes=[2] * 4),
            lambda: C.gather(ones(3), 0, sizes=[2] * 4),
            "rank 2: sends [3, 3, 3, 3]",
        ),
        ("detail", lambda: C.invariant(ones(2)), lambda: C.invariant(ones(2) * 3), "rank 2"),
    ],
)
def test_a_call_that_differs(field, usual, other, values):
    message = deviating(usual, other)
    assert f"ranks disagree on {field}: rank 0: " in message
    assert values in message


def test_a_gradient_that_one_rank_wants_is_computed_on_all():
    def main():
        rank = dist.get_rank()
        results = []
        for op in (C.all_reduce, C.all_gather, lambda x, **c: C.broadcast(x, 1, **c)):
            x = torch.ones(2, requires_grad=rank == 2)
            y = op(x, check=True)
            assert y.requires_grad
            (y * (rank + 1)).sum().backward()
            results.append(None if x.grad is None else x.grad.tolist())
        return results

    nothing = [None] * 3
    assert run_ranks(main, 4) == [nothing, nothing, [[10.0] * 2, [10.0] * 2, [0.0] * 2], nothing]


@on_ranks(3)
def test_a_receiver_without_a_tensor_takes_part_in_a_gradient_that_another_wants():
    rank = dist.get_rank()
    x = None if rank == 2 else torch.ones(2, requires_grad=rank == 1)
    y = C.broadcast(x, 0, check=True)
    y.sum().backward()
    assert rank != 1 or x.grad.tolist() == [0.0, 0.0]


def without_gradients():
    with torch.no_grad():
        C.all_gather(torch.ones(2, requires_grad=True))


def in_a_transform():
    torch.func.vmap(lambda x: C.all_gather(x))(torch.ones(3, 2))


@pytest.mark.parametrize("other", [without_gradients, in_a_transform])
def test_a_gradient_that_one_rank_cannot_have(other):
    message = deviating(lambda: C.all_gather(torch.ones(2, requires_grad=True)), other)
    assert "rank 2: gradients are disabled" in message


def test_backwards_in_another_order():
    def backwards(order):
        x = torch.ones(2, requires_grad=True)
        ys = [C.all_reduce(x), C.all_reduce(2 * x)]
        for i in order:
            ys[i].sum().backward()

    message = deviating(lambda: backwards([0, 1]), lambda: backwards([1, 0]))
    assert "ranks disagree on order of backward" in message


def test_sizes_and_shapes_that_only_the_root_knows():
    def main():
        root = dist.get_rank() == 1
        x = torch.arange(6.0).view(2, 3).requires_grad_() if root else None
        y = C.broadcast(x, 1, check=True)
        z = C.broadcast(x if root else (2, 3), 1, check=True)
        w = C.scatter([x[:, :2], x[:, 2:]] if root else None, 1, 1)
        (y.sum() + z.sum() + w.sum()).backward()
        return y.tolist() == z.tolist(), w.tolist(), root and x.grad.tolist()

    assert run_ranks(main, 2) == [
        (True, [[0.0, 1.0], [3.0, 4.0]], False),
        (True, [[2.0], [5.0]], [[5.0] * 3] * 2),
    ]


def test_precedence_of_check_settings(monkeypatch):
    def on(check=None):
        return bool(consistency.requested(check))

    assert [on(), on(True), on(False)] == [False, True, False]
    with C.checks():
        assert [on(), on(False)] == [True, False]
        with C.checks(False):
            assert [on(), on(True)] == [False, True]
    monkeypatch.setenv("GRADWIRE_CHECKS", "1")
    assert [on(), on(False)] == [True, False]
    with C.checks(False):
        assert not on()
    monkeypatch.setenv("GRADWIRE_CHECKS", "0")
    assert not on()


def test_on_shm_checks_are_on_unless_switched_off(each_backend):
    def main():
        rank, group = dist.get_rank(), dist.group.WORLD
        x = torch.ones(2, requires_grad=rank == 1)
        C.all_reduce(x).sum().backward()  # the gradient is asked for on one rank only
        a, b = (C.broadcast(torch.ones(2, requires_grad=True), 0) for _ in range(2))
        with pytest.raises(MismatchError, match="GRADWIRE_CHECKS=1"):
            (a if rank else b).sum().backward()
        with pytest.raises(MismatchError, match="shape"):
            C.all_gather(torch.ones(2, 3) if rank else torch.ones(3, 2))
        operations = []
        for on in (None, False, True):
            before = group._get_sequence_number_for_group()
            y = C.all_gather(torch.ones(2, requires_grad=True), check=on)
            C.all_reduce(y, "avg", check=on).sum().backward()
            operations.append(group._get_sequence_number_for_group() - before)
        handle = C.all_gather(torch.ones(2, 3) if rank else torch.ones(3, 2), async_op=True)
        with pytest.raises(MismatchError, match="shape"):
            handle.wait()
        C.all_reduce(torch.ones(0 if rank else 2)[:0])  # nothing to send
        dist.all_reduce(torch.ones(1 + rank)[:1])  # no call of ours
        return x.grad, operations

    if each_backend == "shm":
        nothing, something = run_ranks(main)
        assert nothing == (None, [4, 4, 8])  # forward and backward of two
        assert something[0].tolist() == [2.0, 2.0]


@on_ranks(2)
def test_with_checks_off_only_data_is_sent():
    sent = []
    gather = wire.gather_ints
    try:
        wire.gather_ints = lambda *args: sent.append(1) or gather(*args)
        x = torch.ones(2, requires_grad=True)
        C.all_reduce(C.all_gather(x, check=False), check=False).sum().backward()
        off = len(sent)
        C.all_reduce(C.all_gather(x, check=True), check=True).sum().backward()
    finally:
        wire.gather_ints = gather
    assert (off, len(sent)) == (0, 4)


def test_a_gradient_that_an_inference_tensor_cannot_have():
    def main():
        with torch.inference_mode():
            x = torch.ones(2)
        with pytest.raises(MismatchError, match="requires-grad: rank 0: requires grad; rank 1"):
            C.all_gather(x if dist.get_rank() else torch.ones(2, requires_grad=True), check=True)
        return [y.tolist() for y in (C.gather(x, 0), C.reduce(x, 0), C.scatter(x, 0))]

    zeros, ones = [0.0] * 4, [1.0] * 4
    assert run_ranks(main) == [[ones, [2.0] * 2, [1.0]], [zeros, [0.0] * 2, [1.0]]]


def test_receivers_with_a_different_size_are_refused():
    def main():
        sizes = [1, 3] if dist.get_rank() else [2, 2]
        whole = torch.arange(4.0)
        with pytest.raises(MismatchError, match="splits"):
            C.scatter(whole, 0, sizes=[2, 2], like=torch.empty(3), check=True)
        # The root's word counts.
        return C.scatter(whole, 0, sizes=sizes, like=torch.empty(2), check=True).tolist()

    assert run_ranks(main) == [[0.0, 1.0], [2.0, 3.0]]


@on_ranks(2)
def test_more_dims_than_fit_a_signature():
    at_root = dist.get_rank() == 0
    x = torch.ones([2] + [1] * 8)
    for op in (
        lambda: C.scatter(x if at_root else None, 0),
        lambda: C.broadcast(x if at_root else None, 0, check=True),
    ):
        with pytest.raises(ArgumentError, match=r"more than 8 dims.*: give every rank a tensor"):
            op()
    assert C.scatter(x, 0, like=x[:1], check=True).shape == x[:1].shape
    assert C.broadcast(x, 0, check=True).shape == x.shape
    with pytest.raises(ArgumentError, match="size 1 in dim 0 on rank 1"):
        C.halo_exchange(x if at_root else x[:1], 2, check=True)
