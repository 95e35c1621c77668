"""Which ranks of a group share a host, and the groups that follow from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire.hooks.group_name import group_from, name_if_group

__all__ = ["HostGroups", "host_groups", "teams"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


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

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     groups = host_groups()
        ...     return groups.inside.size(), groups.hosts, groups.between is not None
        >>> run_ranks(main, world_size=2)
        [(2, 1, True), (2, 1, False)]
    """
    group = default_group("group") if group is None else check_group(group)
    return _make(group, teams(_host_of_each(group)), inside, between)


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
    group: ProcessGroup, teams: Sequence[Sequence[int]], inside: str | None, between: str | None
) -> HostGroups:
    ranks = dist.get_process_group_ranks(group)
    (own,) = [team for team in teams if group.rank() in team]
    name = dist.get_backend(group)
    inner = dist.new_group(
        [ranks[r] for r in own], backend=inside or name, use_local_synchronization=True
    )
    firsts = [team[0] for team in teams]
    outer = None
    if group.rank() in firsts:
        outer = dist.new_group(
            [ranks[r] for r in firsts],
            backend=between or ("gloo" if name == "shm" else name),
            use_local_synchronization=True,
        )
    return HostGroups(group, inner, outer, len(teams))


def _host_of_each(group: ProcessGroup) -> list[bytes]:
    """Every rank's host, told by all."""
    device = torch.device("cpu")
    if device not in group._device_types:
        device = group._device_types[0]
    own = torch.tensor(list(_this_host()), dtype=torch.uint8, device=device)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return [bytes(host.tolist()) for host in every]


def _this_host() -> bytes:
    """16 bytes that processes have alike if what they send each other does not leave the host."""
    found = BOOT_ID.read_text() if BOOT_ID.exists() else os.uname().nodename
    network = os.readlink(NETWORK) if NETWORK.is_symlink() else ""
    return hashlib.blake2b(f"{found} {network}".encode(), digest_size=16).digest()
