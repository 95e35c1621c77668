"""torch.distributed.nn.functional, implemented by gradwire."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as theirs
from torch import Tensor

from gradwire import compat
from gradwire.compat.collectives import TABLE
from gradwire.errors import BoundEarlyWarning
from gradwire.testing import adjoint_check, gradcheck, run_ranks

pytestmark = pytest.mark.timeout(60)

NAMES = [entry.name for entry in TABLE]
ORIGINALS = {name: getattr(theirs, name) for name in NAMES}


Run = Callable[[Callable[[], Any], int], list[Any]]


@pytest.fixture(params=["gloo", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    """`fn` on ranks with gradwire in place, and no warning."""

    def on_ranks(fn: Callable[[], Any], world_size: int = 2) -> list[Any]:
        def member() -> Any:
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", BoundEarlyWarning)  # of others, in a kept process
            with compat.installed():
                return fn()

        return run_ranks(member, world_size, backend=request.param)

    return on_ranks


def values(*shape: int, seed: int = 0) -> Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_the_table_has_every_collective_of_this_pytorch() -> None:
    functions = vars(theirs).items()
    own = {n for n, f in functions if inspect.isfunction(f) and f.__module__ == theirs.__name__}
    assert {n for n in own if not n.startswith("_")} | {"_all_gather_base"} == set(NAMES)


def sums() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Each of the ten on two ranks, where torch's gradients are right: of sums, on the world."""
    rank, out = dist.get_rank(), torch.empty
    kw = {"dtype": torch.float64}
    rows = [[1, 2], [3, 1]]  # what rank r sends
    into = [rows[r][rank] for r in range(2)]
    return {
        "broadcast": (lambda f, x: f(x, 1), [values(2, 3)]),
        "gather": (lambda f, x: f(x, 1), [values(2, 3)]),
        "scatter": (lambda f, *xs: f(list(xs), 1), [values(2), values(2, seed=1)]),
        "reduce": (lambda f, x: f(x, 1) if rank else f(x, 1) * 0, [values(2, 3)]),
        "reduce_scatter": (
            lambda f, *xs: f(out(2, **kw), list(xs)),
            [values(2), values(2, seed=1)],
        ),
        "all_gather": (lambda f, x: f(x), [values(2, 3)]),
        "all_to_all": (
            lambda f, *xs: f([out(2, **kw), out(2, **kw)], list(xs)),
            [values(2), values(2, seed=1)],
        ),
        "all_to_all_single": (
            lambda f, x: f(out(sum(into), 2, **kw), x, into, rows[rank]),
            [values(sum(rows[rank]), 2)],
        ),
        "all_reduce": (lambda f, x: f(x), [values(2, 3)]),
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "_all_gather_base"])
def test_functional_matches_torch_where_torch_is_correct(run: Run, name: str) -> None:
    def results(fn: Callable[..., Any]) -> list[Tensor]:
        call, inputs = sums()[name]
        result = call(fn, *inputs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        assert isinstance(result, Tensor | tuple)
        sum(t.sin().sum() for t in outputs).backward()  # type: ignore[union-attr]
        return [*(t.detach() for t in outputs), *(x.grad for x in inputs if x.grad is not None)]

    def member() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # torch's default is the group that was there when its module was imported
            expected = results(partial(ORIGINALS[name], group=dist.group.WORLD))
        ours = results(getattr(theirs, name))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)

    run(member)


def test_gathering_into_one_tensor(run: Run) -> None:
    def member() -> None:
        x = values(2, 3)
        for shape in ((4, 3), (2, 2, 3), (12,)):
            into = torch.empty(shape, dtype=x.dtype)
            whole = theirs._all_gather_base(into, x)
            assert torch.equal(whole, into)
            assert torch.equal(whole.flatten(), torch.cat(theirs.all_gather(x)).flatten())
        adjoint_check(lambda x: theirs._all_gather_base(torch.empty(4, 3).to(x), x), x)

    run(member)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MAX", "MIN"])
def test_every_reduction_has_its_gradient(run: Run, op: str) -> None:
    def member() -> None:
        kind, x = getattr(dist.ReduceOp, op), values(4)
        gradcheck(lambda x: theirs.all_reduce(x, kind), x)
        gradcheck(lambda x: theirs.reduce(x, 1, kind), x)
        gradcheck(lambda x: theirs.reduce_scatter(torch.empty(2).to(x), x.split(2), kind), x)

    run(member)


def test_a_subgroup_in_both_passes(run: Run) -> None:
    def member() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() not in (1, 2):
            return
        x = values(2, 2)
        ops: list[Callable[[Tensor], Any]] = [
            lambda x: theirs.broadcast(x, 2, group),
            lambda x: theirs.gather(x, 2, group),
            lambda x: theirs.scatter(x.unbind(), 2, group),
            lambda x: theirs.reduce(x, 2, group=group),
            lambda x: theirs.reduce_scatter(torch.empty(2).to(x), x.unbind(), group=group),
            lambda x: theirs.all_gather(x, group),
            lambda x: theirs._all_gather_base(torch.empty(4, 2).to(x), x, group),
            lambda x: theirs.all_to_all([torch.empty(2).to(x) for _ in x], x.unbind(), group),
            lambda x: theirs.all_to_all_single(torch.empty(2, 2).to(x), x, group=group),
            lambda x: theirs.all_reduce(x, group=group),
        ]
        for op in ops:
            gradcheck(op, x, group)
            adjoint_check(lambda x, op=op: op(x.t().contiguous().t()), x, group)

    run(member, 4)


def test_receivers_of_scatter_give_none_or_tensors(run: Run) -> None:
    def member() -> Any:
        tensors = [torch.full((2,), float(i), requires_grad=True) for i in range(2)]
        given = theirs.scatter(tensors, 1)
        given.sum().backward()
        from_none = theirs.scatter(tensors if dist.get_rank() == 1 else None, 1)
        from_none.sum().backward()
        return given.tolist(), from_none.tolist(), [t.grad.tolist() for t in tensors]  # type: ignore[union-attr]

    first, second = run(member)
    assert first == ([0, 0], [0, 0], [[0, 0], [0, 0]])
    assert second == ([1, 1], [1, 1], [[2, 2], [2, 2]])


def test_all_to_all_of_different_shapes(run: Run) -> None:
    def member() -> None:
        rank = dist.get_rank()
        xs = [values(1, 2), values(3, seed=1)]  # for rank 0, for rank 1
        outputs = [torch.empty((3,) if rank else (1, 2), dtype=torch.float64) for _ in xs]
        received = theirs.all_to_all(outputs, xs)
        assert torch.equal(received[rank], xs[rank])
        assert all(torch.equal(a, b) for a, b in zip(received, outputs, strict=True))
        adjoint_check(lambda *xs: theirs.all_to_all(outputs, xs), xs)

    run(member)


def test_outputs_are_written_and_may_be_used_again(run: Run) -> None:
    def member() -> Any:
        x = values(2, 2)
        out = torch.empty(2, 2, dtype=x.dtype)
        received = theirs.all_to_all_single(out, x)
        squared = received * received
        assert torch.equal(out, received)
        out.zero_()  # refilled, before backward
        squared.sum().backward()
        assert torch.allclose(x.grad, 2 * x)  # type: ignore[arg-type]
        result = theirs.reduce_scatter(torch.empty(2).to(x), list(x))
        result.add_(1).sum().backward()  # results may be changed in place

    run(member)


def test_shapes_that_do_not_fit_raise_before_anything_is_sent(run: Run) -> None:
    def member() -> list[str]:
        x, short = torch.ones(4, 2), torch.ones(3, 2)
        bad: Sequence[Callable[[], object]] = [
            lambda: theirs._all_gather_base(torch.empty(6, 2), x),
            lambda: theirs._all_gather_base(torch.empty(8, 2).double(), x),
            lambda: theirs.all_to_all_single(torch.empty(4, 3), x),
            lambda: theirs.all_to_all_single(torch.empty(4, 2), short),
            lambda: theirs.reduce_scatter(torch.empty(3), [x, x]),
            lambda: theirs.reduce_scatter(torch.empty(4, 2), [x]),
            lambda: theirs.all_to_all([torch.empty(4, 2)], [x, x]),
        ]
        messages = []
        for call in bad:
            with pytest.raises(ValueError, match=r"give|receives") as caught:
                call()
            assert isinstance(caught.value, RuntimeError)  # as which PyTorch raises most
            messages.append(str(caught.value))
        return messages

    assert run(member)[0] == run(member)[1]
