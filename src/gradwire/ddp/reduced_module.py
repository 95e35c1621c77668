"""Module with its reducer, communication hook and `join()`, and what is agreed before a forward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn import Parameter

from gradwire._groups import check_group, message_device
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.arguments import ParameterCheck, ReducerOptions, check_module, sparse_names
from gradwire.ddp.broadcast import Buffers, broadcast_values
from gradwire.ddp.faults.fault_domain import FaultDomain, wait_for_message
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.sync_batch_norm import SyncBatchNorm
from gradwire.ddp.verify import Replicas, describe, verify_same
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSavedWarning,
    NotSupportedError,
    ReductionError,
)
from gradwire.hooks import (
    CommHook,
    StatefulHook,
    bind_hook,
    get_hook,
    group_from,
    name_if_group,
)


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


Reword = Callable[[ReductionError], ReductionError | None]
NOT_PICKLED = ("named", "reducer", "_parameter_check", "_replicas", "_reword", "around")
"""Attributes recreated for the parameters of a copy."""
REPLICAS_CHECKED_EVERY = 100


class ReducedModule:
    """Module with the reducer of its parameters, and the checks before its forwards."""

    # names and parameters that are not ignored
    named: list[tuple[str, Parameter]]
    # made by `make_reducer`, once the parameters have their initial values; a copy has its own
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        ignored: set[str],
        options: ReducerOptions,
        check_replicas: int | None,
        agreed: Mapping[str, object],
    ) -> None:
        self.module, self.group, self._ignored = module, group, ignored
        # `agreed` are arguments that must be equal on all ranks, by name
        self._options, self._check_replicas, self._agreed = options, check_replicas, agreed
        # None for the mean; `hook_state` is its first argument
        self.hook: CommHook | StatefulHook[Any] | None = None
        self.hook_state: Any = None
        self._reword: Reword | None = None
        # see `Backward.prepare_around`
        self.around: weakref.WeakMethod[Callable[[], bool]] | None = None

    @runs_outside_contexts
    def make_reducer(self) -> None:
        """Create a reducer for the current parameters, with the registered hook."""
        named = self.named = check_module(self.module, self._ignored)
        reduced = [(n, p) for n, p in named if p.requires_grad]
        self._parameter_check = ParameterCheck(self.module, named, self._ignored)
        options = replace(
            self._options, sparse=sparse_names(self.module), module=type(self.module).__name__
        )
        if "reducer" in self.__dict__:  # a parameter has one reducer
            self.reducer.close()
        self.reducer = Reducer(reduced, self.group, options)
        self.reducer.reword, self.reducer.prepare_around = self._reword, self.around
        self._replicas = Replicas(named, self.reducer)
        self._apply_hook()

    def register_hook(self, state: Any, hook: CommHook | StatefulHook[Any] | str | None) -> None:
        """See `DistributedDataParallel.register_comm_hook`."""
        if hook is None and state is not None:
            raise ArgumentTypeError(
                f"hook is None, and state is {state!r}: pass the state first, then the hook; "
                "register_comm_hook(None, None) restores the mean"
            )
        chosen = get_hook(hook) if isinstance(hook, str) else hook
        if chosen is not None:
            bind_hook(state, chosen)  # raises before anything is changed
        self.hook, self.hook_state = chosen, state
        self._apply_hook()

    def _apply_hook(self) -> None:
        if self.hook is not None or self.reducer.comm_hook is not None:
            self.reducer.register_comm_hook(self.hook_state, self.hook)
        self._set_replica_interval()

    def _set_replica_interval(self) -> None:
        every = self._check_replicas
        if every is None:  # only if all ranks are known to receive the same gradients
            hook, state = self.reducer.comm_hook, self.reducer.hook_state
            known = hook is None or hook.averages
            other = getattr(state, "process_group", state)
            elsewhere = isinstance(other, ProcessGroup) and other is not self.group
            every = REPLICAS_CHECKED_EVERY if known and not elsewhere else 0
        self._replicas.every = every

    def reword_unexpected(self, reword: Reword) -> None:
        """Let a function convert errors of unexpected gradients; copies do not have it."""
        self._reword = reword
        self.reducer.reword = reword

    def set_options(self, **changes: Any) -> None:
        """Change options of reducers that are created later."""
        self._options = replace(self._options, **changes)

    def set_group(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on."""
        self.group = check_group(group)
        self.reducer.replace_group(group)
        if not isinstance(self.hook, StatefulHook):  # which has its own state
            self.hook_state = self.reducer.hook_state
        self._set_replica_interval()

    @runs_outside_contexts
    def refit(self, module: nn.Module) -> None:
        """See `DistributedDataParallel.refit`."""
        named = check_module(module, self._ignored)
        self.module = module
        self.take_values_of_rank_0(named, {})
        self.make_reducer()

    def take_values_of_rank_0(
        self, named: Sequence[tuple[str, Tensor]], buffers: Mapping[str, Tensor]
    ) -> None:
        """Verify that the ranks' models match, and take rank 0's values."""
        FaultDomain.of(self.group).before_others()
        options = self._options
        given = {
            **self._agreed,
            "find_unused_parameters": options.find_unused_parameters,
            "static_graph": options.static_graph,
            "skip_all_reduce_unused_params": options.skip_unused,
            "delay_all_reduce_named_params": sorted(options.delayed),
        }
        arguments = [(name, f"an argument, {value!r}") for name, value in given.items()]
        both = describe(named, "parameter") + describe(buffers.items(), "buffer")
        verify_same(self.group, arguments + both)
        broadcast_values(self.group, [*named, *buffers.items()])

    # -- before a forward ------------------------------------------------------------------

    def begin_forward(self, *, reduces: bool) -> None:
        """Prepare for a forward with gradients, whose backward is reduced or not."""
        self.reducer.begin_forward()
        self._replicas.note(changes=not reduces)

    def recover(self) -> None:
        """Raise errors of earlier steps, before the ranks communicate for a forward."""
        self.reducer.raise_if_unfinished()
        self._replicas.verify()
        self._parameter_check.check()

    def skip_if_any(self, flag: bool | Tensor, *, syncing: bool) -> bool:
        """See `DistributedDataParallel.skip_if_any`."""
        if not isinstance(flag, bool) and not (isinstance(flag, Tensor) and flag.numel() == 1):
            raise ArgumentTypeError(f"flag is {flag!r}: pass a bool, or a tensor of one element")
        domain = FaultDomain.of(self.group)
        domain.before_others()
        if self.reducer.shadowed:
            domain.fail(
                NotSupportedError(
                    "skip_if_any() in join(), where a rank has run out of input: that rank waits "
                    "for a backward. Call it outside of join()"
                )
            )
        accumulated = syncing and bool(self.reducer.usage.accumulated)
        own, device = [bool(flag), accumulated], message_device(self.group)
        flags = torch.tensor(own, dtype=torch.int64, device=device)
        _all_reduce(flags, self.group, dist.ReduceOp.MAX, "skip_if_any()")
        skipped, accumulated = map(bool, flags.tolist())
        if skipped:
            self.reducer.skip(reduce=accumulated)
        return skipped

    # -- copies ----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {n: value for n, value in self.__dict__.items() if n not in NOT_PICKLED}
        # process groups are pickled as their names, which all ranks share
        groups = {
            "group": self.group,
            "hook_state": self.hook_state,
            # the states of PyTorch's hooks do not copy their group: a copy has the default group
            "hook_group": getattr(self.hook_state, "process_group", None),
        }
        state.update((name, name_if_group(value)) for name, value in groups.items())
        return {**state, "buckets": self.reducer.buckets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buckets, hook_group = state.pop("buckets"), group_from(state.pop("hook_group"))
        self.__dict__.update(state, _reword=None, around=None)
        self.group, self.hook_state = group_from(self.group), group_from(self.hook_state)
        if getattr(self.hook_state, "process_group", hook_group) is not hook_group:
            self.hook_state.process_group = hook_group
        self.make_reducer()
        names = [sorted(chain(*each)) for each in (buckets, self.reducer.buckets)]
        if self.hook is not None and names[0] == names[1]:
            self.reducer.set_layout(buckets)  # the hook's state may be kept by bucket


NO_BATCH_NORM = (
    "SyncBatchNorm in join(): it would wait for ranks that have run out of input. End training on "
    "all ranks by join(throw_on_early_termination=True), use BatchNorm, or set its layers to eval()"
)
ACTIONS = (
    "expect a backward that is reduced",
    "synchronize buffers",
    "call a buffer hook after the forward",
)


@dataclass(frozen=True)
class StepInfo:
    """The next forward and backward of ranks that still have input."""

    ranks: int = 0  # number of these ranks; 0 on a rank that has joined
    reduce: bool = False
    sync_buffers: bool = False  # before the forward
    merge_buffers: bool = False  # after the forward


def agree_on_rank(group: ProcessGroup, *, candidate: bool) -> int:
    """Return the highest candidate rank of the group, which has at least one."""
    own = group.rank() if candidate else -1
    rank = torch.tensor([own], dtype=torch.int64, device=message_device(group))
    _all_reduce(rank, group, dist.ReduceOp.MAX)
    return int(rank)


def _all_reduce(
    tensor: Tensor,
    group: ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    what: str = "a step in join()",
) -> None:
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    wait_for_message(group, work, what, on_cpu=tensor.is_cpu, from_all=True)


class UnevenInputs(JoinHook):
    """One `join()` of a wrapped module: its steps, and the hook of a rank that has joined."""

    # In PyTorch's `Join`, each forward begins with one all_reduce. From it, ranks that have joined
    # learn the next step of the others, and all ranks learn how many are left.

    def __init__(
        self, reduced: ReducedModule, buffers: Buffers, *, broadcast_buffers: bool, divide: bool
    ) -> None:
        self._reduced, self._buffers = reduced, buffers
        # `broadcast_buffers`: ranks that have joined take the buffers of the others at the end
        self._broadcast, self._divide_by_initial_world_size = broadcast_buffers, divide
        # rank whose parameters all ranks have taken at the end; -1 before
        self.root = -1

    def next_step(self, own: StepInfo) -> StepInfo:
        """Exchange the next step of the ranks that still have input; raise if theirs differ."""
        group = self._reduced.group
        kinds, modules = (SyncBatchNorm, nn.SyncBatchNorm), self._reduced.module.modules()
        waits = own.ranks and any(m.training for m in modules if isinstance(m, kinds))
        numbers, device = (*astuple(own), waits), message_device(group)
        sums = torch.tensor(numbers, dtype=torch.int64, device=device)
        _all_reduce(sums, group)
        ranks, *counts, waiting = sums.tolist()
        for count, what in zip(counts, ACTIONS, strict=True):
            if count not in (0, ranks):
                raise MismatchError(
                    f"in join(), {count} of the {ranks} ranks that still have input {what} in "
                    "their next forward, and the others do not: call forward in the same order, "
                    "and under the same no_grad() and no_sync(), on all of these ranks"
                )
        if waiting and ranks < group.size():
            raise NotSupportedError(NO_BATCH_NORM)
        return StepInfo(ranks, *(count > 0 for count in counts))

    def prepare(self, step: StepInfo) -> None:
        """Expect the backward of a step."""
        ranks = None if self._divide_by_initial_world_size else step.ranks
        shadowed = step.ranks < self._reduced.group.size()
        self._reduced.reducer.prepare(ranks=ranks, uneven=True, shadowed=shadowed)

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        # in the order of DistributedDataParallel.forward, whose messages these match
        group, reducer = self._reduced.group, self._reduced.reducer
        step = self.next_step(StepInfo())
        if step.reduce:
            reducer.raise_if_unfinished()
        if step.sync_buffers:
            self._buffers.sync(group, root=agree_on_rank(group, candidate=False))
        if step.reduce:
            reducer.prepare()
        if step.merge_buffers:
            self._buffers.sync(group)
        if step.reduce:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that took part in every step."""
        group = self._reduced.group
        self._reduced.reducer.shadowed = False
        self.root = agree_on_rank(group, candidate=is_last_joiner)
        buffers = self._buffers.named().items() if self._broadcast else ()
        broadcast_values(group, [*self._reduced.named, *buffers], group_src=self.root)


class UnevenJoin(Join):
    """PyTorch's `Join`, with errors of this package if a rank ends while ranks are counted."""

    def _get_num_nonjoined_procs(self) -> int:
        for hook in self._join_hooks:
            if isinstance(hook, UnevenInputs):
                hook._reduced.reducer.check_over()
        assert isinstance(self._process_group, ProcessGroup)
        # `notify_join_context` sends a 1 in the default dtype; only a sum of 0 matters
        dtype = torch.get_default_dtype()
        count = torch.zeros(1, dtype=dtype, device=self._device)
        _all_reduce(count, self._process_group)
        return int(count)
