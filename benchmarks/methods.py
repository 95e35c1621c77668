"""Ways to train over slow links that are compared: torch's wrappers and hooks, and gradwire's.

To add one, add it to `METHODS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.hooks import HostGroups
from gradwire.local_sgd import LocalSGD, diloco

__all__ = ["BEST", "METHODS", "PLAIN", "Groups", "Method", "Step"]

PLAIN = "torch"
"""The method that all others are compared with: torch's wrapper on Gloo."""
BEST = "gradwire local SGD int4 between hosts"
"""The method that is run whole on a slow link, too."""
_PERIOD = 8
"""Steps between two averages of parameters, torch's and ours."""
_WARMUP = 2 * _PERIOD - 1
"""Steps before torch's hooks leave anything out; its averager then averages after 16, 24, …."""

Step = Callable[[Tensor], object]
"""One step of training on this rank's batch."""
Hook = Callable[["Groups"], Any]
"""Makes a module's hook."""


@dataclass(frozen=True)
class Groups:
    """The groups of all ranks, and of this host's, which each method picks from.

    Attributes:
        flat: On Gloo.
        hierarchical: On shm.
        host: The ranks of this rank's host, on Gloo.
        levels: The two groups of `across_hosts`.
    """

    flat: ProcessGroup
    hierarchical: ProcessGroup
    host: ProcessGroup
    levels: HostGroups

    @classmethod
    def make(cls, hosts: Sequence[int]) -> Groups:
        """Make the groups; the default group is on shm.

        Args:
            hosts: Number of ranks on each host.
        """
        ends = [sum(hosts[: i + 1]) for i in range(len(hosts))]
        ranks = [[*range(end - count, end)] for end, count in zip(ends, hosts, strict=True)]
        of_hosts = [dist.new_group(each, backend="gloo") for each in ranks]
        mine = next(i for i, each in enumerate(ranks) if dist.get_rank() in each)
        world = dist.group.WORLD
        assert world is not None
        levels = hooks.host_groups(world)
        return cls(dist.new_group(backend="gloo"), world, of_hosts[mine], levels)


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        name: Name in tables.
        make: Makes the step of a module that is equal on all ranks.
        cycle: Steps after which communication repeats itself.
        begins: Steps until it is what it will be; they are like `PLAIN`'s.
    """

    name: str
    make: Callable[[nn.Module, Groups], Step]
    cycle: int = 1
    begins: int = 0


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2e-3, fused=True)


def _step(module: nn.Module, optimizer: Any, passages: Tensor) -> None:
    optimizer.zero_grad()
    module(passages).backward()
    optimizer.step()


def _torch(hook: Callable[..., Any] | None, module: nn.Module, groups: Groups) -> Step:
    wrapped = TorchDistributedDataParallel(module, process_group=groups.flat)
    if hook is not None:
        wrapped.register_comm_hook(groups.flat, hook)
    return partial(_step, wrapped, _optimizer(module))


def _torch_power_sgd(module: nn.Module, groups: Groups) -> Step:
    # one bucket: the hook's callbacks run in Gloo's threads, and of several buckets ranks send them
    # in different orders, on which Gloo ends the process
    wrapped = TorchDistributedDataParallel(module, process_group=groups.flat, bucket_cap_mb=1000)
    state = PowerSGDState(groups.flat, matrix_approximation_rank=4, start_powerSGD_iter=_WARMUP)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return partial(_step, wrapped, _optimizer(module))


def _torch_post_local_sgd(module: nn.Module, groups: Groups) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which its import uses
        from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = TorchDistributedDataParallel(module, process_group=groups.flat)
    state = PostLocalSGDState(groups.flat, groups.host, start_localSGD_iter=_WARMUP)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(_PERIOD, warmup_steps=_WARMUP, process_group=groups.flat)
    return partial(_step, wrapped, PostLocalSGDOptimizer(_optimizer(module), averager))


def _gradwire(hook: Hook, module: nn.Module, groups: Groups) -> Step:
    wrapped = DistributedDataParallel(module, process_group=groups.hierarchical)
    if (made := hook(groups)) is not None:
        wrapped.register_comm_hook(None, made)
    return partial(_step, wrapped, _optimizer(module))


def _local(hook: Hook, module: nn.Module, groups: Groups) -> Step:
    optimizer = LocalSGD(
        _optimizer(module),
        module.named_parameters(),
        every=_PERIOD,
        hook=hook(groups),
        group=groups.hierarchical,
    )
    return partial(_step, module, optimizer)


def _between_hosts(module: nn.Module, groups: Groups) -> Step:
    """Gradients in every step within a host, parameters now and then between hosts."""
    wrapped = DistributedDataParallel(module, process_group=groups.levels.inside)
    optimizer = LocalSGD(
        _optimizer(module),
        module.named_parameters(),
        every=_PERIOD,
        hook=hooks.across_hosts(hooks.get_hook("int4"), groups.levels),
        group=groups.hierarchical,
    )
    return partial(_step, wrapped, optimizer)


def _diloco(
    hook: Hook, module: nn.Module, groups: Groups, *, momentum: float = 0.9, fragments: int = 1
) -> Step:
    optimizer = diloco(
        _optimizer(module),
        module.named_parameters(),
        every=_PERIOD,
        momentum=momentum,
        hook=hook(groups),
        group=groups.hierarchical,
        fragments=fragments,
    )
    return partial(_step, module, optimizer)


def _named(name: str) -> Hook:
    return lambda _: hooks.get_hook(name)


def _between(name: str) -> Hook:
    """Between hosts only."""
    return lambda groups: hooks.across_hosts(hooks.get_hook(name), groups.levels)


def _none(_: Groups) -> None:
    return None


_milder = partial(_diloco, _named("int4"), momentum=0.5)

METHODS = {
    method.name: method
    for method in (
        Method(PLAIN, partial(_torch, None)),
        Method("torch fp16", partial(_torch, default_hooks.fp16_compress_hook)),
        Method("torch PowerSGD", _torch_power_sgd, begins=_WARMUP),
        Method("torch post-local SGD", _torch_post_local_sgd, _PERIOD, begins=_WARMUP),
        Method("gradwire", partial(_gradwire, _none)),
        Method("gradwire fp16", partial(_gradwire, _named("fp16"))),
        Method("gradwire int8", partial(_gradwire, _named("int8"))),
        Method("gradwire int8 across hosts", partial(_gradwire, _between("int8"))),
        Method("gradwire int4", partial(_gradwire, _named("int4"))),
        Method("gradwire local SGD", partial(_local, _none), _PERIOD),
        Method("gradwire local SGD int4", partial(_local, _named("int4")), _PERIOD),
        Method("gradwire local SGD int4 between hosts", _between_hosts, _PERIOD),
        Method("gradwire DiLoCo", partial(_diloco, _none), _PERIOD),
        Method("gradwire DiLoCo 0.5 int4", _milder, _PERIOD),
        Method("gradwire DiLoCo 0.5 int4 streaming", partial(_milder, fragments=4), _PERIOD),
    )
}
