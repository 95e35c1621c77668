"""Communication hook that a module's user has registered."""

from __future__ import annotations

import warnings
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

from gradwire._groups import check_group
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.arguments import ParameterCheck, check_module, sparse_names
from gradwire.ddp.broadcast import Buffers, broadcast_values
from gradwire.ddp.faults.fault_domain import FaultDomain, wait_for_message
from gradwire.ddp.group import message_device
from gradwire.ddp.options import ReducerOptions
from gradwire.ddp.reducer.reducer import Reducer
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
    all_reduce,
    bf16,
    bind_hook,
    fp16,
    get_hook,
    group_from,
    name_if_group,
)


class RegisteredHook:
    """Communication hook with its state. Copies refer to the same process groups, by name.

    Attributes:
        hook: Communication hook; None for the mean.
        state: First argument of the hook.
    """

    def __init__(self) -> None:
        self.hook: CommHook | StatefulHook[Any] | None = None
        self.state: Any = None

    def register(self, state: Any, hook: CommHook | StatefulHook[Any] | str | None) -> None:
        """See `DistributedDataParallel.register_comm_hook`."""
        if hook is None and state is not None:
            raise ArgumentTypeError(
                f"hook is None, and state is {state!r}: pass the state first, then the hook; "
                "register_comm_hook(None, None) restores the mean"
            )
        chosen = get_hook(hook) if isinstance(hook, str) else hook
        if chosen is not None:
            bind_hook(state, chosen)  # raises before anything is changed
        self.hook, self.state = chosen, state

    def take_state(self, state: Any) -> None:
        """Take the state after the reducer has replaced the group in it."""
        if not isinstance(self.hook, StatefulHook):  # has its own state
            self.state = state

    def averages(self, state: Any, group: ProcessGroup) -> bool:
        """Return True if all ranks are known to receive the same gradients.

        Args:
            state: State of the reducer's hook.
            group: Process group of the reducer.
        """
        if self.hook is None:
            return True
        other = getattr(state, "process_group", state)
        averages = self.hook in (all_reduce, bf16, fp16) or (
            isinstance(self.hook, StatefulHook) and self.hook.averages
        )
        return averages and (other is group or not isinstance(other, ProcessGroup))

    def __getstate__(self) -> dict[str, Any]:
        # the states of PyTorch's hooks do not copy their group: a copy has the default group
        group = name_if_group(getattr(self.state, "process_group", None))
        return {**self.__dict__, "state": name_if_group(self.state), "group": group}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        group = group_from(saved.pop("group"))
        self.__dict__.update(saved)
        self.state = group_from(self.state)
        if getattr(self.state, "process_group", group) is not group:
            self.state.process_group = group


def save_state(state: Any) -> dict[str, Any]:
    """Return the result of the `state_dict` of a hook's state; empty if there is no state.

    Warns:
        NotSavedWarning: The state has no such method.
    """
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
    """Load the result of `save_state`.

    Raises:
        ArgumentError: There is no state that can load it.
    """
    if saved and not callable(getattr(state, "load_state_dict", None)):
        raise ArgumentError(
            f"the communication hook's state is {state!r}, which cannot load the saved one: "
            "register the same hook first"
        )
    if saved:
        state.load_state_dict(saved["own"])


Reword = Callable[[ReductionError], ReductionError | None]
NOT_PICKLED = ("named", "reducer", "_parameter_check", "_replicas", "_reword")
"""Attributes recreated for the parameters of a copy."""
REPLICAS_CHECKED_EVERY = 100


class ReducedModule:
    """Module with the reducer of its parameters, and the checks before its forwards.

    `make_reducer` is called once the parameters have their initial values. A copy has a reducer of
    its own. A process group is pickled as its name, which all ranks share.

    Args:
        module: Wrapped module.
        group: Process group.
        ignored: Names of parameters that are not reduced.
        options: Options of the reducer.
        hook: Communication hook.
        check_replicas: Argument of `DistributedDataParallel`.
        agreed: Arguments that must be equal on all ranks, by name.

    Attributes:
        module: Wrapped module.
        group: Process group.
        named: Names and parameters that are not ignored.
        reducer: Reducer of the parameters.
    """

    named: list[tuple[str, Parameter]]
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        ignored: set[str],
        options: ReducerOptions,
        hook: RegisteredHook,
        check_replicas: int | None,
        agreed: Mapping[str, object],
    ) -> None:
        self.module, self.group, self._ignored = module, group, ignored
        self._options, self._hook = options, hook
        self._check_replicas, self._agreed = check_replicas, agreed
        self._reword: Reword | None = None

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
        if self._reword is not None:
            self.reducer.reword_unexpected(self._reword)
        self._replicas = Replicas(named, self.reducer)
        self.apply_hook()

    def apply_hook(self) -> None:
        """Let the reducer use the registered hook from the next forward on."""
        hook = self._hook.hook
        if hook is not None or self.reducer.has_hook:
            self.reducer.register_comm_hook(self._hook.state, hook)
        self._set_replica_interval()

    def _set_replica_interval(self) -> None:
        every = self._check_replicas
        if every is None:
            averages = self._hook.averages(self.reducer.hook_state, self.group)
            every = REPLICAS_CHECKED_EVERY if averages else 0
        self._replicas.every = every

    def reword_unexpected(self, reword: Reword) -> None:
        """See `Reducer.reword_unexpected`. Copies do not have the function."""
        self._reword = reword
        self.reducer.reword_unexpected(reword)

    def set_options(self, **changes: Any) -> None:
        """Change options of reducers that are created later."""
        self._options = replace(self._options, **changes)

    def set_group(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on."""
        self.group = check_group(group)
        self.reducer.replace_group(group)
        self._hook.take_state(self.reducer.hook_state)
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
        own = [(name, f"an argument, {value!r}") for name, value in self._agreed.items()]
        arguments = [*self._options.agreed(), *own]
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
        self.reducer.recover()
        self._replicas.verify()
        self._parameter_check.check()

    # -- copies ----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {n: value for n, value in self.__dict__.items() if n not in NOT_PICKLED}
        return {**state, "group": name_if_group(self.group), "buckets": self.reducer.buckets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buckets = state.pop("buckets")
        self.__dict__.update(state)
        self.group, self._reword = group_from(self.group), None
        self.make_reducer()
        names = [sorted(chain(*each)) for each in (buckets, self.reducer.buckets)]
        if self._hook.hook is not None and names[0] == names[1]:
            self.reducer.set_layout(buckets)  # the hook's state may be kept by bucket


ACTIONS = (
    "expect a backward that is reduced",
    "synchronize buffers",
    "call a buffer hook after the forward",
)


@dataclass(frozen=True)
class StepInfo:
    """The next forward and backward of ranks that still have input.

    Attributes:
        ranks: Number of these ranks; 0 on a rank that has joined.
        reduce: True if they reduce gradients.
        sync_buffers: True if they synchronize buffers before the forward.
        merge_buffers: True if they synchronize buffers after the forward.
    """

    ranks: int = 0
    reduce: bool = False
    sync_buffers: bool = False
    merge_buffers: bool = False


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
    """One `join()` of a wrapped module: its steps, and the hook of a rank that has joined.

    Args:
        reduced: Wrapped module.
        buffers: Its buffers.
        broadcast_buffers: True if ranks that have joined take the buffers of the others at the end.
        divide: `divide_by_initial_world_size` of `DistributedDataParallel.join`.

    Attributes:
        root: Rank whose parameters all ranks have taken at the end; -1 before.
    """

    def __init__(
        self, reduced: ReducedModule, buffers: Buffers, *, broadcast_buffers: bool, divide: bool
    ) -> None:
        self._reduced, self._buffers = reduced, buffers
        self._broadcast, self._divide_by_initial_world_size = broadcast_buffers, divide
        self.root = -1

    def next_step(self, own: StepInfo) -> StepInfo:
        """Exchange the next step of the ranks that still have input, among all ranks.

        Raises:
            MismatchError: Their next steps differ. Raised on every rank.
        """
        group = self._reduced.group
        sums = torch.tensor(astuple(own), dtype=torch.int64, device=message_device(group))
        _all_reduce(sums, group)
        ranks, *counts = sums.tolist()
        for count, what in zip(counts, ACTIONS, strict=True):
            if count not in (0, ranks):
                raise MismatchError(
                    f"in join(), {count} of the {ranks} ranks that still have input {what} in "
                    "their next forward, and the others do not: call forward in the same order, "
                    "and under the same no_grad() and no_sync(), on all of these ranks"
                )
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
            reducer.recover()
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
        self._reduced.reducer.end_uneven()
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


def skip_if_any(reducer: Reducer, flag: bool | Tensor) -> bool:
    """See `DistributedDataParallel.skip_if_any`."""
    if not isinstance(flag, bool) and not (isinstance(flag, Tensor) and flag.numel() == 1):
        raise ArgumentTypeError(f"flag is {flag!r}: pass a bool, or a tensor of one element")
    group = reducer.group
    domain = FaultDomain.of(group)
    domain.before_others()
    if reducer.shadowed:
        domain.fail(
            NotSupportedError(
                "skip_if_any() in join(), where a rank has run out of input: that rank waits for "
                "a backward. Call it outside of join()"
            )
        )
    flags = torch.tensor([bool(flag)], dtype=torch.int64, device=message_device(group))
    _all_reduce(flags, group, dist.ReduceOp.MAX, "skip_if_any()")
    if skipped := bool(flags):
        reducer.skip()
    return skipped
