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

    def make_init(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            observer.look(probe.add, self, user_line())
            original(self, *args, **kwargs)

        return init

    def make_iter(original: Any) -> Any:
        def iterate(self: Any) -> Any:
            iterator = original(self)
            observer.look(probe.begin, self, iterator)
            return iterator

        return iterate

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

    def make_index(original: Any) -> Any:
        def next_index(self: Any) -> Any:
            index = original(self)
            observer.look(probe.requested, self, index)
            return index

        return next_index

    observer.patch(DataLoader, "__init__", make_init)
    observer.patch(DataLoader, "__iter__", make_iter)
    observer.patch(base, "__next__", make_next)
    observer.patch(base, "_next_index", make_index)


class _DataProbe:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._numbers = itertools.count()
        self._loaders: WeakKeyDictionary[Any, _Loader] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, _Epoch] = WeakKeyDictionary()
        self._early: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def add(self, loader: Any, line: str) -> None:
        self._loaders[loader] = _Loader(next(self._numbers), line)

    def begin(self, loader: Any, iterator: Any) -> None:
        known = self._loaders.get(loader)
        if known is None:  # made before observing began
            known = self._loaders[loader] = _Loader(next(self._numbers), user_line())
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

    def requested(self, iterator: Any, index: Any) -> None:
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
            order=zlib.crc32(repr((index if whole else None, samples)).encode()),
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
