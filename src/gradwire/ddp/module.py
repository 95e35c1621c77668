"""DistributedDataParallel: a module whose gradients are averaged over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.ddp._arguments import check_module, refuse_unsupported, resolve_caps, resolve_device
from gradwire.ddp._group import check_group
from gradwire.ddp._verify import describe, verify_same
from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.reducer import Reducer
from gradwire.errors import ArgumentError, NotSupportedError
from gradwire.gradients import CommHook

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Wraps a module so that each backward averages its gradients over ranks.

    Every rank holds a replica and its own batch. Parameters and buffers start as rank 0's. After
    `loss.backward()` each `param.grad` holds the mean over ranks of what backward computed there,
    with the same bits on every rank, so that equal optimizers keep the replicas equal.

    Adjoint convention: the objective is Σ_r L_r / W, the mean of the ranks' losses.

    Gradients of 4 KiB and more may lie in their bucket's memory, also without
    `gradient_as_bucket_view`: one that is kept after `zero_grad` keeps its values, and the whole
    bucket's memory with them; `clone()` what is to be kept for long.

    Args:
        module: Any module with at least one parameter that requires a gradient.
        device_ids: None, or the one accelerator that the module is on: inputs are moved there.
        output_device: None, or the same device.
        dim: Of no effect; kept for torch's signature.
        broadcast_buffers: Give buffers rank 0's values at construction and at each training
            forward.
        init_sync: Hold models against each other and broadcast rank 0's at construction.
        process_group: The ranks; None means the default group.
        bucket_cap_mb: MiB in a bucket; None means 25, after a first bucket of 1 on accelerators
            and with a communication hook.
        find_unused_parameters: Not supported yet.
        check_reduction: Of no effect.
        gradient_as_bucket_view: Let gradients be views of their buckets: one copy less, and less
            memory; `detach_()` on them is then an error.
        static_graph: Not supported yet.
        delay_all_reduce_named_params: Not supported yet.
        param_to_hook_all_reduce: Not supported yet.
        mixed_precision: Not supported yet; autocast works.
        device_mesh: A one-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: Not supported yet.
        bucket_cap_mb_list: MiB in the first bucket, in the second, …; the last repeats.
        batched_grad_copy: Of no effect: gradients are always copied with one call a bucket.
        forward_sync_buffers: As `broadcast_buffers`, but buffers start as rank 0's in any case.

    Attributes:
        module: The wrapped module.
        process_group: The group.
        reducer: What communicates the gradients.

    Raises:
        ArgumentError: An argument cannot be used, or nothing requires a gradient.
        ArgumentTypeError: `module` is no module, or `process_group` no group.
        MismatchError: The ranks' models differ: raised on every rank, naming the parameter.
        NotSupportedError: An argument asks for what is not there yet.

    Example:
        Each rank has its own input; the gradients are the mean on both.

        >>> import torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        ...     net(torch.tensor([[1.0, 10.0]]) * (dist.get_rank() + 1)).sum().backward()
        ...     return net.module.weight.grad.tolist()
        >>> run_ranks(main, world_size=2)
        [[[1.5, 15.0]], [[1.5, 15.0]]]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        refuse_unsupported(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.process_group = _group_of(process_group, device_mesh)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = check_module(module, ignored)
        self.module = module
        self.device = resolve_device(named, device_ids, output_device)
        self._buffers_synced = [(n, b) for n, b in module.named_buffers() if n not in ignored]
        wanted = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = wanted is not False
        self.require_backward_grad_sync = True
        self._buffers_may_differ = True
        if init_sync:
            start = self._buffers_synced
            if broadcast_buffers is False and forward_sync_buffers is None:
                start = []
            verify_same(
                self.process_group, describe(named, "parameter") + describe(start, "buffer")
            )
            broadcast_coalesced(self.process_group, [t for _, t in [*named, *start]])
        self.reducer = Reducer(
            [(n, p) for n, p in named if p.requires_grad],
            self.process_group,
            caps=resolve_caps(bucket_cap_mb, bucket_cap_mb_list),
            gradient_as_bucket_view=gradient_as_bucket_view,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; with gradients enabled, expect a backward to be reduced.

        Raises:
            ReductionError: The backward before left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        if syncing:
            self.reducer.prepare()
        if self.broadcast_buffers and self._buffers_may_differ and self._buffers_synced:
            buffers = [self.module.get_buffer(name) for name, _ in self._buffers_synced]
            # a graph that awaits its backward may have saved them: the module updates them too
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                broadcast_coalesced(self.process_group, buffers)
        self._buffers_may_differ = syncing
        if self.device is not None:
            inputs, kwargs = _move(inputs, self.device), _move(kwargs, self.device)
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards in this context send nothing.

        The first backward of a forward outside it reduces what has accumulated.

        Example:
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     x = torch.tensor([[1.0 + dist.get_rank()]])
            ...     with net.no_sync():
            ...         net(x).sum().backward()
            ...     local = net.module.weight.grad.item()
            ...     net(x).sum().backward()
            ...     return local, net.module.weight.grad.item()
            >>> run_ranks(main, world_size=2)
            [(1.0, 3.0), (2.0, 3.0)]
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook | None) -> None:
        """Let `hook(state, bucket)` communicate gradients, from the next forward on.

        May be called again to replace the hook; None brings back the mean.

        Args:
            state: Handed to the hook; for the stock hooks the process group, or None.
            hook: As `gradwire.gradients.CommHook` has it; PyTorch's own hooks run unchanged. The
                same on every rank.

        Raises:
            ArgumentTypeError: Not a hook.
        """
        self.reducer.register_comm_hook(state, hook)

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported yet.

        Raises:
            NotSupportedError: Always.
        """
        raise NotSupportedError(
            "join() is not supported yet: give every rank the same number of batches "
            "(DistributedSampler with drop_last=True)"
        )


def _group_of(group: ProcessGroup | None, mesh: Any) -> ProcessGroup:
    if mesh is not None:
        if group is not None:
            raise ArgumentError("process_group and device_mesh are both given: give one")
        if mesh.ndim != 1:
            raise ArgumentError(
                f"device_mesh has {mesh.ndim} dimensions: pass one of them, for instance "
                "device_mesh['dp']"
            )
        group = mesh.get_group(mesh_dim=0)
    elif group is None:
        if not dist.is_initialized():
            raise ArgumentError(
                "process_group is None and there is no default group: call "
                "torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD
    return check_group(group)


def _move(value: Any, device: torch.device) -> Any:
    """The value with the tensors in its tuples, lists and dicts on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return type(value)((k, _move(v, device)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(v, device) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(_move(v, device) for v in value)
    return value
