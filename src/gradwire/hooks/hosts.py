"""Hooks that communicate between hosts only, and the process groups for them.

Within a host, ranks sum their gradients. Then one rank of each host runs the hook with the ranks
of the other hosts, and broadcasts the result within its host.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group
from gradwire._processes import boot_id, namespace
from gradwire._torch import PYTHON_BACKENDS, group_named
from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket, as_real
from gradwire.hooks.interface import (
    CommHook,
    DelegatingHook,
    HookReturn,
    PicklesGroups,
    StatefulHook,
    after,
    as_future,
    bind_hook,
    chain,
    parse_hook_result,
)

_divisions = itertools.count(1)
"""Counter of calls in this process. The first rank's count is part of the new groups' names."""


class HostGroups(PicklesGroups):
    """Two groups of this rank, for collectives in two levels.

    Args:
        whole: Group that is divided.
        inside: Group of the ranks of this host.
        between: Group of the first rank of each host; None on all other ranks.
        hosts: Number of hosts.

    Attributes:
        whole, inside, between, hosts: See Args.
    """

    def __init__(
        self, whole: ProcessGroup, inside: ProcessGroup, between: ProcessGroup | None, hosts: int
    ) -> None:
        self.whole, self.inside, self.between = check_group(whole), check_group(inside), between
        self.hosts = hosts


def host_groups(
    group: ProcessGroup | None = None,
    *,
    inside: str | None = None,
    between: str | None = None,
) -> HostGroups:
    """Divide a group by hosts. Every rank of the group must call this.

    On shm, ranks share a host if they share memory (see `gradwire.shm.teams`). On other backends
    they share a host if they run on one kernel and in one network namespace: messages between them
    then do not leave the host.

    Args:
        group: Process group; None for the default group.
        inside: Backend within a host; None for the group's backend.
        between: Backend between hosts; None for the group's backend, or Gloo if that is shm.

    Returns:
        Groups that this rank is in.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     groups = host_groups()
        ...     return groups.inside.size(), groups.hosts, groups.between is not None
        >>> run_ranks(main, world_size=2)
        [(2, 1, True), (2, 1, False)]
    """
    group = default_group("group") if group is None else check_group(group)
    known = _teams_of_backend(group)
    return _make(group, known or teams(_from_all(group, _this_host())), inside, between)


def teams(hosts: Sequence[bytes]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks.

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
    backend = dist.get_backend(group)
    first, *_ = _from_all(group, next(_divisions).to_bytes(8, "little"))
    # with the ranks: groups that are created by some ranks only may share a name
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{group.group_name} of {ranks}, by hosts, {int.from_bytes(first, 'little')}"
    inner = _group_of_mine(group, teams, inside or backend, f"{name}, inside")
    # Every rank gets one, so that all are in the same number of groups: torch (up to 2.14) derives
    # the names of groups with use_local_synchronization from that number.
    longest = max(map(len, teams))
    across = [[team[k] for team in teams if k < len(team)] for k in range(longest)]
    outer_backend = between or ("gloo" if backend == "shm" else backend)
    outer = _group_of_mine(group, across, outer_backend, f"{name}, between")
    return HostGroups(group, inner, outer if group.rank() in across[0] else None, len(teams))


def _group_of_mine(
    group: ProcessGroup, divided: Sequence[Sequence[int]], backend: str, name: str
) -> ProcessGroup:
    """Create the group of this rank, one of several into which a group's ranks are divided."""
    ranks = dist.get_process_group_ranks(group)
    number = next(i for i, members in enumerate(divided) if group.rank() in members)
    with group_named(f"{name} {number}"):
        made: ProcessGroup = dist.new_group(
            [ranks[r] for r in divided[number]], backend=backend, use_local_synchronization=True
        )
    return made


def _from_all(group: ProcessGroup, own: bytes) -> list[bytes]:
    """Gather bytes from all ranks; each rank passes the same number of bytes."""
    device = torch.device("cpu")
    if device not in group._device_types:
        device = group._device_types[0]
    sent = torch.tensor(list(own), dtype=torch.uint8).to(device)
    every = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(every, sent, group=group)
    return [bytes(each.tolist()) for each in every]


def _teams_of_backend(group: ProcessGroup) -> Sequence[Sequence[int]]:
    """Return the ranks of each host of a shm group over several hosts; () for other groups."""
    backend: Any = group
    cpu = torch.device("cpu")
    if PYTHON_BACKENDS and cpu in group._device_types:
        backend = group._get_backend(cpu)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    found: Sequence[Sequence[int]] = getattr(backend, "teams", ())
    return found


def _this_host() -> bytes:
    """Return 16 bytes that are equal for processes with one kernel and network namespace."""
    found = f"{boot_id() or platform.node()} {namespace('net')}"
    return hashlib.blake2b(found.encode(), digest_size=16).digest()


def across_hosts(hook: CommHook, groups: HostGroups, state: Any = None) -> AcrossHosts:
    """Return a hook that runs another hook between hosts, on one rank of each host.

    The inner hook's buckets are means over the ranks of a host, weighted by their number. On a
    single host the inner hook is not used.

    Args:
        hook: `StatefulHook` whose state has a `process_group`, such as `BlockQuantization`, or a
            function whose state is a group, such as `all_reduce`.
        groups: Groups from `host_groups`, or constructed directly.
        state: State of a function; None for the group between hosts.

    Raises:
        ArgumentError: `hook` is a `StatefulHook` that has another group, or no `process_group`.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.hooks import BlockQuantization, host_groups
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, across_hosts(BlockQuantization(8), host_groups()))
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)
        [1.5, 1.5]
    """
    if isinstance(hook, StatefulHook):
        _set_group(hook, groups)
        return AcrossHosts(hook, groups)
    return AcrossHosts(bind_hook(groups.between if state is None else state, hook), groups)


def _set_group(hook: StatefulHook[Any], groups: HostGroups) -> None:
    if not hasattr(hook.state, "process_group"):
        raise ArgumentError(
            f"hook is {hook!r}, whose state has no process_group: pass a hook whose group "
            "across_hosts can set"
        )
    if hook.state.process_group not in (None, groups.between):
        raise ArgumentError(
            f"hook has group {hook.state.process_group!r}: construct it without a group; "
            "across_hosts sets the group between hosts"
        )
    hook.state.process_group = groups.between


class AcrossHosts(DelegatingHook):
    """Hook returned by `across_hosts`; the hook between hosts keeps state on one rank of each."""

    def __init__(self, hook: StatefulHook[Any], groups: HostGroups) -> None:
        super().__init__(hook)
        self.single_collective = False  # the inner hook's, and up to two more
        self.groups = groups

    def run_in(self, group: ProcessGroup) -> None:
        """Do nothing: the groups are fixed."""

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Sum within the host, run the hook between hosts, broadcast within the host."""
        groups, buffer = self.groups, bucket.buffer()
        inside, between, ranks = groups.inside, groups.between, groups.whole.size()
        if buffer.layout != torch.strided:
            return all_reduce(groups.whole, bucket)
        real = as_real(bucket).buffer()
        unused = groups.hosts == 1

        # the hook's mean weights hosts equally; here ranks are weighted equally. Before the sum
        # within the host, which may overflow.
        buffer.div_(ranks if unused else ranks / groups.hosts)

        def exchange(_: object) -> Any:
            """Average the sums between hosts, on one rank of each host."""
            if unused or between is None:
                return buffer
            return as_future(self.hook.run_hook(bucket), self.hook)

        def spread(result: Any) -> Any:
            if unused:
                return buffer
            if between is not None:
                reduced = parse_hook_result(result, bucket, self.hook)
                if reduced.data_ptr() != buffer.data_ptr():
                    buffer.copy_(reduced)
            if inside.size() == 1:
                return buffer
            work = dist.broadcast(real, group_src=0, group=inside, async_op=True)
            return after(work, lambda: buffer, buffer.device)

        if inside.size() == 1:
            return chain(buffer.device, None, exchange, spread)
        work = dist.all_reduce(real, group=inside, async_op=True)
        summed = after(work, lambda: buffer, buffer.device)
        return chain(buffer.device, summed, exchange, spread)

    def parse_hook_result(self, result: Any) -> Tensor:
        """Read the result as a tensor: `run_hook` has already read the inner hook's result."""
        return StatefulHook.parse_hook_result(self, result)
