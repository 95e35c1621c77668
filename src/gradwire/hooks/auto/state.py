"""What an `Auto` has found out, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

from gradwire.cost_model import Choice
from gradwire.errors import ArgumentError
from gradwire.hooks.compression import Compressor
from gradwire.hooks.group_name import group_from, name_if_group
from gradwire.hooks.stateful import StatefulHook

__all__ = ["AutoState"]


class AutoState:
    """What an `Auto` has found out.

    Attributes:
        process_group: The group; None: the default one.
        step: How many backwards have been reduced.
        choices: The hook of each bucket, by the names of its parameters; empty until measured.
        choice: The prediction behind it, with the names in the order of buckets; None if it was
            not made in this process.
        settling: Whether the next step is the first by these choices: what other hooks, which were
            on trial, have kept goes with its gradients.
        hooks: Those that may be chosen, by name.
    """

    depends_on_buckets = True

    def __init__(self, group: ProcessGroup | None, hooks: Mapping[str, StatefulHook[Any]]) -> None:
        self.process_group, self.hooks = group, dict(hooks)
        self.step = 0
        self.choices: dict[tuple[str, ...], str] = {}
        self.choice: Choice | None = None
        self.settling = False

    def state_dict(self) -> dict[str, Any]:
        """The choices, and what the hooks keep; while a choice is on trial, as if it were final."""
        kept = {n: h.state.state_dict() for n, h in self.hooks.items() if isinstance(h, Compressor)}
        choices = [[list(names), chosen] for names, chosen in self.choices.items()]
        return {"step": self.step, "choices": choices, "hooks": kept}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave: nothing is measured again.

        Raises:
            ArgumentError: Other hooks were allowed.
        """
        own = {n: h for n, h in self.hooks.items() if isinstance(h, Compressor)}
        if saved["hooks"].keys() != own.keys():
            raise ArgumentError(
                f"the saved state is of auto with {sorted(saved['hooks'])}, this one has "
                f"{sorted(own)}: allow the same hooks"
            )
        self.step = saved["step"]
        self.choices = {tuple(names): chosen for names, chosen in saved["choices"]}
        self.settling = bool(self.choices)  # it may have been saved during a trial
        for name, hook in own.items():
            hook.state.load_state_dict(saved["hooks"][name])

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})
        self.settling = bool(self.choices)  # a copy goes on without the trial
