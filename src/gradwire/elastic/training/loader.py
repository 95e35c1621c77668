"""Batches of a map-style dataset by step and shard, prefetched in worker processes.

The index of each batch that a DataLoader fetches next is read from the run at that moment. When
shards are redistributed, batches under way are kept until their step is past, because this member
may be given that shard again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar
from weakref import ref

from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradwire.elastic.training.run import Run
from gradwire.elastic.training.samples import Shard
from gradwire.elastic.training.seeding import SeededDataset, apart
from gradwire.elastic.training.step import Step
from gradwire.errors import ArgumentError, ArgumentTypeError

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
        self._loader = DataLoader(seeded, batch_sampler=_Feed(self), **options)
        self._batches: Iterator[Any] | None = None  # workers start with the first batch

    def __getitem__(self, which: tuple[Step, Shard]) -> Any:
        """Return the batch of a shard of a step."""
        step, shard = which
        key = (step.number, shard.first, shard.stop)
        self._kept = {p: batch for p, batch in self._kept.items() if p[0] >= step.number}
        if key in self._kept:
            return self._kept[key]
        if key not in self._fetching:
            self._next = key
        with apart():  # a batch kept for a repeated step draws no random numbers
            return self._fetch(key)

    def _fetch(self, key: Key) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            # workers prefetch: the requested batch is among those under way
            try:
                batch = next(self._batches)
            except BaseException:  # from the dataset or from the wait
                self._batches = None
                self._fetching.clear()
                raise
            fetched = self._fetching.popleft()
            if fetched[0] >= key[0]:
                self._kept[fetched] = batch
            if fetched == key:
                return batch

    def feed(self) -> list[int]:
        """Return the seed and the sample indices of the next batch to fetch."""
        key = self._next
        self._fetching.append(key)
        self._next = self._after(key)
        step, first, stop = key
        samples = self._steps.samples
        if samples is None:
            raise ArgumentError("run.steps got no samples=: pass the dataset's size, and batch=")
        seed = self._steps.seed_of(step, first, "data")
        return [seed, *samples.ids(step, Shard(first, stop))]

    def _after(self, key: Key) -> Key:
        """Return what this member needs next, with the current shards."""
        step, _, stop = key
        shards = self._steps.dealt
        later = [s for s in shards if s.first >= stop]
        if later:
            return (step, later[0].first, later[0].stop)
        return (step + 1, shards[0].first, shards[0].stop) if shards else key


class _Feed:
    """Infinite batch sampler.

    It holds a weak reference to the loader: in a cycle, garbage collection would end the workers in
    the middle of a step, which takes up to 10 s.
    """

    def __init__(self, loader: ShardLoader[Any]) -> None:
        self._loader = ref(loader)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self._next()

    def _next(self) -> list[int]:
        loader = self._loader()
        assert loader is not None  # the caller holds it
        return loader.feed()
