"""Groups of the ranks of each host, after other groups were created in any order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks import host_groups
from gradwire.shm import Options
from gradwire.testing import run_ranks

# groups that are created, by all ranks or by their members only, and divided
ORDERS = {
    "one of two, then another of all": ["make 01", "divide 01", "make 0123", "divide 0123"],
    "those that overlap": ["make 012", "make 13", "divide 012", "divide 13", "divide 012"],
    "by its own ranks": ["make 01 alone", "divide 01", "divide", "divide 01"],
    "alternating": ["make 01", "make 23", "divide 23", "divide", "make 123", "divide 123"],
}


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_some_ranks_are_divided_in_any_order(order, backend):
    """It hung: torch 2.15 names groups by a counter that groups of some ranks advance, too."""

    def main():
        made = {}
        for step in ORDERS[order]:
            action, name, alone = (*step.split(), "", "")[:3]
            members = [int(rank) for rank in name]
            if action == "make":
                if not alone or dist.get_rank() in members:
                    made[name] = dist.new_group(members, use_local_synchronization=bool(alone))
                continue
            members = members or [0, 1, 2, 3]
            if dist.get_rank() in members:
                divided = host_groups(dist.group.WORLD if not name else made[name])
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total, group=divided.inside)
                assert (divided.hosts, total.item()) == (1, sum(members))
        if any("alone" in step for step in ORDERS[order]):
            return  # torch's counters differ between ranks, on 2.15
        last = torch.ones(1)
        dist.all_reduce(last, group=dist.new_group([0, 1, 2, 3]))
        assert last.item() == 4

    run_ranks(main, 4, backend=backend, timeout=40)


@pytest.mark.wide
def test_hosts_on_shm_are_the_backends_teams():
    def main():
        groups = host_groups()
        some = dist.new_group([0, 2, 3], pg_options=Options(host=str(dist.get_rank() < 2)))
        inside = host_groups(some).inside.size() if dist.get_rank() != 1 else 0
        return groups.hosts, dist.get_process_group_ranks(groups.inside), inside

    found = run_ranks(main, 4, hosts=(1, 3))
    assert found == [(2, [0], 1), (2, [1, 2, 3], 0), (2, [1, 2, 3], 2), (2, [1, 2, 3], 2)]
