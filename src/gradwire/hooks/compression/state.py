"""State of a compressing hook: tensors by parameter, step count, traffic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.compression.wire import Traffic
from gradwire.hooks.stateful import PicklesGroups


class CompressorState(PicklesGroups):
    """State of a compressing hook of one module, on this rank. It differs between ranks.

    Args:
        kind: Class name of the hook.
        group: Process group; None for the group of the module.

    Attributes:
        process_group: Process group.
        step: Number of reduced backward passes.
        memories: Tensors by parameter, by use. Every hook has "errors".
        bases: Tensors by parameter whose sizes differ from the parameter's.
        traffic: Counters of collectives.
    """

    depends_on_buckets = True
    """True: the bits of later steps depend on which parameters share a bucket. Loading the state
    therefore restores the buckets of the saved run, so that a resumed run repeats an uninterrupted
    one."""

    def __init__(self, kind: str, group: ProcessGroup | None) -> None:
        self.kind, self.process_group = kind, group
        self.step = 0
        self.memories: dict[str, ParameterMemory] = {"errors": ParameterMemory()}
        self.bases: dict[str, Tensor] = {}
        self.traffic = Traffic()

    def empty(self) -> CompressorState:
        """Return a new, empty state of the same hook."""
        made = CompressorState(self.kind, self.process_group)
        made.memories = {use: ParameterMemory() for use in self.memories}
        return made

    @property
    def errors(self) -> ParameterMemory:
        """Errors: the parts of gradients that were not sent."""
        return self.memories["errors"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, on each rank its own."""
        return {
            "kind": self.kind,
            "step": self.step,
            "memories": {use: memory.state_dict() for use, memory in self.memories.items()},
            "bases": {name: tensor.clone() for name, tensor in self.bases.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ArgumentError: The state is of another hook.
        """
        kind = saved.get("kind")
        if kind != self.kind or saved["memories"].keys() != self.memories.keys():
            raise ArgumentError(
                f"the saved state is of {kind}, the hook is {self.kind}: register the hook that "
                "was saved, with the same options"
            )
        self.step = saved["step"]
        for use, memory in self.memories.items():
            memory.load_state_dict(saved["memories"][use])
        self.bases = {name: tensor.clone() for name, tensor in saved["bases"].items()}


class ParameterMemory:
    """Tensors by parameter, kept flat in the order of the buckets that use them.

    Buckets are assigned again after the first backward pass, and when the model changes. The
    tensors are kept by the parameters' names, so that they follow their parameters to other
    buckets.

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
        """Return the kept tensor of a bucket's parameters, like its buffer except for the dtype.

        It is not a copy. It is zero for parameters that have no kept values, or had another size.
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
        """Return the kept tensor plus the bucket's buffer, in memory that may go to `put`."""
        kept = self.flat(bucket, dtype)
        # the page faults of new memory take as long as three sums
        spare = self._spares.pop(tuple(bucket.names()), None)
        if spare is None or not _is_like(spare, bucket.buffer(), dtype):
            spare = torch.empty_like(kept)
        return torch.add(kept, bucket.buffer(), out=spare)

    def put(self, bucket: GradBucket, flat: Tensor) -> None:
        """Keep a tensor for a bucket's parameters, without a copy: ownership is transferred."""
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
        """Add the kept tensors of a bucket's parameters to its buffer, and forget them."""
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
        """Return copies by parameter, 1-d."""
        return {name: part.clone() for name, part in self._parts.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Replace all kept tensors by those that `state_dict` returned."""
        self._flats.clear()
        self._spares.clear()
        self._parts = {name: part.clone().view(-1) for name, part in saved.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spares": {}}

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tensors. The same amount is reserved for the next step's."""
        return sum(part.nbytes for part in self._parts.values())


def _is_like(kept: Tensor, buffer: Tensor, dtype: torch.dtype) -> bool:
    return (kept.numel(), kept.dtype, kept.device) == (buffer.numel(), dtype, buffer.device)
