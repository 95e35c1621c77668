"""Observation of data loaders: which samples each rank draws, in which order and how many."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from gradwire.check.observer import Observer, random_state, sample_digests, user_line

_MOST_SAMPLES = 256
"""Number of samples of a batch whose digests are written."""


@dataclass
class _Loader:
    number: int
    line: str
    epochs: int = 0


@dataclass
class _Epoch:
    """One iteration of a loader.

    Attributes:
        indices: Indices of batches that were requested and have not been returned.
        batches: Number of batches that were returned.
        random: Digest of the random state before the current batch.
    """

    loader: _Loader
    number: int
    indices: deque[Any] = field(default_factory=deque)
    batches: int = 0
    random: int = 0


def observe_data(observer: Observer) -> None:
    """Write an event for each loader's iteration, for each batch, and for its end."""
    probe = _DataProbe(observer)
    base = loaders._BaseDataLoaderIter

    def make_next(original: Any) -> Any:
        def following(self: Any) -> Any:
            observer.look(probe.before, self)
            try:
                batch = original(self)
            except StopIteration:
                observer.look(probe.exhausted, self)
                raise
            observer.look(probe.drawn, self, batch)
            return batch

        return following

    observer.around(DataLoader, "__init__", before=probe.add)
    observer.around(DataLoader, "__iter__", after=probe.begin)
    observer.patch(base, "__next__", make_next)
    observer.around(base, "_next_index", after=probe.requested)


class _DataProbe:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._numbers = itertools.count()
        self._loaders: WeakKeyDictionary[Any, _Loader] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._early: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def add(self, loader: Any, *_: Any, **__: Any) -> _Loader:
        known = self._loaders[loader] = _Loader(next(self._numbers), user_line())
        return known

    def begin(self, iterator: Any, loader: Any) -> None:
        known = self._loaders.get(loader) or self.add(loader)  # made before observing began
        epoch = self._epochs[iterator] = _Epoch(known, known.epochs)
        epoch.indices.extend(self._early.pop(iterator, ()))
        known.epochs += 1
        sampler = _innermost_sampler(loader)
        self._observer.emit(
            "epoch",
            loader=known.number,
            made=known.line,
            epoch=epoch.number,
            sampler=type(sampler).__name__,
            shuffle=bool(getattr(sampler, "shuffle", False)),
            sets_epoch=hasattr(sampler, "set_epoch"),
            seed=getattr(sampler, "seed", None) if hasattr(sampler, "num_replicas") else None,
            sampler_epoch=getattr(sampler, "epoch", None),
            replacement=bool(getattr(sampler, "replacement", False)),
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
        )

    def requested(self, index: Any, iterator: Any) -> None:
        if iterator in self._epochs:
            self._epochs[iterator].indices.append(index)
        else:  # prefetched by workers before the loader has returned the iterator
            self._early.setdefault(iterator, []).append(index)

    def before(self, iterator: Any) -> None:
        if iterator in self._epochs:
            self._epochs[iterator].random = random_state()

    def drawn(self, iterator: Any, batch: Any) -> None:
        epoch = self._epochs.get(iterator)
        if epoch is None:
            return
        index = epoch.indices.popleft() if epoch.indices else None
        if not isinstance(index, (list, tuple)):
            index = [index]
        whole = all(isinstance(i, int) for i in index)
        samples = sample_digests(batch)
        after = random_state()
        self._observer.emit(
            "batch",
            loader=epoch.loader.number,
            epoch=epoch.number,
            number=epoch.batches,
            index=[int(i) for i in index[:_MOST_SAMPLES]] if whole else None,
            samples=samples[:_MOST_SAMPLES],
            order=zlib.crc32(repr(index if whole else samples).encode()),
            # the first batch also draws the sampler's seed
            random=epoch.random if epoch.batches and after != epoch.random else None,
        )
        epoch.batches += 1

    def exhausted(self, iterator: Any) -> None:
        epoch = self._epochs.get(iterator)
        if epoch is not None:
            self._observer.emit(
                "exhausted", loader=epoch.loader.number, epoch=epoch.number, batches=epoch.batches
            )


def _innermost_sampler(loader: Any) -> Any:
    """Return the sampler inside of a loader's batch samplers, of frameworks, too."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(8):
        inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        if inner is None:
            break
        sampler = inner
    return sampler
