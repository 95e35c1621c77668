"""Random numbers that follow from a step and a shard, whichever process draws them."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def seed_of(seed: int, step: int, first: int, use: str = "") -> int:
    """A seed for torch, of 64 bits.

    Args:
        seed: The run's.
        step: The step's number.
        first: The first shard.
        use: What the numbers are for.
    """
    text = f"{seed} {step} {first} {use}".rstrip()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Draw whatever in the block; numbers after it are those that would have come without it."""
    numpy: Any = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class SeededDataset:
    """A map-style dataset whose random numbers follow from the batch, not from who fetches it.

    Its batches are lists of a seed and of indices. In all else it is the dataset: a
    `worker_init_fn` may open its files.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitems__(self, batch: Sequence[int]) -> Any:
        """The items, after what they draw from was seeded."""
        seed, *indices = batch
        # nothing is put back: `collate_fn`, which comes next, draws what follows
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        if callable(many := getattr(self._dataset, "__getitems__", None)):
            return many(indices)
        return [self._dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
