"""Which ranks of a group share a host, and the groups that follow from it."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire.errors import MismatchError
from gradwire.hooks.group_name import group_from, name_if_group

__all__ = ["HostGroups", "host_groups", "teams"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
_ROW = struct.Struct("<16sII")


class HostGroups:
    """The two groups of this rank, for collectives in two levels.

    Args:
        whole: The group that is divided.
        inside: The ranks of this host.
        between: The rank of each host that is the first in `inside`; None on all other ranks.
        hosts: How many hosts there are.

    Attributes:
        whole, inside, between, hosts: The same.
    """

    def __init__(
        self, whole: ProcessGroup, inside: ProcessGroup, between: ProcessGroup | None, hosts: int
    ) -> None:
        self.whole, self.inside, self.between = check_group(whole), check_group(inside), between
        self.hosts = hosts

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})


def host_groups(
    group: ProcessGroup | None = None,
    *,
    inside: str | None = None,
    between: str | None = None,
) -> HostGroups:
    """Divide a group by which of its ranks share a host: every rank of it calls.

    Ranks share a host if they run on one kernel, in one network namespace: so that what one sends
    another does not leave the host.

    Args:
        group: The group; None: the default one.
        inside: The backend within a host; None: the group's own, which on shm shares memory there.
        between: The backend between hosts; None: Gloo.

    Returns:
        The groups that this rank is in.

    Raises:
        MismatchError: The ranks are in different numbers of groups, and the group is not of all.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     groups = host_groups()
        ...     return groups.inside.size(), groups.hosts, groups.between is not None
        >>> run_ranks(main, world_size=2)
        [(2, 1, True), (2, 1, False)]
    """
    group = default_group("group") if group is None else check_group(group)
    hosts, counts = _hosts_and_counts(group)
    alone = _can_make_alone(group, counts)
    return _make(group, teams(hosts), inside, between, alone=alone)


def teams(hosts: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks.

    Example:
        >>> teams([b"a", b"b", b"a", b"b", b"b"])
        [[0, 2], [1, 3, 4]]
    """
    found: dict[bytes, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def _make(
    group: ProcessGroup,
    teams: Sequence[Sequence[int]],
    inside: str | None,
    between: str | None,
    *,
    alone: bool = True,
) -> HostGroups:
    name = dist.get_backend(group)
    inner = _group_of_mine(group, teams, inside or name, alone)
    # every rank gets one, so that all are in as many groups as before (see _can_make_alone)
    longest = max(map(len, teams))
    places = [[team[k] for team in teams if k < len(team)] for k in range(longest)]
    outer_name = between or ("gloo" if name == "shm" else name)
    outer = _group_of_mine(group, places, outer_name, alone)
    return HostGroups(group, inner, outer if group.rank() in places[0] else None, len(teams))


def _group_of_mine(
    group: ProcessGroup, divided: Sequence[Sequence[int]], backend: str, alone: bool
) -> ProcessGroup:
    """Make groups of a group's ranks, each of which is in one of them; the one of this rank."""
    ranks = dist.get_process_group_ranks(group)
    mine: ProcessGroup | None = None
    for members in divided:
        if alone and group.rank() not in members:
            continue
        made = dist.new_group(
            [ranks[r] for r in members], backend=backend, use_local_synchronization=alone
        )
        if group.rank() in members:
            mine = made
    assert mine is not None
    return mine


def _hosts_and_counts(group: ProcessGroup) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Every rank's host, and how many groups it is in and has made by name, told by all."""
    device = torch.device("cpu")
    if device not in group._device_types:
        device = group._device_types[0]
    world = dist.distributed_c10d._world
    own = (_this_host(), len(world.pg_names), world.group_count)
    told = torch.tensor(list(_ROW.pack(*own)), dtype=torch.uint8).to(device)
    every = [torch.empty_like(told) for _ in range(group.size())]
    dist.all_gather(every, told, group=group)
    rows = [_ROW.unpack(bytes(each.tolist())) for each in every]
    return [host for host, *_ in rows], [(groups, made) for _, groups, made in rows]


def _can_make_alone(group: ProcessGroup, counts: Sequence[tuple[int, int]]) -> bool:
    """Whether groups can be made by their own ranks only, or else by all ranks together.

    torch counts groups to name them: those of all ranks by how many were made; those that their own
    ranks make by how many each rank is in, or, from 2.15 on, has made. Where a number differs,
    ranks would wait for each other under different names.
    """
    if len(set(counts)) == 1:
        return True
    made = {made for _, made in counts}
    if group.size() == dist.get_world_size() and len(made) == 1:
        return False
    raise MismatchError(
        f"the ranks of group are in {[groups for groups, _ in counts]} groups, and have made "
        f"{[made for _, made in counts]}: where these differ, new ones cannot be named; call "
        "host_groups before groups of some ranks are made"
    )


def _this_host() -> bytes:
    """16 bytes that processes have alike if what they send each other does not leave the host."""
    found = BOOT_ID.read_text() if BOOT_ID.exists() else os.uname().nodename
    network = os.readlink(NETWORK) if NETWORK.is_symlink() else ""
    return hashlib.blake2b(f"{found} {network}".encode(), digest_size=16).digest()
