"""DistributedDataParallel: averages a module's gradients over the ranks of a group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Parameter

from gradwire._containers import map_tensors, tensors_in
from gradwire._groups import check_group, message_device
from gradwire._scope import in_transform, runs_outside_contexts
from gradwire._torch import TORCHS_DDP, compile_callees_only, run_as_written
from gradwire.ddp.arguments import (
    ParameterCheck,
    ReducerOptions,
    WeakHook,
    check_interval,
    check_module,
    resolve_caps,
    resolve_delayed,
    resolve_device,
    resolve_group,
    sparse_names,
)
from gradwire.ddp.broadcast import BufferHook, Buffers, broadcast_values
from gradwire.ddp.buckets.assignment import BUCKET_BYTES
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.join import (
    StepInfo,
    UnevenInputs,
    UnevenJoin,
    agree_on_rank,
    all_reduce_small,
)
from gradwire.ddp.reducer.reducer import (
    LoggingData,
    Reducer,
    beginnings,
    with_own_nodes,
)
from gradwire.ddp.verify import Replicas, describe, verify_same
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotSavedWarning,
    NotSupportedError,
    ReductionError,
)
from gradwire.hooks import CommHook, StatefulHook, get_hook, group_from, name_if_group

SMALLEST_PIECE_BYTES = 1 << 20
REPLICAS_CHECKED_EVERY = 100
NOT_PICKLED = ("_named", "reducer", "_parameter_check", "_replicas", "_uneven")
"""Attributes recreated for the parameters of a copy."""
_running: list[nn.Module] = []
"""Wrappers whose forward is running, in any thread."""


def save_state(state: Any) -> dict[str, Any]:
    """Return the result of the `state_dict` of a hook's state; empty if there is no state."""
    if callable(getattr(state, "state_dict", None)):
        return {"own": state.state_dict()}
    if state is not None and not isinstance(state, ProcessGroup):
        warnings.warn(
            f"the communication hook's state, a {type(state).__name__}, is not saved: define "
            "state_dict and load_state_dict on it, or save the object itself",
            NotSavedWarning,
            stacklevel=3,
        )
    return {}


def load_state(state: Any, saved: Mapping[str, Any]) -> None:
    """Load the result of `save_state`."""
    if saved and not callable(getattr(state, "load_state_dict", None)):
        raise ArgumentError(
            f"the communication hook's state is {state!r}, which cannot load the saved one: "
            "register the same hook first"
        )
    if saved:
        state.load_state_dict(saved["own"])


class DistributedDataParallel(nn.Module, Joinable):
    """Wrapper of a module that averages its gradients over ranks in each backward.

    Every rank has a replica of the module and its own batch. Parameters and buffers start with rank
    0's values. After `loss.backward()` each `param.grad` holds the mean of the ranks' gradients,
    with the same bits on every rank, so that equal optimizers keep the replicas equal. This holds
    whichever way the forward went, also around the wrapper (`net.module(x)`), if it did so on all
    ranks. Only backwards in `no_sync`, and within a forward of the wrapper, stay local.

    Adjoint convention: the objective is Σ_r L_r / W, the mean of the ranks' losses.

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
        mixed_precision: None; accepted for compatibility with PyTorch.
        device_mesh: One-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: If True, with `find_unused_parameters`, nothing is sent for
            unused buckets, which must be the same on every rank.
        bucket_cap_mb_list: Sizes in MiB of the first bucket, the second, …; the last one repeats.
        batched_grad_copy: Ignored: small gradients are always copied in batches.
        forward_sync_buffers: If given, replaces `broadcast_buffers` for forwards; buffers then
            always start with rank 0's values.
        lazy_bucket_allocation: If True, a bucket's memory is allocated when its first gradient
            arrives, and released after backward, so that the next forward can use it.
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

    Attributes:
        module: Wrapped module.
        bucket_bytes_cap: Size of a bucket in bytes, at least 1 MiB: torch.compile splits graphs at
            this size, and accepts no smaller one.

    Raises:
        ArgumentError: An argument is not valid, or no parameter requires a gradient.
        ArgumentTypeError: `module` is not a module, or `process_group` is not a group.
        MismatchError: The ranks' models differ. Raised on every rank with the name of the
            parameter.
        NotSupportedError: A parameter's `grad_dtype` is not its dtype, or `mixed_precision` is
            given.

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

    # communicates the gradients; a copy of the module has its own
    reducer: Reducer

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
        sync_buffers_in_eval: bool = True,
        check_replicas: int | None = None,
    ) -> None:
        if mixed_precision is not None:
            raise NotSupportedError(
                f"mixed_precision is {mixed_precision!r}: run forward under torch.autocast, and "
                'communicate in a smaller dtype by register_comm_hook(None, "bf16")'
            )
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
            lazy=lazy_bucket_allocation,
        )
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module, self.parameters_to_ignore = module, ignored
        self.dim, self.device = dim, resolve_device(named, device_ids, output_device)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.broadcast_buffers = broadcast_buffers is not False
        if forward_sync_buffers is not None:
            self.broadcast_buffers = forward_sync_buffers
        self.sync_buffers_in_eval = sync_buffers_in_eval
        self.bucket_bytes_cap = max(SMALLEST_PIECE_BYTES, (options.caps or [BUCKET_BYTES])[-1])
        self._buffers_synced = Buffers(module, ignored)
        self._uneven: UnevenInputs | None = None
        self._group, self._options = group, options
        self._check_replicas = check_interval(check_replicas)
        if init_sync:
            at_start = self.broadcast_buffers or forward_sync_buffers is not None
            buffers = self._buffers_synced.named() if at_start else {}
            self._take_values_of_rank_0(named, buffers)
            FaultDomain.of(group).connect()
        self._make_reducer()

    @runs_outside_contexts
    def _make_reducer(self, hook: StatefulHook[Any] | None = None) -> None:
        """Create a reducer for the current parameters, with a communication hook."""
        ignored = self.parameters_to_ignore
        self._named = named = check_module(self.module, ignored)
        reduced = [(n, p) for n, p in named if p.requires_grad]
        self._parameter_check = ParameterCheck(self.module, named, ignored)
        kind, sparse = type(self.module).__name__, sparse_names(self.module)
        options = replace(self._options, sparse=sparse, module=kind)
        if "reducer" in self.__dict__:  # a parameter has one reducer
            self.reducer.close()
        self.reducer = Reducer(reduced, self._group, options)
        self.reducer.reword = WeakHook(self._unexpected_gradient)
        self.reducer.prepare_around = WeakHook(self._prepare_around)
        self._replicas = Replicas(named, self.reducer)
        if hook is not None:
            self.reducer.register_comm_hook(None, hook)
        self._set_replica_interval()

    def _set_replica_interval(self) -> None:
        every = self._check_replicas
        if every is None:  # only if all ranks are known to receive the same gradients
            hook, state = self.reducer.comm_hook, self.reducer.hook_state
            known = hook is None or hook.averages
            other = getattr(state, "process_group", state)
            elsewhere = isinstance(other, ProcessGroup) and other is not self._group
            every = REPLICAS_CHECKED_EVERY if known and not elsewhere else 0
        self._replicas.every = every

    def _take_values_of_rank_0(
        self, named: Sequence[tuple[str, Tensor]], buffers: Mapping[str, Tensor]
    ) -> None:
        """Verify that the ranks' models and arguments match, and take rank 0's values."""
        FaultDomain.of(self._group).before_others()
        options = self._options
        given = {
            "broadcast_buffers": self.broadcast_buffers,
            "check_replicas": self._check_replicas,
            "sync_buffers_in_eval": self.sync_buffers_in_eval,
            "find_unused_parameters": options.find_unused_parameters,
            "static_graph": options.static_graph,
            "skip_all_reduce_unused_params": options.skip_unused,
            "delay_all_reduce_named_params": sorted(options.delayed),
        }
        arguments = [(name, f"an argument, {value!r}") for name, value in given.items()]
        both = describe(named, "parameter") + describe(buffers.items(), "buffer")
        verify_same(self._group, arguments + both)
        broadcast_values(self._group, [*named, *buffers.items()])

    def _unexpected_gradient(self, error: ReductionError) -> ReductionError:
        """Return the error to raise on every rank for an unexpected gradient."""
        return error

    @compile_callees_only
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. If gradients are enabled, the following backward is reduced.

        Raises:
            ArgumentError: Parameters were added, replaced or thawed since wrapping.
            NotSupportedError: Another wrapper of the same parameters has been used.
            ReductionError: The previous backward left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        reducer = self.reducer
        if in_transform() and not self._join_config.enable:
            reducer.begin_forward()
            return self._call(inputs, kwargs)  # its result usually has no backward
        syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        recomputing = reducer.in_backward  # in a checkpoint around this module
        began = 0 if recomputing else self._before(syncing)
        output = self._call(inputs, kwargs)
        if recomputing:
            reducer.expect(tensors_in(output), counted=False, nested=True)
            return output
        return self._after(output, syncing and self.require_backward_grad_sync, began)

    @compile_callees_only
    def _call(self, inputs: Any, kwargs: Any) -> Any:
        """Call the module with inputs on its device."""
        if self.device is not None:
            inputs, kwargs = map_tensors(self._to_device, (inputs, kwargs))
        reducer = self.reducer
        reducer.weights.within = True  # until `prepare_for_backward` is called within
        _running.append(self)
        TORCHS_DDP._active_ddp_module = cast(Any, self)  # torch.compile cuts graphs at its buckets
        try:
            return _call(self.module, inputs, kwargs)
        finally:
            reducer.weights.within = False
            _running.remove(self)  # other threads may have entered later, and still run theirs
            TORCHS_DDP._active_ddp_module = cast(Any, _running[-1] if _running else None)

    @runs_outside_contexts
    def _before(self, syncing: bool) -> int:
        """Communicate before a forward; return autograd's sequence number at its beginning."""
        reducer, buffers, training = self.reducer, self._buffers_synced, torch.is_grad_enabled()
        uneven = self._uneven if self._join_config.enable else None
        step = None
        if training:
            reducer.begin_forward()
            self._replicas.note(changes=not syncing)
        sends_buffers = self.broadcast_buffers and self.require_forward_param_sync
        sends_buffers = sends_buffers and (training or self.sync_buffers_in_eval)
        sends_buffers = sends_buffers and not buffers.after_forward and bool(buffers)
        if syncing:
            self._recover()  # raises errors of other ranks before the ranks communicate
        elif uneven is not None or sends_buffers:
            FaultDomain.of(self._group).before_others()
        if uneven is not None:
            reducer.check_over()
            Join.notify_join_context(self)
            merges = syncing and self._merges_buffers()
            step = uneven.next_step(StepInfo(1, syncing, sends_buffers, merges))
        # before `prepare`, which may send, too: a rank in a forward without gradients sends only
        # the buffers
        if sends_buffers:
            root = 0 if step is None else agree_on_rank(self._group, candidate=True)
            buffers.sync(self._group, root=root)
        if syncing and uneven is not None and step is not None:
            uneven.prepare(step)
        elif syncing:
            reducer.prepare(recovered=not sends_buffers)
        keeps = self.require_forward_param_sync is syncing  # setting an attribute takes 2 µs
        if not keeps and (syncing or self.sync_buffers_in_eval or training):
            self.require_forward_param_sync = syncing
        return torch.autograd._get_sequence_nr()

    def _recover(self) -> None:
        """Raise errors of earlier steps, before the ranks communicate for a forward."""
        self.reducer.raise_if_unfinished()
        self._replicas.verify()
        self._parameter_check.check()

    def _prepare_around(self) -> bool:
        """Prepare a backward whose forward went around the wrapper; return False if it is local."""
        if not self.require_backward_grad_sync:
            return False
        uneven = self._uneven if self._join_config.enable else None
        if uneven is not None and uneven.root < 0:
            raise NotSupportedError(
                "a backward in join() whose forward went around the wrapper, of which ranks that "
                "have run out of input do not know: call the wrapper"
            )
        self._recover()
        self.reducer.prepare(recovered=True)
        return True

    def __copy__(self) -> Self:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)  # one reducer: a parameter has no other
        return copied

    def __getstate__(self) -> dict[str, Any]:
        state = {n: value for n, value in self.__dict__.items() if n not in NOT_PICKLED}
        hook = self.reducer.comm_hook
        # process groups are pickled as their names, which all ranks share; the states of PyTorch's
        # hooks do not copy their group: a copy has the default group
        state["_group"] = name_if_group(self._group)
        hook_group = getattr(self.reducer.hook_state, "process_group", None)
        return {"copied": (hook, name_if_group(hook_group), self.reducer.buckets), **state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        hook, hook_group, buckets = state.pop("copied")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group, self._uneven = group_from(self._group), None
        hook_group = group_from(hook_group)
        if hook is not None and getattr(hook.state, "process_group", hook_group) is not hook_group:
            hook.state.process_group = hook_group
        self._make_reducer(hook)
        names = [sorted(chain(*each)) for each in (buckets, self.reducer.buckets)]
        if hook is not None and names[0] == names[1]:
            self.reducer.set_layout(buckets)  # the hook's state may be kept by bucket

    @run_as_written
    def _after(self, output: Any, syncing: bool, began: int) -> Any:
        """Communicate after a forward, register hooks on its output, and return the output."""
        training = torch.is_grad_enabled()
        if syncing and self._merges_buffers():
            runs_outside_contexts(self._buffers_synced.sync)(self._group)
        if self.find_unused_parameters and training:
            output = with_own_nodes(output, began)
        if syncing:
            outputs = beginnings(output, began)
            self.reducer.expect(outputs, counted=self.module.training)
        elif training:
            self.reducer.expect_local(beginnings(output, began))
        return output

    def _merges_buffers(self) -> bool:
        """Return True if a training forward synchronizes buffers after it has run."""
        wanted = self.broadcast_buffers and self._buffers_synced.after_forward
        return wanted and bool(self._buffers_synced)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards in this context send nothing.

        Neither do backwards in it whose forward went around the wrapper. The first other backward
        reduces the accumulated gradients.

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

        Cotangents that `SyncBatchNorm` and `gradwire.collectives` exchange have the weight of the
        rank whose loss they come from. There, a weight of 0 needs a batch without samples.

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
        with `create_graph`, if `.grad` holds reduced gradients, and with a weight of 0 for samples
        whose cotangents are exchanged.

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

    def register_comm_hook(
        self, state: Any, hook: CommHook | StatefulHook[Any] | str | None
    ) -> None:
        """Let `hook(state, bucket)` communicate gradients from the next forward on.

        Another call replaces the hook; None restores the mean.

        Args:
            state: First argument of the hook. For the hooks of `gradwire.hooks` a process group, or
                None for the module's group; None for a `StatefulHook`, which has its own state.
                `comm_hook_state_dict` returns its contents, for saving.
            hook: Function of type `gradwire.hooks.CommHook`, a `gradwire.hooks.StatefulHook`, or
                the name of one of `gradwire.hooks`; PyTorch's own hooks work unchanged. The same on
                every rank.

        Raises:
            ArgumentTypeError: `hook` is not a hook.
            ArgumentError: There is no hook of that name, or a `StatefulHook` has another state.
        """
        if hook is None and state is not None:
            raise ArgumentTypeError(
                f"hook is None, and state is {state!r}: pass the state first, then the hook; "
                "register_comm_hook(None, None) restores the mean"
            )
        self.reducer.register_comm_hook(state, get_hook(hook) if isinstance(hook, str) else hook)
        self._set_replica_interval()

    def comm_hook_state_dict(self) -> dict[str, Any]:
        """Return what the communication hook's state returns from its method `state_dict`.

        It differs between ranks if the state does. `state_dict` does not include it.

        Warns:
            NotSavedWarning: The state has no such method.

        Example:
            >>> import torch
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(4, 4))
            ...     net.register_comm_hook(None, "int8")
            ...     net(torch.ones(1, 4)).sum().backward()
            ...     return net.comm_hook_state_dict()["own"]["step"], list(net.state_dict())
            >>> run_ranks(main, world_size=1)
            [(1, ['module.weight', 'module.bias'])]
        """
        state = self.reducer.hook_state
        saved = save_state(state)
        if getattr(state, "depends_on_buckets", False):
            saved["layout"] = self.reducer.buckets
        return saved

    def load_comm_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `comm_hook_state_dict` into the registered hook's state.

        If the state depends on buckets, they become those at the time of saving.

        Raises:
            ArgumentError: No hook with such a state is registered.
        """
        load_state(self.reducer.hook_state, saved)
        if "layout" in saved:
            self.reducer.set_layout(saved["layout"])

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if each reduced backward waits for a call of `finalize_backward`.

        Other communication, or other work of the same backward, then overlaps with the reduction.
        Set it before a forward, the same on every rank.

        Raises:
            ReductionError: It was set while a backward was not finished.
        """
        return self.reducer.manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        reducer = self.reducer
        if required != reducer.manual and reducer.state.unfinished:
            raise ReductionError(
                "manual finalization was switched during a backward: set it before a forward, or "
                "after finalize_backward()"
            )
        reducer.manual = required
        self._options = replace(self._options, manual_finalization=required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if the next backward must return before `finalize_backward` is called.

        This holds for the first backward, from which buckets are assigned. In later ones a hook of
        backward may call it once all parameters have their gradients.
        """
        reducer = self.reducer
        return reducer.manual and (reducer.arrivals is not None or reducer.usage.recording)

    def finalize_backward(self) -> None:
        """Wait for the buckets of a backward, and write the results to the gradients.

        If `require_manual_backward_finalization` is set, every rank calls this once for each
        backward that is reduced: after that backward, or in one of its hooks.

        Raises:
            ReductionError: Finalization is not manual, nothing was reduced, or gradients are
                missing.
            PeerFailedError: Another rank reported an error.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     net.require_manual_backward_finalization = True
            ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
            ...     # here other work overlaps with the reduction
            ...     net.finalize_backward()
            ...     return net.module.weight.grad.item()
            >>> run_ranks(main, world_size=2)
            [1.5, 1.5]
        """
        self.reducer.finalize()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that has run out takes part in the others' steps with zeros, and ends with the
        parameters of a rank that took part in all steps. Once a rank has run out, each forward
        outside of `no_sync()` must have exactly one backward; otherwise ReductionError is raised.

        Args:
            divide_by_initial_world_size: If True, sums are divided by W. If False, by the number of
                ranks that still have input, even if a hook divides by W itself.
            enable: If False, the context has no effect.
            throw_on_early_termination: If True, RuntimeError is raised on all ranks when one has
                run out.

        Example:
            >>> from torch import nn
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     gradients = []
            ...     with net.join(divide_by_initial_world_size=False):
            ...         for _ in range(1 + dist.get_rank()):
            ...             net.zero_grad()
            ...             net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
            ...             gradients.append(net.module.weight.grad.item())
            ...     return gradients
            >>> run_ranks(main, world_size=2)
            [[1.5], [1.5, 2.0]]
        """
        return UnevenJoin(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def skip_if_any(self, flag: bool | Tensor) -> bool:
        """Return True on all ranks if any rank passes True, so that all leave out the batch.

        A rank that leaves out a backward alone is a step ahead of the others from then on. Every
        rank calls this at the same point, after the forward or before it. It sends one small
        message. If all leave out the batch and this is called outside of `no_sync()`, gradients
        that accumulated before are reduced, as the left out backward would have done.

        Args:
            flag: Bool, or tensor of one element.

        Raises:
            ArgumentTypeError: `flag` is neither.
            NotSupportedError: The call is in `join()`, and a rank has run out of input. Raised on
                all ranks.
            PeerFailedError: Another rank reported an error.
            PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not call in time.

        Example:
            >>> from torch import nn
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net, steps = DistributedDataParallel(nn.Linear(1, 1)), []
            ...     for step in range(3):
            ...         bad = dist.get_rank() == 1 and step == 1
            ...         loss = net(torch.ones(1, 1)).sum() * (float("nan") if bad else 1.0)
            ...         if net.skip_if_any(not loss.isfinite()):
            ...             continue
            ...         loss.backward()
            ...         steps.append(step)
            ...     return steps
            >>> run_ranks(main, world_size=2)
            [[0, 2], [0, 2]]
        """
        if not isinstance(flag, bool) and not (isinstance(flag, Tensor) and flag.numel() == 1):
            raise ArgumentTypeError(f"flag is {flag!r}: pass a bool, or a tensor of one element")
        domain = FaultDomain.of(self._group)
        domain.before_others()
        if self.reducer.shadowed:
            domain.fail(
                NotSupportedError(
                    "skip_if_any() in join(), where a rank has run out of input: that rank waits "
                    "for a backward. Call it outside of join()"
                )
            )
        accumulated = self.require_backward_grad_sync and bool(self.reducer.usage.accumulated)
        own, device = [bool(flag), accumulated], message_device(self._group)
        flags = torch.tensor(own, dtype=torch.int64, device=device)
        all_reduce_small(flags, self._group, dist.ReduceOp.MAX, "skip_if_any()")
        skipped, accumulated = map(bool, flags.tolist())
        if skipped:
            self.reducer.skip(reduce=accumulated)
        return skipped

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        """Return the hook that `Join` runs on a rank that has run out of input."""
        self._uneven = UnevenInputs(self, **kwargs)
        return self._uneven

    @property
    def join_device(self) -> torch.device:
        """Device of `Join`'s messages."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Process group of `Join`."""
        return self.process_group

    @property
    def process_group(self) -> ProcessGroup:
        """Process group. Setting another one, on each of its ranks, reduces over that group."""
        return self._group

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        self._group = check_group(group)
        self.reducer.replace_group(group)
        self._set_replica_interval()

    @runs_outside_contexts
    def refit(self) -> None:
        """Include parameters that were added, replaced, frozen or thawed. Every rank calls this.

        New parameters start with rank 0's values. Add them to the optimizer, too.

        Raises:
            MismatchError: The ranks' models differ. Raised on every rank with the parameter's name.
        """
        self._take_values_of_rank_0(check_module(self.module, self.parameters_to_ignore), {})
        self._make_reducer(self.reducer.comm_hook)

    def logging_data(self) -> LoggingData:
        """Return buckets, unused parameters and times of the last step that reduced gradients."""
        return self.reducer.logging_data()

    @property
    def _has_rebuilt_buckets(self) -> bool:  # used by programs that expect PyTorch's class
        return self.reducer.rebuilt


def _call(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    """Call the module in a frame that torch.compile compiles, unlike those of torch.nn modules."""
    return module(*inputs, **kwargs)


TORCHS_DDP.register(DistributedDataParallel)  # for isinstance; nothing is inherited
