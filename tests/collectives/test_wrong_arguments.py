"""What cannot be sent is refused before anything is, by name and with the remedy."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.testing import run_ranks

SOON_S = 10.0

OPS = {
    "all_reduce": C.all_reduce,
    "all_gather": C.all_gather,
    "all_to_all": C.all_to_all,
    "gather": lambda x: C.gather(x, 0),
    "reduce": lambda x: C.reduce(x, 0),
    "reduce_scatter": C.reduce_scatter,
}


def refused(call, kind, message):
    """Check that a call raises an error; say which one if it does not."""
    try:
        with pytest.raises(kind, match=message):
            call()
    except pytest.fail.Exception as failure:
        raise AssertionError(f"{failure}: {message}") from None


@on_ranks(2)
def test_what_is_no_tensor_and_sparse_tensors():
    for name, op in OPS.items():
        if "_to_" not in name and "_sc" not in name:
            refused(lambda op=op: op(1.0), ArgumentTypeError, "x is a float: give a tensor")
        sparse = torch.eye(2).to_sparse()
        message = r"layout torch.sparse_coo: give dense"
        refused(lambda op=op, x=sparse: op(x), ArgumentError, message)


REDUCTIONS = OPS | {
    "coalesced": lambda x: C.all_reduce_coalesced([x]),
    "asynchronous": lambda x: C.all_reduce(x, async_op=True),
    "max": lambda x: C.all_reduce(x, "max"),
    "reduce product": lambda x: C.reduce(x, 0, "product"),
    "uneven": lambda x: C.reduce_scatter(x.reshape(1), sizes=[0, 1]),
}
WITHOUT_ARITHMETIC = [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.int1]


@pytest.mark.parametrize("dtype", WITHOUT_ARITHMETIC)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_dtypes_that_cannot_be_reduced(dtype, backend):
    moved = {"all_gather", "all_to_all", "gather"}
    calls = {name: call for name, call in REDUCTIONS.items() if name not in moved}

    def main():
        x = torch.empty((), dtype=dtype)  # of which most ranks would get nothing to reduce
        for call in calls.values():
            with pytest.raises(ArgumentError, match=f"tensor is {dtype}: .*convert the tensor"):
                call(x)
        with C.checks(), pytest.raises(ArgumentError, match="op is sum"):
            C.all_reduce(x)
        return C.all_gather(x.reshape(1).view(torch.uint8)).dtype  # still in step

    run_ranks(main, backend=backend, timeout=30)


@on_ranks(2, timeout=30)
def test_cotangents_of_a_dtype_that_cannot_be_reduced():
    for move in (C.all_gather, lambda x: C.broadcast(x, 0)):
        x = torch.ones(1).to(torch.float8_e4m3fn).requires_grad_()
        with pytest.raises(ArgumentError, match=r"op is sum, .*float8_e4m3fn: .* convert"):
            move(x).float().sum().backward()


def test_what_can_be_reduced_of_narrow_dtypes():
    def main():
        bits = torch.tensor([dist.get_rank() + 1], dtype=torch.uint16)
        y = torch.tensor([1 + 2j, 3j]).to(torch.complex32)
        return (
            C.all_reduce(bits, "bor").tolist(),
            C.all_reduce(y).tolist(),
            C.reduce_scatter(y, sizes=[1, 1]).tolist(),
        )

    gloo = run_ranks(main)
    assert gloo == run_ranks(main, backend="shm")
    rank_0, rank_1 = gloo
    assert rank_0 == ([3], [2 + 4j, 6j], [2 + 4j])
    assert rank_1 == ([3], [2 + 4j, 6j], [6j])


@on_ranks(2)
def test_the_environment_s_word_for_checks():
    os.environ["GRADWIRE_CHECKS"] = "yes"
    with pytest.raises(ArgumentError, match="GRADWIRE_CHECKS is 'yes': give 0 or 1"):
        C.all_reduce(torch.ones(1))
    os.environ["GRADWIRE_CHECKS"] = "1"
    C.all_reduce(torch.ones(1))


EYE = torch.eye(4)
LISTS = {
    "all_to_all": C.all_to_all,
    "reduce_scatter": C.reduce_scatter,
    "scatter": lambda xs: C.scatter(xs, 0),
}


UNLIKE = [
    (None, ArgumentTypeError, "is a NoneType: give a tensor, or a list"),
    ([EYE, 1], ArgumentTypeError, r"\[1\] is a int: give a tensor"),
    ([EYE] * 3, ArgumentError, "has 3 tensors: give one for each of 2 ranks"),
    ([EYE, EYE.to_sparse()], ArgumentError, "layout torch.sparse_coo: give dense"),
    ([EYE, EYE.double()], ArgumentError, r"\[1\] is torch.float64 on cpu, .* give all"),
    ([EYE, EYE[0]], ArgumentError, r"\[1\] has shape \(4,\), .* differ in dim 0 only"),
    ([EYE, EYE[:, 1:]], ArgumentError, r"\[1\] has shape \(4, 3\), .* differ in dim 0 only"),
]


@pytest.mark.parametrize("name", LISTS)
@on_ranks(2)
def test_lists_whose_tensors_are_not_alike(name):
    for xs, kind, message in UNLIKE:
        refused(lambda xs=xs: LISTS[name](xs), kind, message)


WRONG = [
    (lambda: C.all_gather("x"), ArgumentTypeError, "x is a str"),
    (lambda: C.vary(3), ArgumentTypeError, "x is a int"),
    (lambda: C.shift(None), ArgumentTypeError, "x is a NoneType"),
    (lambda: C.all_reduce(EYE, "mean"), ArgumentError, "op is 'mean': give one of sum"),
    (lambda: C.all_reduce(EYE, 7), ArgumentTypeError, "op is 7"),
    (lambda: C.all_reduce(EYE, dist.ReduceOp.BXOR), ArgumentError, "give integers"),
    (lambda: C.all_reduce(EYE.long(), "avg"), ArgumentError, "give floating-point"),
    (lambda: C.all_reduce(EYE.bool()), ArgumentError, "give band, bor"),
    (lambda: C.all_reduce(EYE, "max", invariant=True), ArgumentError, "with sum or avg"),
    (lambda: C.all_reduce(EYE, group="world"), ArgumentTypeError, "group is 'world'"),
    (lambda: C.reduce(EYE), ArgumentError, "give dst"),
    (lambda: C.reduce(EYE, 0, group_dst=0), ArgumentError, "both given"),
    (lambda: C.reduce(EYE, 5), ArgumentError, "dst is global rank 5"),
    (lambda: C.broadcast(EYE, group_src=-1), ArgumentError, "group_src is -1"),
    (lambda: C.broadcast(None, 0), ArgumentTypeError, "on the root: give the tensor"),
    (lambda: C.all_gather(EYE, 2), ArgumentError, "dim is 2"),
    (lambda: C.all_gather(EYE, 3, stack=True), ArgumentError, "dim is 3"),
    (lambda: C.all_gather(EYE, sizes=[2]), ArgumentError, "has size 4"),
    (lambda: C.all_gather(EYE, sizes=[4, 4]), ArgumentError, "each of 1 ranks"),
    (lambda: C.all_gather(EYE, sizes="guess"), ArgumentError, "sizes is 'guess'"),
    (lambda: C.gather(EYE, 0, sizes=[3]), ArgumentError, "has size 4"),
    (lambda: C.scatter(EYE, 0, sizes=[3]), ArgumentError, "xs has 4 in dim 0"),
    (lambda: C.reduce_scatter(EYE, sizes=[3]), ArgumentError, "x has 4"),
    (lambda: C.all_to_all(EYE, input_splits=[3]), ArgumentError, "x has 4 in dim 0"),
    (lambda: C.all_to_all(EYE, input_splits=[-4]), ArgumentError, "≥ 0"),
    (lambda: C.ppermute(EYE, [(0, 0), (0, 0)]), ArgumentError, "a source occurs twice"),
    (lambda: C.ppermute(EYE, [(0, 1)]), ArgumentError, "a destination is not in the group"),
    (lambda: C.all_gather(EYE, sizes=4), ArgumentTypeError, "sizes is 4: give a list with"),
    (lambda: C.gather(EYE, 0, sizes=4, check=True), ArgumentTypeError, "sizes is 4: give a"),
    (lambda: C.all_to_all(EYE, input_splits="a"), ArgumentTypeError, "input_splits is 'a'"),
    (lambda: C.all_to_all([EYE], split_dim=1), ArgumentError, "split_dim 1.*omit these"),
    (lambda: C.reduce_scatter([EYE], sizes=[3]), ArgumentError, r"have sizes \[4\] in dim 0"),
    (lambda: C.reduce_scatter([EYE], dim=2), ArgumentError, "dim is 2"),
    (lambda: C.scatter([EYE], 0, sizes=[3]), ArgumentError, r"have sizes \[4\] in dim 0"),
    (lambda: C.scatter(EYE.to("meta"), 0), ArgumentError, "xs is on the meta device"),
    (lambda: C.scatter([EYE.to("meta")], 0), ArgumentError, r"xs\[0\] is on the meta device"),
    (lambda: C.broadcast(EYE.to("meta"), 0), ArgumentError, "x is on the meta device"),
    (lambda: C.broadcast(EYE.to_sparse(), 0), ArgumentError, "layout torch.sparse_coo"),
    (lambda: C.halo_exchange(None, 1), ArgumentTypeError, "x is a NoneType"),
    (lambda: C.halo_exchange(EYE, (1, 2, 3)), ArgumentTypeError, "give one int, or a tuple"),
    (lambda: C.halo_exchange(EYE, 5, check=False), ArgumentError, "widths is 5"),
    (lambda: C.halo_exchange(EYE, -1), ArgumentError, "widths is -1: give numbers ≥ 0"),
    (lambda: C.all_reduce(EYE + 0j, "max"), ArgumentError, "complex numbers are not ordered"),
    (lambda: C.all_reduce(EYE.to(torch.complex32), "avg"), ArgumentError, "op is avg, .* conv"),
    (lambda: C.ppermute(EYE, [0]), ArgumentTypeError, r"pairs is \[0\]: give a list of"),
    (lambda: C.shift(EYE, 1.5), ArgumentTypeError, "k is 1.5"),
    (lambda: C.barrier(3), ArgumentTypeError, "x is a int"),
    (lambda: C.send(None, 0), ArgumentTypeError, "x is a NoneType"),
    (lambda: C.tie(EYE, None), ArgumentTypeError, "token is a NoneType"),
    (lambda: C.all_reduce_coalesced([EYE.to_sparse()]), ArgumentError, "leaf 0 of the tree"),
    (lambda: C.reduce_scatter_coalesced([EYE[0, 0]]), ArgumentError, "a leaf is 0-d"),
]


@on_ranks(1)
def test_wrong_arguments():
    for call, kind, message in WRONG:
        refused(call, kind, message)


@on_ranks(2)
def test_a_receiver_s_sizes_are_those_of_like():
    like = torch.empty(2)
    if dist.get_rank():
        with pytest.raises(ArgumentError, match=r"sizes is \[1, 3\]: .* has size 2"):
            C.scatter(None, 0, sizes=[1, 3], like=like)
        with pytest.raises(ArgumentError, match=r"sizes is \[2\]: give one size"):
            C.scatter(None, 0, sizes=[2], like=like)
        with pytest.raises(ArgumentTypeError, match="like is a tuple"):
            C.scatter(None, 0, like=(2,))


@pytest.mark.parametrize(
    ("xs", "options", "kind", "message"),
    [
        (torch.ones(3), {}, ArgumentError, "xs has size 3 .* number of ranks, 2: give the"),
        (torch.ones(3), {"sizes": [1, 1]}, ArgumentError, "sizes is"),
        ([EYE], {}, ArgumentError, "xs has 1 tensors: give one for each of 2 ranks"),
        (None, {}, ArgumentTypeError, "xs is a NoneType: give a tensor"),
        (EYE.to("meta"), {}, ArgumentError, "xs is on the meta device"),
        (EYE, {"dim": 7}, ArgumentError, "dim is 7"),
        (EYE[:3], {"like": EYE[:2], "check": True}, ArgumentError, "xs has size 3"),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_a_scatter_s_root_cannot_split_is_an_error_on_all(xs, options, kind, message, backend):
    def main():
        started, at_root = time.monotonic(), dist.get_rank() == 1
        with pytest.raises(kind, match=message) as caught:
            C.scatter(xs if at_root else None, 1, **options)
        assert time.monotonic() - started < SOON_S
        assert at_root or str(caught.value).startswith("scatter, on rank 1 of the group: ")
        return C.scatter(EYE if at_root else None, 1).tolist()  # still in step

    assert run_ranks(main, backend=backend, timeout=30) == [EYE[:2].tolist(), EYE[2:].tolist()]


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (None, ArgumentTypeError, "x is a NoneType on the root: give the tensor to send"),
        (EYE.to("meta"), ArgumentError, "x is on the meta device"),
        (EYE.to_sparse(), ArgumentError, "x has layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_a_broadcast_s_root_cannot_send_is_an_error_on_all(x, kind, message, backend):
    def main():
        started, at_root = time.monotonic(), dist.get_rank() == 1
        with C.checks(), pytest.raises(kind, match=message):
            C.broadcast(x if at_root else None, 1)
        assert time.monotonic() - started < SOON_S
        return C.broadcast(EYE if at_root else None, 1, check=True).shape  # still in step

    assert run_ranks(main, backend=backend, timeout=30) == [EYE.shape] * 2


@on_ranks(2)
def test_sizes_that_do_not_divide():
    for op in (C.reduce_scatter, C.all_to_all, lambda x: C.scatter(x, 0)):
        with pytest.raises(ArgumentError, match="number of ranks, 2: give the sizes"):
            op(torch.ones(3))
    other = 1 - dist.get_rank()
    with pytest.raises(ArgumentError, match="check=True on every rank"):
        C.broadcast((3,), other, check=False)


def test_without_a_default_group():
    with pytest.raises(ArgumentError, match="init_process_group first"):
        C.all_reduce(EYE)
