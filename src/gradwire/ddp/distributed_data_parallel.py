"""DistributedDataParallel: averages a module's gradients over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable
from torch.nn import Parameter

from gradwire._containers import map_tensors, tensors_in
from gradwire._scope import in_transform, runs_outside_contexts
from gradwire._torch import TORCHS_DDP, compile_callees_only, run_as_written
from gradwire.ddp.arguments import (
    check_interval,
    check_module,
    resolve_buffers,
    resolve_caps,
    resolve_delayed,
    resolve_device,
    resolve_group,
)
from gradwire.ddp.buckets.assignment import check_layout
from gradwire.ddp.buffers import BufferHook, Buffers
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.join import StepInfo, UnevenInputs, agree_on_rank
from gradwire.ddp.options import BucketLayout, ReducerOptions
from gradwire.ddp.outputs import beginnings, with_own_nodes
from gradwire.ddp.precision import resolve_precision
from gradwire.ddp.registered_hook import Change


class DistributedDataParallel(UnevenInputs):
    """Wrapper of a module that averages its gradients over ranks in each backward.

    Every rank has a replica of the module and its own batch. Parameters and buffers start with rank
    0's values. After `loss.backward()` each `param.grad` holds the mean of the ranks' gradients,
    with the same bits on every rank, so that equal optimizers keep the replicas equal.

    Adjoint convention: the objective is Σ_r L_r / W, the mean of the ranks' losses.

    Gradients of 4 KiB and more may be stored in their bucket's memory, also without
    `gradient_as_bucket_view`. A gradient that is kept after `zero_grad` keeps its values, and also
    the memory of the whole bucket: `clone()` gradients that are kept for long.

    Args:
        module: Module with at least one parameter that requires a gradient.
        device_ids: None, or a list of the single accelerator that the module is on. Inputs are
            moved there.
        output_device: None, or the same device.
        dim: Ignored; accepted for compatibility with PyTorch.
        broadcast_buffers: If True or None, buffers take rank 0's values at construction and in each
            training forward.
        init_sync: If True, construction verifies that the ranks' models match, and broadcasts rank
            0's values.
        process_group: Process group; None for the default group.
        bucket_cap_mb: Size of a bucket in MiB. None for 25, after a first bucket of 1 on
            accelerators and with a communication hook; 0 for one bucket per parameter.
        find_unused_parameters: If True, a forward may leave out parameters, on some ranks or on
            all. Parameters that no rank uses keep their `.grad`. This costs one small message per
            step.
        check_reduction: Ignored; accepted for compatibility with PyTorch.
        gradient_as_bucket_view: If True, gradients are views of their buckets. This saves memory
            and a copy; `detach_()` on them is then an error.
        static_graph: If True, every forward uses the same parameters, equally often, as the first
            one. Allows reentrant checkpoints of shared layers, and unused parameters at no cost.
        delay_all_reduce_named_params: Names and parameters that are reduced together, after all
            others.
        param_to_hook_all_reduce: Parameter of the module, required with
            `delay_all_reduce_named_params` as in PyTorch, and otherwise ignored.
        mixed_precision: `gradwire.ddp.MixedPrecision`, or PyTorch's class with the same fields.
        device_mesh: One-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: If True, with `find_unused_parameters`, nothing is sent for
            unused buckets, which must be the same on every rank.
        bucket_cap_mb_list: Sizes in MiB of the first bucket, the second, …; the last one repeats.
        batched_grad_copy: Ignored: small gradients are always copied in batches.
        forward_sync_buffers: If given, replaces `broadcast_buffers` for forwards; buffers then
            always start with rank 0's values.
        lazy_bucket_allocation: If True, a bucket's memory is allocated when its first gradient
            arrives, and released after backward, so that the next forward can use it.
        bucket_layout: Function from names and parameters to the names in each bucket, in launch
            order; the same on every rank. Caps are then ignored.
        rebuild_buckets: If True, buckets are reassigned after the first backward, in the order in
            which gradients became ready on rank 0. None for PyTorch's rule: True with
            `static_graph` or without `find_unused_parameters`.
        sync_buffers_in_eval: If True, the first forward after a training forward synchronizes
            buffers even without gradients, as in PyTorch, so that all ranks evaluate with rank 0's
            statistics. If False, a forward without gradients sends nothing and uses this rank's
            buffers, so that some ranks may evaluate while others do something else.
        check_replicas: Number of reduced backwards after which a backward sends a digest of the
            parameters, so that the forward after it verifies that they are equal on all ranks, bit
            by bit; 0 for never. None for 100 without a communication hook or with one of
            `gradwire.hooks`, and for never with another hook, which may let replicas differ. The
            digest is that of the step's first forward. Buffers are not compared: ranks take rank
            0's buffers or keep their own.
        before_reduce: Function that changes the local gradients of a `gradwire.hooks.GradBucket`
            in place, before they are cast, compressed and reduced; given on every rank or on none.
            The gradients are already weighted, see `weight`.
        after_reduce: Function that changes the reduced gradients of a bucket in place, in the same
            way on every rank.

    Attributes:
        module: Wrapped module.
        reducer: Reducer, which communicates the gradients.

    Raises:
        ArgumentError: An argument is not valid, or no parameter requires a gradient.
        ArgumentTypeError: `module` is not a module, or `process_group` is not a group.
        MismatchError: The ranks' models differ. Raised on every rank with the name of the
            parameter.
        NotSupportedError: A parameter's `grad_dtype` is not its dtype.

    Example:
        Each rank has its own input; both have the mean of the gradients.

        >>> import torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        ...     net(torch.tensor([[1.0, 10.0]]) * (dist.get_rank() + 1)).sum().backward()
        ...     return net.module.weight.grad.tolist()
        >>> run_ranks(main, world_size=2)
        [[[1.5, 15.0]], [[1.5, 15.0]]]
    """

    @runs_outside_contexts
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
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        bucket_layout: BucketLayout | None = None,
        rebuild_buckets: bool | None = None,
        sync_buffers_in_eval: bool = True,
        check_replicas: int | None = None,
        before_reduce: Change | None = None,
        after_reduce: Change | None = None,
    ) -> None:
        group = resolve_group(process_group, device_mesh)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = check_module(module, ignored)
        options = ReducerOptions(
            caps=resolve_caps(bucket_cap_mb, bucket_cap_mb_list),
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_unused=skip_all_reduce_unused_params,
            delayed=resolve_delayed(named, delay_all_reduce_named_params, param_to_hook_all_reduce),
            bucket_layout=bucket_layout,
            rebuild=rebuild_buckets,
            lazy=lazy_bucket_allocation,
        )
        check_layout(bucket_layout, [(n, p) for n, p in named if p.requires_grad])
        precision = resolve_precision(mixed_precision)
        super().__init__(module, group, ignored, precision, options, before_reduce, after_reduce)
        Joinable.__init__(self)
        self.dim = dim
        self.device = resolve_device(named, device_ids, output_device)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._buffers_synced = Buffers(module, ignored)
        self.sync_buffers_in_eval = sync_buffers_in_eval
        self.check_replicas = check_interval(check_replicas)
        self.broadcast_buffers, at_start = resolve_buffers(broadcast_buffers, forward_sync_buffers)
        if init_sync:
            self._take_values_of_rank_0(named, self._buffers_synced.named() if at_start else {})
            FaultDomain.of(group).connect()
        self._make_reducer()

    @compile_callees_only
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. If gradients are enabled, the following backward is reduced.

        Raises:
            ArgumentError: Parameters were added, replaced or thawed since wrapping.
            ReductionError: The previous backward left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        if in_transform() and not self._join_config.enable:
            self.reducer.expect_after_transform(local=not self.require_backward_grad_sync)
            return self._call(inputs, kwargs)
        syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        recomputing = self.reducer.in_backward  # in a checkpoint around this module
        began = 0 if recomputing else self._before(syncing)
        output = self._call(inputs, kwargs)
        if recomputing:
            self.reducer.expect_nested(tensors_in(output))
            return output
        return self._after(output, syncing and self.require_backward_grad_sync, began)

    @compile_callees_only
    def _call(self, inputs: Any, kwargs: Any) -> Any:
        """Call the module with inputs on its device and in its dtype."""
        if self.device is not None:
            inputs, kwargs = map_tensors(self._to_device, (inputs, kwargs))
        outer = TORCHS_DDP._active_ddp_module
        TORCHS_DDP._active_ddp_module = cast(Any, self)  # torch.compile cuts graphs at its buckets
        try:
            if self._precision is None:
                return _call(self.module, inputs, kwargs)
            inputs, kwargs = self._precision.inputs((inputs, kwargs))
            with self._precision.forward():
                return _call(self.module, inputs, kwargs)
        finally:
            TORCHS_DDP._active_ddp_module = outer

    @runs_outside_contexts
    def _before(self, syncing: bool) -> int:
        """Communicate before a forward, and prepare the backward.

        Returns:
            Autograd's sequence number when the forward begins.
        """
        step: StepInfo | None = None
        if torch.is_grad_enabled():
            self.reducer.begin_forward()
            self._replicas.note(changes=not syncing)
        buffers, joining = self._buffers_synced, self._join_config.enable
        sends_buffers = self._syncs_buffers(torch.is_grad_enabled())
        if not syncing and (joining or sends_buffers):
            FaultDomain.of(self._group).before_others()
        if syncing:
            self.reducer.recover()  # raises errors of other ranks before the ranks communicate
            self._replicas.verify()
            self._parameter_check.check()
        if joining:
            self.reducer.check_over()
            step = self._exchange_step_info(syncing)
        # before `prepare`, which may send, too: a rank in a forward without gradients sends only
        # the buffers
        if sends_buffers:
            root = 0 if step is None else agree_on_rank(self._group, candidate=True)
            buffers.sync(self._group, root=root)
        shadowed = step is not None and step.ranks < self._group.size()
        if syncing and step is None:
            self.reducer.prepare(recovered=not sends_buffers)
        elif syncing and step is not None:
            ranks = None if self._divide_by_initial_world_size else step.ranks
            self.reducer.prepare(ranks=ranks, uneven=True, shadowed=shadowed)
        keeps = self.require_forward_param_sync is syncing  # setting an attribute takes 2 µs
        if not keeps and (syncing or self.sync_buffers_in_eval or torch.is_grad_enabled()):
            self.require_forward_param_sync = syncing
        return torch.autograd._get_sequence_nr()

    @run_as_written
    def _after(self, output: Any, syncing: bool, began: int) -> Any:
        """Communicate after a forward, register hooks on its output, and return the output."""
        if syncing and self._merges_buffers():
            runs_outside_contexts(self._buffers_synced.sync)(self._group)
        if self.find_unused_parameters and torch.is_grad_enabled():
            output = with_own_nodes(output, began)
        if syncing:
            outputs = beginnings(output, began)
            self.reducer.expect(outputs, counted=self.module.training)
        elif torch.is_grad_enabled():
            self.reducer.expect_local(beginnings(output, began))
        return output

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards in this context send nothing.

        The first backward of a forward outside of it reduces the accumulated gradients.

        Args:
            enabled: If False, the context has no effect. One loop can then contain both kinds of
                backwards, by `with net.no_sync(enabled=i + 1 < len(micro_batches)):`.

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
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = before and not enabled
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weight(self, weight: float) -> None:
        """Set the weight of the next backward, such as its number of samples or tokens.

        Gradients become Σ n g / Σ n over ranks and accumulated backwards, where g is the gradient
        of one rank's mean loss and n its weight. This is the gradient of the mean over all samples,
        however they are distributed. Call it before each backward, also under `no_sync()`, on every
        rank or on none, and call `zero_grad()` after each reduction. Weights are sent with the
        gradients, without a separate message. A communication hook receives weighted gradients,
        unless it is `linear` (see `gradwire.hooks.StatefulHook`). A rank of weight 0 contributes
        nothing, even if its gradients are NaN. If all weights are 0, the gradients are 0.

        Until they are reduced, gradients are n g: for parameters in float16 keep n near 1, dividing
        it by the same number on all ranks.

        Args:
            weight: Finite number, at least 0. It counts once, for all gradients until the next
                forward.

        Raises:
            ArgumentTypeError: `weight` is not a number.
            ArgumentError: `weight` is negative, infinite or NaN.
            NotSupportedError: There is no bucket of float32 or float64, or with
                `skip_all_reduce_unused_params`: register a communication hook.
            ReductionError: The previous backward was not finalized, or part of it was sent with
                another weight.

        Backward raises on every rank: MismatchError if only some ranks gave a weight;
        ReductionError if it has no weight, and `.grad` holds weighted gradients; NotSupportedError
        with `create_graph`, with parameters of two wrappers, and if `.grad` holds reduced
        gradients.

        Example:
            With one sample on rank 0 and three on rank 1, the mean is over four samples.

            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     x = torch.tensor([[[8.0]], [[0.0], [0.0], [0.0]]][dist.get_rank()])
            ...     net.weight(len(x))
            ...     net(x).mean().backward()
            ...     return net.module.weight.grad.item()
            >>> run_ranks(main, world_size=2)
            [2.0, 2.0]
        """
        self.reducer.weight(weight)

    def register_buffer_hook(self, hook: BufferHook, *, after_forward: bool = False) -> None:
        """Let `hook(buffers, group)` synchronize buffers, instead of a broadcast from rank 0.

        Args:
            hook: Function that receives the buffers by name and changes them in place. It may
                return a future or a list of futures to wait for.
            after_forward: If True, it is called after each training forward, instead of before each
                forward.

        Raises:
            ArgumentTypeError: `hook` is not callable.

        Example:
            The hook averages running statistics over ranks.

            >>> from gradwire.testing import run_ranks
            >>> def average(buffers, group):
            ...     for buffer in buffers.values():
            ...         if buffer.is_floating_point():
            ...             dist.all_reduce(buffer.div_(group.size()), group=group)
            >>> def main():
            ...     net = DistributedDataParallel(nn.BatchNorm1d(1))
            ...     net.register_buffer_hook(average, after_forward=True)
            ...     _ = net(torch.tensor([[0.0], [10.0]]) * dist.get_rank())
            ...     return round(net.module.running_mean.item(), 3)
            >>> run_ranks(main, world_size=2)  # 0.1 × the mean of 0 and 5
            [0.25, 0.25]
        """
        self._buffers_synced.set_hook(hook, after_forward=after_forward)


def _call(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    """Call the module in a frame that torch.compile compiles, unlike those of torch.nn modules."""
    return module(*inputs, **kwargs)


TORCHS_DDP.register(DistributedDataParallel)  # for isinstance; nothing is inherited
