"""A wrong argument is an error of ours that names it, before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire import collectives as C
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.testing import run_ranks

ONES = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: C.all_reduce([1]), ArgumentTypeError, "x is a list"),
        (lambda: C.all_reduce(ONES.to_sparse()), ArgumentError, "sparse_coo"),
        (lambda: C.all_gather("x"), ArgumentTypeError, "x is a str"),
        (lambda: C.vary(3), ArgumentTypeError, "x is a int"),
        (lambda: C.shift(None), ArgumentTypeError, "x is a NoneType"),
        (lambda: C.all_reduce(ONES, "mean"), ArgumentError, "op is 'mean': give one of sum"),
        (lambda: C.all_reduce(ONES, 7), ArgumentTypeError, "op is 7"),
        (lambda: C.all_reduce(ONES, dist.ReduceOp.BXOR), ArgumentError, "give integers"),
        (lambda: C.all_reduce(ONES.long(), "avg"), ArgumentError, "give floating-point"),
        (lambda: C.all_reduce(ONES.bool()), ArgumentError, "give band, bor"),
        (lambda: C.all_reduce(ONES + 0j, "max"), ArgumentError, "not ordered"),
        (lambda: C.all_reduce(ONES, "max", invariant=True), ArgumentError, "with sum or avg"),
        (lambda: C.all_reduce(ONES, group="world"), ArgumentTypeError, "group is 'world'"),
        (lambda: C.reduce(ONES), ArgumentError, "give dst"),
        (lambda: C.reduce(ONES, 0, group_dst=0), ArgumentError, "both given"),
        (lambda: C.reduce(ONES, 5), ArgumentError, "dst is global rank 5"),
        (lambda: C.broadcast(ONES, group_src=-1), ArgumentError, "group_src is -1"),
        (lambda: C.broadcast(None, 0), ArgumentTypeError, "on the root: give the tensor"),
        (lambda: C.all_gather(ONES, 2), ArgumentError, "dim is 2"),
        (lambda: C.all_gather(ONES, 3, stack=True), ArgumentError, "dim is 3"),
        (lambda: C.all_gather(ONES, sizes=[2]), ArgumentError, "has size 4"),
        (lambda: C.all_gather(ONES, sizes=[4, 4]), ArgumentError, "each of 1 ranks"),
        (lambda: C.all_gather(ONES, sizes="guess"), ArgumentError, "sizes is 'guess'"),
        (lambda: C.gather(ONES, 0, sizes=[3]), ArgumentError, "has size 4"),
        (lambda: C.scatter(ONES, 0, sizes=[3]), ArgumentError, "xs has 4 in dim 0"),
        (lambda: C.scatter([ONES, ONES], 0), ArgumentError, "xs has 2 tensors"),
        (lambda: C.scatter(None, 0), ArgumentTypeError, "xs is a NoneType"),
        (lambda: C.reduce_scatter(ONES, sizes=[3]), ArgumentError, "x has 4"),
        (lambda: C.reduce_scatter([ONES] * 2), ArgumentError, "x has 2 tensors"),
        (lambda: C.all_to_all(ONES, input_splits=[3]), ArgumentError, "x has 4 in dim 0"),
        (lambda: C.all_to_all(ONES, input_splits=[-4]), ArgumentError, "≥ 0"),
        (lambda: C.all_to_all([ONES] * 3), ArgumentError, "x has 3 tensors"),
        (lambda: C.ppermute(ONES, [(0, 0), (0, 0)]), ArgumentError, "a source occurs twice"),
        (lambda: C.ppermute(ONES, [(0, 1)]), ArgumentError, "a destination is not in the group"),
    ],
)
def test_wrong_arguments(call, kind, message):
    def main():
        with pytest.raises(kind, match=message):
            call()

    run_ranks(main, 1)


def test_sizes_that_do_not_divide():
    def main():
        for op in (C.reduce_scatter, C.all_to_all, lambda x: C.scatter(x, 0)):
            with pytest.raises(ArgumentError, match="number of ranks, 2: give the sizes"):
                op(torch.ones(3))
        other = 1 - dist.get_rank()
        with pytest.raises(ArgumentError, match="check=True on every rank"):
            C.broadcast((3,), other, check=False)

    run_ranks(main, 2)


def test_without_a_default_group():
    with pytest.raises(ArgumentError, match="init_process_group first"):
        C.all_reduce(ONES)
