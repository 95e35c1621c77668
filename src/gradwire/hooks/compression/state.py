"""What a compressing hook keeps from step to step, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.compression.memory import ParameterMemory
from gradwire.hooks.compression.wire import Traffic
from gradwire.hooks.group_name import group_from, name_if_group

__all__ = ["CompressorState"]


class CompressorState:
    """The state of one module's compressing hook, on this rank: it differs between ranks.

    Args:
        kind: Which hook it belongs to.
        group: The group; None: that of the module, or the default one.

    Attributes:
        process_group: The group.
        step: How many backwards have been reduced.
        memories: What is kept by parameter, by its use: "errors", in every hook.
        bases: Tensors by parameter of other sizes than the parameter's.
        traffic: What was given to collectives.
    """

    depends_on_buckets = True
    """The bits of later steps depend on which parameters share a bucket: so that a resumed run
    goes on as if it had not been interrupted, its buckets become those of the run before."""

    def __init__(self, kind: str, group: ProcessGroup | None) -> None:
        self.kind, self.process_group = kind, group
        self.step = 0
        self.memories: dict[str, ParameterMemory] = {"errors": ParameterMemory()}
        self.bases: dict[str, Tensor] = {}
        self.traffic = Traffic()

    def empty(self) -> CompressorState:
        """A new state of the same hook, which keeps nothing yet."""
        made = CompressorState(self.kind, self.process_group)
        made.memories = {use: ParameterMemory() for use in self.memories}
        return made

    @property
    def errors(self) -> ParameterMemory:
        """What was not sent yet."""
        return self.memories["errors"]

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved, on each rank its own."""
        return {
            "kind": self.kind,
            "step": self.step,
            "memories": {use: memory.state_dict() for use, memory in self.memories.items()},
            "bases": {name: tensor.clone() for name, tensor in self.bases.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        Raises:
            ArgumentError: It is another hook's.
        """
        kind = saved.get("kind")
        if kind != self.kind or saved["memories"].keys() != self.memories.keys():
            raise ArgumentError(
                f"the saved state is of {kind}, the hook is {self.kind}: register the hook that it "
                "was saved with, with the same options"
            )
        self.step = saved["step"]
        for use, memory in self.memories.items():
            memory.load_state_dict(saved["memories"][use])
        self.bases = {name: tensor.clone() for name, tensor in saved["bases"].items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})
