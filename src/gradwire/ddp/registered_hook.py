"""Communication hook that a module's user has registered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError, ArgumentTypeError, NotSavedWarning
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
