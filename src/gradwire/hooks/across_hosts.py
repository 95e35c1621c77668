"""A hook between hosts only: within a host, where memory is the wire, ranks add up their gradients.

Then one rank of each host runs the hook with those of the other hosts, and gives the others of its
own the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.compression.chain import chain
from gradwire.hooks.compression.compressor import as_real
from gradwire.hooks.host_groups import HostGroups
from gradwire.hooks.protocol import CommHook, HookReturn
from gradwire.hooks.result import after, as_future, parse_hook_result
from gradwire.hooks.stateful import DelegatingHook, StatefulHook, bind_hook

__all__ = ["AcrossHosts", "across_hosts"]


def across_hosts(hook: CommHook, groups: HostGroups, state: Any = None) -> AcrossHosts:
    """Let a hook communicate between hosts, once for each host.

    Its buckets are means over a host's ranks; hosts with more ranks weigh more. Where there is one
    host, the hook is not used, unless it has an effect without others, as momentum.

    Args:
        hook: A `StatefulHook` whose state has a `process_group`, as those that compress have, or a
            function whose state is a group, as `all_reduce`.
        groups: Of `host_groups`, or made by hand.
        state: For a function, its state; the group between hosts if None.

    Raises:
        ArgumentError: A `StatefulHook` that has another group already, or none to be set.

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
            f"hook is {hook!r}: its state has no process_group, which across_hosts would set to "
            "the group between hosts"
        )
    if hook.state.process_group not in (None, groups.between):
        raise ArgumentError(
            f"hook has group {hook.state.process_group!r}: make it without a group; it gets the "
            "group between hosts"
        )
    hook.state.process_group = groups.between


class AcrossHosts(DelegatingHook):
    """What `across_hosts` makes.

    Attributes:
        hook: The hook between hosts; on a host's other ranks it keeps nothing.
        groups: The groups.
    """

    def __init__(self, hook: StatefulHook[Any], groups: HostGroups) -> None:
        super().__init__(hook)
        self.single_collective = False  # whatever the hook's is: there are up to two more
        self.groups = groups

    def run_in(self, group: ProcessGroup) -> None:
        """The groups are given."""

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Sum inside, the hook between, broadcast inside."""
        groups, buffer = self.groups, bucket.buffer()
        inside, between, ranks = groups.inside, groups.between, groups.whole.size()
        if buffer.layout != torch.strided:
            return all_reduce(groups.whole, bucket)
        real = as_real(bucket).buffer()
        unused = groups.hosts == 1 and not getattr(self.hook, "changes_mean", False)

        def exchange(_: object) -> Any:
            """What one rank of each host does with the sums."""
            if unused:
                return buffer.div_(ranks)
            if between is None:
                return buffer
            # hosts count alike in the hook's mean over them, their ranks do not
            buffer.mul_(groups.hosts / ranks)
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
            return after(work, lambda: buffer)

        if inside.size() == 1:
            return chain(buffer.device, None, exchange, spread)
        work = dist.all_reduce(real, group=inside, async_op=True)
        assert work is not None
        return chain(buffer.device, work.get_future(), exchange, spread)

    def parse_hook_result(self, result: Any) -> Tensor:
        """The hook's own is read between hosts already."""
        return StatefulHook.parse_hook_result(self, result)
