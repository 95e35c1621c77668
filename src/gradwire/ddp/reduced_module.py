"""Module with a reducer, which is created, recreated, configured, saved and copied here.

The `state_dict` is that of the module. The state of a communication hook is saved separately, by
parameter (see `hook_state`). A process group is pickled as its name, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire._groups import check_group
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.arguments import ParameterCheck, check_module, sparse_names
from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.buckets.assignment import BUCKET_BYTES, names_by_bucket
from gradwire.ddp.buckets.hook_state import Layout, has_state, load_state, rekey, save_state
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.options import ReducerOptions
from gradwire.ddp.precision import MixedPrecision, Precision
from gradwire.ddp.reducer.log import LoggingData
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.registered_hook import Change, RegisteredHook
from gradwire.ddp.verify import Replicas, describe, verify_same
from gradwire.hooks import CommHook, StatefulHook, group_from, name_if_group

NOT_PICKLED = ("reducer", "_parameter_check", "_precision", "_replicas")
"""Attributes recreated for the parameters of a copy."""
SMALLEST_PIECE_BYTES = 1 << 20
REPLICAS_CHECKED_EVERY = 100
LAYOUT_REMEDY = "Let bucket_layout return the same lists of names, in the same order, on every rank"


class ReducedModule(nn.Module):
    """Base class of DistributedDataParallel that has the reducer.

    A subclass calls `_make_reducer` once the parameters have their initial values.

    Args:
        module: Module to wrap.
        group: Process group.
        ignored: Names of parameters and buffers that are neither reduced nor synchronized.
        mixed_precision: Dtypes of forward and reduction; None for those of the parameters.
        options: Options of the reducer.
        before_reduce: Function that changes local gradients before they are reduced.
        after_reduce: Function that changes reduced gradients.
    """

    reducer: Reducer
    check_replicas: int | None

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        ignored: set[str],
        mixed_precision: MixedPrecision | None,
        options: ReducerOptions,
        before_reduce: Change | None = None,
        after_reduce: Change | None = None,
    ) -> None:
        super().__init__()
        self._comm_hook = RegisteredHook(before_reduce, after_reduce)
        self.module = module
        self._group = group
        self.parameters_to_ignore = ignored
        self.mixed_precision = mixed_precision
        self._reducer_options = options

    def _make_reducer(self, before: Layout = ()) -> None:
        """Create a reducer for the current parameters, with the registered hook.

        The hook's state is converted from the layout of the previous buckets.
        """
        self._precision: Precision | None = None
        if self.mixed_precision is not None:
            ignored = self.parameters_to_ignore
            self._precision = Precision(self.module, self.mixed_precision, ignored)
        named = check_module(self.module, self.parameters_to_ignore)
        reduced = [(n, p) for n, p in named if p.requires_grad]
        if (layout := self._reducer_options.bucket_layout) is not None:
            buckets = enumerate(names_by_bucket(layout, reduced))
            own = [(f"bucket {i}", ", ".join(names)) for i, names in buckets]
            verify_same(self._group, own, "bucket layouts", LAYOUT_REMEDY)
        self._parameter_check = ParameterCheck(self.module, named, self.parameters_to_ignore)
        options = replace(self._reducer_options, sparse=sparse_names(self.module))
        self.reducer = Reducer(reduced, self._group, options)
        self._replicas = Replicas(named, self.reducer)
        self._apply_hook()
        if before:
            rekey(self.reducer.hook_state, before, self.reducer.layout)

    def _apply_hook(self) -> None:
        hook = self._comm_hook.combined(self._precision)
        if hook is not None or self.reducer.has_hook:
            self.reducer.register_comm_hook(self._comm_hook.state, hook)
        self._set_replica_interval()

    def _set_replica_interval(self) -> None:
        every = self.check_replicas
        if every is None:
            averages = self._comm_hook.averages(self.reducer.hook_state, self._group)
            every = REPLICAS_CHECKED_EVERY if averages else 0
        self._replicas.every = every

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
        self._comm_hook.register(state, hook)
        self._apply_hook()

    def comm_hook_state_dict(self) -> dict[str, Any]:
        """Return the part of the communication hook's state to save; empty if there is none.

        It differs between ranks if the state does. `state_dict` does not include it.

        Example:
            >>> import torch
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(4, 4))
            ...     net.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)
            ...     net(torch.ones(1, 4)).sum().backward()
            ...     return net.comm_hook_state_dict()["plain"]["iter"], list(net.state_dict())
            >>> run_ranks(main, world_size=1)
            [(1, ['module.weight', 'module.bias'])]
        """
        return save_state(self.reducer.hook_state, self.reducer.layout)

    def load_comm_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `comm_hook_state_dict` into the registered hook's state.

        If part of the state is kept by bucket, buckets become those at the time of saving.

        Raises:
            ArgumentError: No hook with a state is registered.
        """
        if not saved:
            return
        if "layout" in saved and has_state(self.reducer.hook_state):
            self.reducer.set_layout(saved["layout"])
        load_state(self.reducer.hook_state, saved, self.reducer.layout)

    # -- end of a backward -----------------------------------------------------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if each reduced backward waits for a call of `finalize_backward`.

        Other communication, or other work of the same backward, then overlaps with the reduction.
        Set it before a forward, the same on every rank.

        Raises:
            ReductionError: It was set while a backward was not finished.
        """
        return self.reducer.manual_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.manual_finalization = required
        # for reducers created later
        self._reducer_options = replace(self._reducer_options, manual_finalization=required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if the next backward must return before `finalize_backward` is called.

        This holds for the first backward, from which buckets are assigned. In later ones a hook of
        backward may call it once all parameters have their gradients.
        """
        return self.reducer.must_return_first

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

    # -- changes of group and parameters, copies -------------------------------------------

    @property
    def process_group(self) -> ProcessGroup:
        """Process group. Setting another one, on each of its ranks, reduces over that group."""
        return self._group

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        self._group = check_group(group)
        self.reducer.replace_group(group)
        self._comm_hook.take_state(self.reducer.hook_state)
        self._set_replica_interval()

    @runs_outside_contexts
    def refit(self) -> None:
        """Include parameters that were added, replaced, frozen or thawed. Every rank calls this.

        New parameters start with rank 0's values. Add them to the optimizer, too.

        Raises:
            MismatchError: The ranks' models differ. Raised on every rank with the parameter's name.
        """
        named = check_module(self.module, self.parameters_to_ignore)
        self._take_values_of_rank_0(named, {})
        self._make_reducer(self.reducer.layout)

    def _agreed_arguments(self) -> list[tuple[str, str]]:
        """Return the arguments that must be equal on all ranks, in the format of `verify_same`."""
        return self._reducer_options.agreed()

    def _take_values_of_rank_0(
        self, named: Sequence[tuple[str, Tensor]], buffers: Mapping[str, Tensor]
    ) -> None:
        """Verify that the ranks' models match, and take rank 0's values."""
        FaultDomain.of(self._group).before_others()
        both = describe(named, "parameter") + describe(buffers.items(), "buffer")
        verify_same(self._group, self._agreed_arguments() + self._comm_hook.agreed() + both)
        broadcast_values(self._group, [*named, *buffers.items()])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in NOT_PICKLED:
            del state[name]
        state["_group"] = name_if_group(self._group)
        state["_layout"] = self.reducer.layout
        state["_comm_hook"] = copy(self._comm_hook)
        return state

    @runs_outside_contexts
    def __setstate__(self, state: dict[str, Any]) -> None:
        before = state.pop("_layout")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group = group_from(self._group)
        self._make_reducer(before)

    # -- information -----------------------------------------------------------------------

    def logging_data(self) -> LoggingData:
        """Return buckets, unused parameters and times of the last step that reduced gradients."""
        return self.reducer.logging_data()

    # used by programs that expect PyTorch's class, also without gradwire.compat

    @property
    def bucket_bytes_cap(self) -> int:
        """Size of a bucket in bytes, at least 1 MiB: torch.compile splits graphs at this size.

        torch.compile accepts no smaller size.
        """
        caps = self._reducer_options.caps
        return max(BUCKET_BYTES if caps is None else caps[-1], SMALLEST_PIECE_BYTES)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.rebuilt
