"""gradcheck and adjoint_check: what is right passes, what is wrong is named, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ArgumentError, ArgumentTypeError, MismatchError
from gradwire.testing import RankError, adjoint_check, gradcheck, run_ranks

pytestmark = pytest.mark.timeout(60)


def summed(x: Tensor, group: Any = None) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Sum(torch.autograd.Function):
    """The sum over ranks; its adjoint is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any = None) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Sum.apply(grads[0], ctx.group), None


class MissingFactor(torch.autograd.Function):
    """The mean over ranks, whose backward is the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x) / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return summed(grads[0])


class Permuted(torch.autograd.Function):
    """A rotation of the columns on top of the sum, whose backward forgets to rotate back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x).roll(1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return summed(grads[0]).roll(1, 1)


class WrongRank(torch.autograd.Function):
    """A broadcast from rank 1, whose backward gives the sum to rank 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.detach().clone()
        dist.broadcast(out, 1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = summed(grads[0])
        return total if dist.get_rank() == 0 else torch.zeros_like(total)


WRONG = [MissingFactor, Permuted, WrongRank]


def values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def outcome(check: Callable[[], object]) -> tuple[str, str]:
    try:
        return "returned", repr(check())
    except Exception as error:
        return type(error).__name__, str(error)


def outcomes(check: Callable[[], object], world_size: int = 2) -> list[tuple[str, str]]:
    return run_ranks(lambda: outcome(check), world_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_what_is_right_passes(dtype: torch.dtype) -> None:
    def check() -> object:
        x = values(3, 2, dtype=dtype)
        local = values(2, dtype=dtype)
        return gradcheck(lambda a, b: (Sum.apply(a * a) * b, {"other": a.sin()}), [x, local])

    assert outcomes(check) == [("returned", "True")] * 2


@pytest.mark.parametrize("check", [gradcheck, adjoint_check])
@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_adjoint_is_found_on_every_rank(check: Any, op: Any) -> None:
    first, second = outcomes(lambda: check(op.apply, values(2, 3)))
    assert first == second
    assert first[0] == "GradientError"
    assert "rank 0, inputs[0][0, 0]: backward gives" in first[1]
    assert ("finite differences" if check is gradcheck else "the adjoint") in first[1]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
def test_adjoints_in_every_dtype(dtype: torch.dtype) -> None:
    def both() -> tuple[tuple[str, str], ...]:
        x = values(2, 3, dtype=dtype)
        right = outcome(lambda: adjoint_check(Sum.apply, x))
        return right, *(outcome(lambda op=op: adjoint_check(op.apply, x)) for op in WRONG)

    first, second = run_ranks(both)
    assert first == second
    assert [kind for kind, _ in first] == ["returned", *["GradientError"] * 3]


def test_complex_parts_are_told_apart() -> None:
    class NotConjugate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1j

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 1j  # the adjoint multiplies by -1j

    (_, text), _ = outcomes(
        lambda: gradcheck(NotConjugate.apply, values(2, dtype=torch.complex128))
    )
    assert "8 of 8 entries" in text
    assert "rank 1, inputs[0][1] (imaginary part): backward gives" in text


def test_a_wrong_second_derivative_is_found() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return summed(x * x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x.detach() * Sum.apply(grads[0])  # right, but constant in x

    def check() -> object:
        return gradcheck(Square.apply, values(3))

    first, second = outcomes(check)
    assert first == second
    assert first[0] == "GradientError"
    assert first[1].startswith("second derivatives: 6 of 12 entries differ")


@pytest.mark.wide
def test_a_subgroup_checks_itself_while_others_stay_away() -> None:
    def check() -> object:
        group = dist.new_group([1, 2])
        if dist.get_rank() not in (1, 2):
            return outcome(lambda: gradcheck(lambda x: x, values(2), group))
        right = gradcheck(lambda x: Sum.apply(x * x, group), values(2), group)
        wrong = outcome(
            lambda: adjoint_check(lambda x: Sum.apply(x.detach(), group) + x, values(1), group)
        )
        return right, wrong

    outside, one, two, _ = run_ranks(check, world_size=4)
    assert outside[0] == "ArgumentError"
    assert "does not contain this rank" in outside[1]
    assert one == two
    assert one[0] is True
    assert "rank 1, inputs[0][0]" in one[1][1]  # in the group's numbering


def test_inputs_of_different_shapes_and_without_gradient() -> None:
    def check() -> object:
        rank = dist.get_rank()
        x = values(rank + 1, 2).detach().requires_grad_(rank != 1)
        scale = values(2)
        return gradcheck(lambda x, s, k, none: Sum.apply(x.sum(0) * s) * k, [x, scale, 3.0, None])

    assert outcomes(check, 3) == [("returned", "True")] * 3


@pytest.mark.parametrize("check", [gradcheck, adjoint_check])
def test_an_error_on_one_rank_reaches_the_others(check: Any) -> None:
    def fails_on_rank_1(x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such luck")
        return x

    one, two, three = outcomes(lambda: check(fails_on_rank_1, values(2)), 3)
    assert two == ("KeyError", "'no such luck'")
    assert one == three
    assert one[0] == "PeerFailedError"
    assert "rank 1: KeyError: 'no such luck'" in one[1]


def test_a_rank_that_waits_in_a_collective_meanwhile_is_ended_by_the_group() -> None:
    def fails_on_rank_1(x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such luck")
        return Sum.apply(x)

    with pytest.raises(RankError, match="no such luck") as caught:
        run_ranks(lambda: gradcheck(fails_on_rank_1, values(2)))
    assert isinstance(caught.value.failures[1], KeyError)


def test_unusable_arguments() -> None:
    def check() -> object:
        x = values(2)
        bad: list[Callable[[], object]] = [
            lambda: gradcheck(lambda x: x, x.detach()),
            lambda: adjoint_check(lambda x: x, [x.detach(), 1]),
            lambda: gradcheck(lambda x: x, x.detach().float().requires_grad_()),
            lambda: gradcheck(lambda x: x, 3),
            lambda: gradcheck(lambda x: x, x, "world"),
            lambda: (gradcheck if dist.get_rank() else adjoint_check)(lambda x: x, x),
            lambda: gradcheck(lambda x: Sum.apply(x).sum().item(), x),
            lambda: adjoint_check(lambda x: None, x),
        ]
        return [outcome(call) for call in bad]

    expected = [
        (ArgumentError, "no entry that requires grad on any rank"),
        (ArgumentError, "no entry that requires grad on any rank"),
        (ArgumentError, "inputs[0] is torch.float32"),
        (ArgumentTypeError, "inputs must be a tensor or a sequence"),
        (ArgumentTypeError, "group is 'world'"),
        (MismatchError, "ranks check different derivatives: shapes, adjoint"),
        (ArgumentError, "returned no floating-point or complex tensor on any rank"),
        (ArgumentError, "returned no floating-point or complex tensor on any rank"),
    ]
    for rank in run_ranks(check):
        for (kind, text), (error, part) in zip(rank, expected, strict=True):
            assert kind == error.__name__
            assert part in text


def test_leaves_that_are_no_inputs_take_part_and_stay_as_they_are() -> None:
    def check() -> object:
        weight = values(2)
        result = gradcheck(lambda x: x.sum() * Sum.apply(weight), values(2))
        return result, weight.grad

    assert run_ranks(check) == [(True, None)] * 2


def test_inputs_are_not_touched_and_strides_are_kept() -> None:
    def check() -> object:
        x = values(2, 3).detach().t().requires_grad_()
        before, strides = x.detach().clone(), []
        gradcheck(lambda x: strides.append(x.stride()) or Sum.apply(x), x)
        return torch.equal(x, before), x.grad is None, set(strides)

    assert run_ranks(check) == [(True, True, {(1, 3)})] * 2
