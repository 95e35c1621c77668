"""Plans of collectives as integers, which compiled graphs carry."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch.distributed as dist

from gradwire.collectives.autograd.linear_collective import decode_plan
from gradwire.collectives.ops.plans import AllToAll, Gather, Permute

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
