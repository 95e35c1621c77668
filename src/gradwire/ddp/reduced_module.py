"""Module with its reducer, which is created, recreated, configured, saved and copied here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._groups import check_group
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.arguments import ParameterCheck, check_module, sparse_names
from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.options import ReducerOptions
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.registered_hook import RegisteredHook
from gradwire.ddp.verify import Replicas, describe, verify_same
from gradwire.errors import ReductionError
from gradwire.hooks import group_from, name_if_group

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
