"""Saving, loading and copying a wrapped module: all but the reducer, which is made anew.

The `state_dict` is the module's. A hook's state is saved apart from it, by parameter (see
`_hook_state`). A process group is pickled as its name, by which every rank knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from gradwire.ddp.buckets.hook_state import Layout, has_state, load_state, save_state
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.hooks.group_name import group_from, name_if_group

__all__ = ["Saving"]

MADE_ANEW = ("reducer", "_watch", "_precision")


class Saving(nn.Module):
    """The part of DistributedDataParallel that saves and copies it."""

    reducer: Reducer
    _group: ProcessGroup
    _hook_state: Any

    def _make_reducer(self, before: Layout = ()) -> None:
        raise NotImplementedError

    def comm_hook_state_dict(self) -> dict[str, Any]:
        """What has to be saved of the communication hook's state; empty if there is nothing.

        It differs between ranks where the state does. `state_dict` holds nothing of it.

        Example:
            >>> from gradwire.ddp import DistributedDataParallel
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
        """Put what `comm_hook_state_dict` gave into the state of the hook that is registered.

        Buckets become those it was saved with, if something in it is kept by bucket.

        Raises:
            ArgumentError: No hook with a state is registered.
        """
        if not saved:
            return
        if "layout" in saved and has_state(self.reducer.hook_state):
            self.reducer.set_layout(saved["layout"])
        load_state(self.reducer.hook_state, saved, self.reducer.layout)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in MADE_ANEW:
            del state[name]
        state["_group"] = name_if_group(self._group)
        state["_layout"] = self.reducer.layout
        state["_hook_state"] = name_if_group(self._hook_state)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = state.pop("_layout")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group = group_from(self._group)
        self._hook_state = group_from(self._hook_state)
        self._make_reducer(before)
