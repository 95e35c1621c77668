"""Batches of a map-style dataset by step and shard, fetched ahead in worker processes.

A DataLoader is fed from here: what it fetches next is read from the run at that moment. When the
shards are dealt anew, what is under way is not lost: it is kept until its step is past, as this
member may be dealt that shard again.
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
Place = tuple[int, int, int]
"""A step, and the first and the last shard (exclusive) of what is fetched as one."""


class ShardLoader(Generic[T]):
    """Loads the batches of a run's shards.

    What a dataset and a `collate_fn` draw at random (of torch, `random` and NumPy's own) follows
    from the run's seed, the step and the shard, in whichever process it is drawn; what the loop
    draws is not touched.

    Args:
        run: The run; its `steps` are to be given `samples` and `batch`.
        dataset: A map-style dataset, the same on every member.
        options: As of torch.utils.data.DataLoader: `num_workers`, `collate_fn`, and so on.

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
        self._run = run
        self._next: Place = (0, 0, 0)
        self._fetching: deque[Place] = deque()
        self._kept: dict[Place, Any] = {}
        if isinstance(dataset, IterableDataset):
            raise ArgumentTypeError(
                f"dataset is {type(dataset).__name__}: pass a map-style one, whose samples can be "
                "dealt by their indices"
            )
        if not options.get("in_order", True):
            raise ArgumentError(
                "in_order is False: leave it out, as batches are told apart by their order"
            )
        if options.get("num_workers"):
            options.setdefault("persistent_workers", True)
        seeded: Any = SeededDataset(dataset)
        self._loader = DataLoader(seeded, batch_sampler=_Feed(self), **options)
        self._batches: Iterator[Any] | None = None  # workers are started for the first batch

    def __getitem__(self, which: tuple[Step, Shard]) -> Any:
        """The batch of a shard of a step."""
        step, shard = which
        place = (step.number, shard.first, shard.stop)
        self._kept = {p: batch for p, batch in self._kept.items() if p[0] >= step.number}
        if place in self._kept:
            return self._kept[place]
        if place not in self._fetching:
            self._next = place
        with apart():  # a batch that was kept for a repetition draws nothing
            return self._fetch(place)

    def _fetch(self, place: Place) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            # the feed is read as far ahead as the workers go: this one's place is among them
            try:
                batch = next(self._batches)
            except BaseException:  # whether it was a batch that failed, or the wait for it
                self._batches = None
                self._fetching.clear()
                raise
            fetched = self._fetching.popleft()
            if fetched[0] >= place[0]:
                self._kept[fetched] = batch
            if fetched == place:
                return batch

    def feed(self) -> list[int]:
        """The seed and the samples of what is fetched next."""
        place = self._next
        self._fetching.append(place)
        self._next = self._after(place)
        step, first, stop = place
        samples = self._run.samples
        seed = self._run.seed_of(step, first, "data")
        return [seed, *samples.ids(step, Shard(first, stop))]

    def _after(self, place: Place) -> Place:
        """What this member needs after something, as shards are dealt now."""
        step, _, stop = place
        shards = self._run.shards()
        later = [s for s in shards if s.first >= stop]
        if later:
            return (step, later[0].first, later[0].stop)
        return (step + 1, shards[0].first, shards[0].stop) if shards else place


class _Feed:
    """A batch sampler without an end.

    It does not keep the loader: garbage collection would end the workers, in the middle of a step
    and after 10 s.
    """

    def __init__(self, loader: ShardLoader[Any]) -> None:
        self._loader = ref(loader)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self._next()

    def _next(self) -> list[int]:
        loader = self._loader()
        assert loader is not None  # who asks for batches has it
        return loader.feed()
