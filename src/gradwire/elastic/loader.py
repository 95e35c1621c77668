"""Loader of a member's shards, with random numbers that depend on step and shard alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradwire.elastic.shards import Shard, seed_of
from gradwire.elastic.steps import Run, Step
from gradwire.errors import ArgumentError, ArgumentTypeError


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
    """Map-style dataset whose random numbers depend on the batch, not on the fetching process."""

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

    # other accesses go to the dataset, so that a `worker_init_fn` can open its files
    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)


T = TypeVar("T")
Key = tuple[int, int, int]
"""Step, first shard and last shard (exclusive) of a batch."""


class ShardLoader(Generic[T]):
    """Loads the batches of a run's shards.

    Random numbers that the dataset and `collate_fn` draw (of torch, `random` and NumPy's global
    generator) depend only on the run's seed, the step and the shard. The random state of the loop
    is not changed.

    Args:
        run: Run whose `steps` gets `samples` and `batch`.
        dataset: Map-style dataset, the same on every member.
        options: Options of torch.utils.data.DataLoader: `num_workers`, `collate_fn`, and so on.

    Raises:
        ArgumentTypeError: The dataset is an iterable one.
        ArgumentError: `in_order` is False.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from gradwire import elastic
        >>> net = torch.nn.Linear(1, 1)
        >>> run = elastic.join(dist.HashStore(), shards=2)
        >>> run.keep(model=net)
        >>> loader = ShardLoader(run, torch.arange(8.0).view(8, 1))
        >>> for step in run.steps(1, samples=8, batch=4, shuffle=False):
        ...     with step:
        ...         for shard in step.shards:
        ...             x = loader[step, shard]
        ...             print(x.tolist())
        ...             step.backward(net(x).mean())
        ...         step.commit()
        [[0.0], [1.0]]
        [[2.0], [3.0]]
    """

    def __init__(self, run: Run, dataset: Dataset[T], **options: Any) -> None:
        self._steps = run._steps
        self._next: Key = (0, 0, 0)
        self._fetching: deque[Key] = deque()
        self._kept: dict[Key, Any] = {}
        if isinstance(dataset, IterableDataset):
            raise ArgumentTypeError(
                f"dataset is {type(dataset).__name__}: pass a map-style dataset, whose samples "
                "have indices"
            )
        if not options.get("in_order", True):
            raise ArgumentError(
                "in_order is False: leave it out, because batches are identified by their order"
            )
        if options.get("num_workers"):
            options.setdefault("persistent_workers", True)
        seeded: Any = SeededDataset(dataset)
        self._loader = DataLoader(seeded, batch_sampler=_feed(ref(self)), **options)
        self._batches: Iterator[Any] | None = None  # workers start with the first batch

    def __getitem__(self, which: tuple[Step, Shard]) -> Any:
        """Return the batch of a shard of a step."""
        step, shard = which
        key = (step.number, shard.first, shard.stop)
        self._kept = {p: batch for p, batch in self._kept.items() if p[0] >= step.number}
        if key not in self._kept and key not in self._fetching:
            self._next = key
        # fetching draws random numbers, which a batch that was kept for a repeated step does not
        with apart():
            while key not in self._kept:
                # workers prefetch: the requested batch is among those under way
                try:
                    if self._batches is None:
                        self._batches = iter(self._loader)
                    batch = next(self._batches)
                except BaseException:  # from the dataset or from the wait
                    self._batches = None
                    self._fetching.clear()
                    raise
                fetched = self._fetching.popleft()
                if fetched[0] >= step.number:
                    self._kept[fetched] = batch
        return self._kept[key]

    def feed(self) -> list[int]:
        """Return the seed and the sample indices of the next batch to fetch."""
        key = step, first, stop = self._next
        self._fetching.append(key)
        shards = self._steps.dealt
        if later := [shard for shard in shards if shard.first >= stop]:
            self._next = (step, later[0].first, later[0].stop)
        elif shards:
            self._next = (step + 1, shards[0].first, shards[0].stop)
        seed = seed_of(self._steps.settings.seed, step, first, "data")
        return [seed, *self._steps.sample_ids(step, Shard(first, stop))]


def _feed(loader: ref[ShardLoader[Any]]) -> Iterator[list[int]]:
    """Yield the seed and the sample indices of each batch."""
    # a weak reference: in a cycle, garbage collection would end the workers in the middle of a
    # step, which takes up to 10 s
    while (found := loader()) is not None:
        batch = found.feed()
        del found
        yield batch
