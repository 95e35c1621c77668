"""Random numbers that depend on the step and the shard, not on the process."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def seed_of(seed: int, step: int, first: int, use: str = "") -> int:
    """Return a seed for torch, of 64 bits.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        first: First shard.
        use: Purpose of the random numbers.
    """
    text = f"{seed} {step} {first} {use}".rstrip()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Save the random states on entry, and restore them on exit."""
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
    """Map-style dataset whose random numbers depend on the batch, not on the fetching process.

    A batch is a list of a seed and indices. Every other access goes to the dataset, so that a
    `worker_init_fn` can open its files.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitems__(self, batch: Sequence[int]) -> Any:
        """Seed the generators, and return the items."""
        seed, *indices = batch
        # the states are not restored: `collate_fn` runs next and draws from them
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
        if name == "_dataset":  # while it is unpickled
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
