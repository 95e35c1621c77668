"""What a compressing hook keeps from step to step, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.compression.wire import Traffic
from gradwire.hooks.stateful import group_from, name_if_group


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


class ParameterMemory:
    """Flat tensors by bucket, whose parts belong to parameters.

    Example:
        >>> from gradwire.testing import FakeBucket
        >>> memory = ParameterMemory()
        >>> both = FakeBucket(torch.zeros(2), torch.zeros(1), names=["weight", "bias"])
        >>> memory.put(both, torch.tensor([1.0, 2.0, 3.0]))
        >>> memory.flat(FakeBucket(torch.zeros(1), names=["bias"]), torch.float32)
        tensor([3.])
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._spares: dict[tuple[str, ...], Tensor] = {}

    def flat(self, bucket: GradBucket, dtype: torch.dtype) -> Tensor:
        """What is kept for a bucket's parameters, like its buffer but for the dtype.

        It is what is kept, not a copy; zeros where nothing is, or for another size of parameter.
        """
        buffer, names = bucket.buffer(), tuple(bucket.names())
        kept = self._flats.get(names)
        if kept is not None and _is_like(kept, buffer, dtype):
            return kept
        made = buffer.new_zeros(buffer.numel(), dtype=dtype)
        at = 0
        for name, parameter in zip(names, bucket.parameters(), strict=True):
            part, count = self._parts.get(name), parameter.numel()
            if part is not None and part.numel() == count:
                made[at : at + count] = part
            at += count
        self.put(bucket, made)
        return made

    def plus(self, bucket: GradBucket, dtype: torch.dtype) -> Tensor:
        """The sum of what is kept and of the bucket's buffer, in memory that may be `put`."""
        kept = self.flat(bucket, dtype)
        # new memory costs its pages: as much as three sums
        spare = self._spares.pop(tuple(bucket.names()), None)
        if spare is None or not _is_like(spare, bucket.buffer(), dtype):
            spare = torch.empty_like(kept)
        return torch.add(kept, bucket.buffer(), out=spare)

    def put(self, bucket: GradBucket, flat: Tensor) -> None:
        """Keep this for a bucket's parameters from now on: it is the memory's alone."""
        names = tuple(bucket.names())
        if names not in self._flats:
            stale = [key for key in self._flats if not set(names).isdisjoint(key)]
            for key in stale:
                del self._flats[key]
                self._spares.pop(key, None)
        elif self._flats[names] is not flat:
            self._spares[names] = self._flats[names]
        self._flats[names] = flat
        sizes = [p.numel() for p in bucket.parameters()]
        parts = flat[: sum(sizes)].split(sizes)
        self._parts.update(zip(names, parts, strict=True))

    def move(self, bucket: GradBucket) -> None:
        """Add what is kept for a bucket's parameters to its buffer, and keep nothing of them."""
        buffer, at = bucket.buffer(), 0
        for name, parameter in zip(bucket.names(), bucket.parameters(), strict=True):
            part, count = self._parts.pop(name, None), parameter.numel()
            if part is not None and part.numel() == count:
                buffer[at : at + count] += part
            at += count
        gone = set(bucket.names())
        self._flats = {key: flat for key, flat in self._flats.items() if gone.isdisjoint(key)}
        self._spares = {key: flat for key, flat in self._spares.items() if gone.isdisjoint(key)}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, by parameter, 1-d."""
        return {name: part.clone() for name, part in self._parts.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Keep what `state_dict` gave, and nothing else."""
        self._flats.clear()
        self._spares.clear()
        self._parts = {name: part.clone().view(-1) for name, part in saved.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spares": {}}

    @property
    def nbytes(self) -> int:
        """How much memory what is kept takes; as much again is held for the next step's."""
        return sum(part.nbytes for part in self._parts.values())


def _is_like(kept: Tensor, buffer: Tensor, dtype: torch.dtype) -> bool:
    return (kept.numel(), kept.dtype, kept.device) == (buffer.numel(), dtype, buffer.device)
