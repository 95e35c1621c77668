"""Every collective's backward is its adjoint, in all groups; and so on for second derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.testing import adjoint_check, gradcheck

pytestmark = pytest.mark.usefixtures("each_backend")

LINEAR = {
    "all_reduce": lambda x, **g: C.all_reduce(x, **g),
    "all_reduce avg": lambda x, **g: C.all_reduce(x, "avg", **g),
    "all_reduce async": lambda x, **g: C.all_reduce(x, async_op=True, **g).wait(),
    "reduce": lambda x, **g: C.reduce(x, group_dst=1, **g),
    "reduce avg": lambda x, **g: C.reduce(x, 1, "avg", **g),
    "broadcast": lambda x, **g: C.broadcast(x, 1, **g),
    "broadcast group_src": lambda x, **g: C.broadcast(x, group_src=1, **g),
    "all_gather": lambda x, **g: C.all_gather(x, **g),
    "all_gather dim 1": lambda x, **g: C.all_gather(x, 1, **g),
    "all_gather stacked": lambda x, **g: C.all_gather(x, -1, stack=True, **g),
    "all_gather uneven": lambda x, **g: C.all_gather(ragged(x, g), sizes="find", **g),
    "all_gather async": lambda x, **g: C.all_gather(x, 1, async_op=True, **g).wait(),
    "all_gather_list": lambda x, **g: C.all_gather_list(x, **g),
    "gather": lambda x, **g: C.gather(x, 1, **g),
    "gather dim 1": lambda x, **g: C.gather(x, 1, 1, **g),
    "gather uneven": lambda x, **g: C.gather(ragged(x, g), group_dst=1, sizes="find", **g),
    "scatter": lambda x, **g: C.scatter(x, 1, like=x[: len(x) // size(g)], **g),
    "scatter without like": lambda x, **g: C.scatter(
        x.chunk(size(g), 1), group_src=1, dim=1, like=x.chunk(size(g), 1)[0], check=True, **g
    ),
    "reduce_scatter": lambda x, **g: C.reduce_scatter(x, **g),
    "reduce_scatter avg": lambda x, **g: C.reduce_scatter(x, "avg", **g),
    "reduce_scatter uneven": lambda x, **g: C.reduce_scatter(x, dim=1, sizes=cut(x, g), **g),
    "reduce_scatter list": lambda x, **g: C.reduce_scatter(list(x.chunk(size(g))), **g),
    "all_to_all": lambda x, **g: C.all_to_all(x, **g),
    "all_to_all dims": lambda x, **g: C.all_to_all(x, split_dim=0, concat_dim=1, **g),
    "all_to_all uneven": lambda x, **g: C.all_to_all(x, input_splits=cut(x.mT, g), **g),
    "all_to_all list": lambda x, **g: C.all_to_all(list(x.split(cut(x.mT, g))), **g),
    "ppermute": lambda x, **g: C.ppermute(x, [(0, 1)], **g),
    "shift": lambda x, **g: C.shift(x, 1, **g),
    "shift off": lambda x, **g: C.shift(x, -1, wrap=False, **g),
    "vary of invariant": lambda x, **g: C.vary(C.all_reduce(x, invariant=True, **g), **g),
    "invariant avg": lambda x, **g: C.vary(C.all_reduce(x, "avg", invariant=True, **g), **g),
}
NONLINEAR = {
    f"{form} {op}": (lambda x, form=form, op=op, **g: FORMS[form](x, op, g))
    for form in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter uneven", "async")
    for op in ("max", "min", "product")
}
FORMS = {
    "all_reduce": lambda x, op, g: C.all_reduce(x, op, **g),
    "reduce": lambda x, op, g: C.reduce(x, 2, op, **g),
    "reduce_scatter": lambda x, op, g: C.reduce_scatter(x, op, **g),
    "reduce_scatter uneven": lambda x, op, g: C.reduce_scatter(x, op, 1, sizes=cut(x, g), **g),
    "async": lambda x, op, g: C.all_reduce(x, op, async_op=True, **g).wait(),
}


def size(g):
    return dist.get_world_size(g["group"])


def ragged(x, g):
    """As many rows as the rank in the group, and so none on the first."""
    return x[: dist.get_rank(g["group"])]


def cut(x, g):
    """Sizes of a cut of dim 1, with an empty one: the last rank gets most."""
    world = size(g)
    return [0] + [1] * (world - 2) + [x.shape[1] - (world - 2)]


def groups():
    """The world, and [1, 2] on its members."""
    sub = dist.new_group([1, 2])
    return [{"group": None}] + ([{"group": sub}] if dist.get_rank() in (1, 2) else [])


@on_ranks(3, timeout=60)
def test_linear_ops_in_every_group():
    """Other layouts and dtypes are drawn by tests/fuzz."""
    for g in groups():
        for name, op in LINEAR.items():
            x = torch.randn(size(g), size(g), dtype=torch.complex64, requires_grad=True)
            try:
                assert adjoint_check(lambda x, op=op, g=g: op(x, **g), x, g["group"])
            except Exception as error:
                raise AssertionError(f"{name}, {g}") from error


@pytest.mark.wide
@pytest.mark.parametrize("first", [0, 1], ids=["even", "odd"])
@on_ranks(2)
def test_linear_ops_have_second_derivatives(first):
    for name in list(LINEAR)[first::2]:

        def squared(x, name=name):
            out = LINEAR[name](x * x, group=None)
            return [y * y for y in (out if isinstance(out, tuple) else (out,))]

        x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
        try:
            gradcheck(squared, x)
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.narrow({"each_backend": "shm"})
@on_ranks(3)
def test_nonlinear_ops():
    for g in groups():
        for name, op in NONLINEAR.items():
            x = torch.randn(size(g), 1, dtype=torch.float64, requires_grad=True)
            try:
                gradcheck(lambda x, op=op, g=g: op(x, **g), x, g["group"])
            except Exception as error:
                raise AssertionError(f"{name}, {g}") from error
