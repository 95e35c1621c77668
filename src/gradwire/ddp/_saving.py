"""Saving, loading and copying a wrapped module: all but the reducer, which is made anew.

A hook's state is part of the `state_dict`, by parameter (see `_hook_state`). A process group is
pickled as its name, by which every rank knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from gradwire.ddp._hook_state import Layout, load_state, save_state
from gradwire.ddp.reducer import Reducer

__all__ = ["Saving"]

HOOK_STATE = "_comm_hook_state"
MADE_ANEW = ("reducer", "_watch", "_precision")


class Saving(nn.Module):
    """The part of DistributedDataParallel that saves and copies it."""

    reducer: Reducer
    _group: ProcessGroup
    _hook_state: Any

    def _make_reducer(self, before: Layout = ()) -> None:
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if saved := save_state(self._hook_state, self.reducer.layout):
            destination[prefix + HOOK_STATE] = saved

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(prefix + HOOK_STATE)
        own = {k: v for k, v in state_dict.items() if k != prefix + HOOK_STATE}
        super()._load_from_state_dict(own, prefix, *args, **kwargs)
        if saved is not None:
            if "layout" in saved:
                self.reducer.set_layout(saved["layout"])
            load_state(self._hook_state, saved, self.reducer.layout)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in MADE_ANEW:
            del state[name]
        state["_group"] = self._group.group_name
        state["_layout"] = self.reducer.layout
        if isinstance(self._hook_state, ProcessGroup):
            state["_hook_state"] = _GroupName(self._hook_state.group_name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = state.pop("_layout")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group = _group_named(state["_group"])
        if isinstance(self._hook_state, _GroupName):
            named = self._hook_state
            self._hook_state = _group_named(named)
        self._make_reducer(before)


class _GroupName(str):
    """Stands for a process group in a pickle."""


def _group_named(name: str) -> ProcessGroup:
    group: ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group
