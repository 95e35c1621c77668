"""Plans: as integers, which compiled graphs carry, and the derivatives of a new one."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import wire
from gradwire.collectives.all_to_all_permute import AllToAll, Permute
from gradwire.collectives.consistency import CallSignature, tensor_fields
from gradwire.collectives.operation import Operation, decode_plan
from gradwire.collectives.with_root import Gather
from gradwire.errors import MismatchError
from gradwire.testing import adjoint_check, run_ranks

GROUP = dist.group.WORLD  # None, as no group is initialized: nothing is sent


@pytest.mark.parametrize(
    "plan",
    [
        AllToAll(GROUP),
        AllToAll(GROUP, (1, 0), (2, 3)),
        AllToAll(GROUP, None, ()),
        Gather(GROUP, 1, (4, 0), 7),
        Permute(GROUP, ((0, 1), (2, 0))),
        Permute(GROUP, ()),
    ],
)
def test_a_plan_is_restored_from_its_integers(plan):
    ints = plan.as_ints()
    assert all(type(n) is int for n in ints)
    with patch.object(dist.distributed_c10d, "_resolve_process_group", lambda name: GROUP):
        assert decode_plan(plan.name, ints, "") == plan


@dataclass(frozen=True)
class Scaled(AllToAll):
    """A variant of all_to_all: an all_to_all whose result is multiplied."""

    factor: int = 1
    name = "scaled_all_to_all"

    def start(self, x, blocking=False):
        moved = super().start(x, blocking)
        return wire.Pending((), lambda: moved.wait().mul_(self.factor))

    def adjoint(self):
        return Scaled(self.group, self.output_splits, self.input_splits, self.factor)


def scaled_all_to_all(x, factor, async_op=False, check=None):
    group, plan = dist.group.WORLD, Scaled(dist.group.WORLD, factor=factor)
    operation = Operation(
        x,
        group,
        lambda: CallSignature("scaled_all_to_all", *tensor_fields(x), detail=f"factor={factor}"),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


def derivatives_of_a_new_plan():
    x = (torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()).requires_grad_()
    y = scaled_all_to_all(x, 3)
    (gradient,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    handle = scaled_all_to_all(x, 3, async_op=True)
    batched = torch.func.vmap(lambda x: scaled_all_to_all(x, 3))(torch.stack([x, x]))
    assert adjoint_check(lambda x: scaled_all_to_all(x, 3), x)
    with pytest.raises(MismatchError, match="factor=1"):
        scaled_all_to_all(x, dist.get_rank(), check=True)
    results = (y, gradient, second, handle.wait(), batched[1])
    return [result.tolist() for result in results]


def test_a_new_plan_needs_its_start_and_its_adjoint_only():
    first, second = run_ranks(derivatives_of_a_new_plan, 2)
    assert first == [[3.0, 33.0], [18.0, 36.0], [18.0, 18.0], [3.0, 33.0], [3.0, 33.0]]
    assert second == [[6.0, 36.0], [198.0, 216.0], [18.0, 18.0], [6.0, 36.0], [6.0, 36.0]]
