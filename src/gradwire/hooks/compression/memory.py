"""What a hook keeps for each parameter, flat in the order of whichever bucket asks for it.

Buckets are assigned again after the first backward, and may be on every change of the model. Kept
by the parameters' names, an error follows its parameter from bucket to bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.bucket import GradBucket

__all__ = ["ParameterMemory"]


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
