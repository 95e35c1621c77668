"""Observation of data loaders: which samples each rank draws, in which order and how many."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import dataloader as loaders
from torch.utils.data._utils import fetch

from gradwire.check.observer import (
    Observer,
    digest_all,
    drawn,
    random_state,
    sample_digests,
    user_line,
)
from gradwire.check.records import Epoch, Event, Finding, Replicas, Run, check, seen

_WORKER_FETCHES = 8
"""Number of a worker's fetches that are written."""
_MOST_SAMPLES = 256
"""Number of samples of a batch whose digests are written."""


@dataclass
class _Iteration:
    """One iteration of a loader, or a loader and the number of its iterations so far."""

    loader: int = -1
    number: int = 0
    line: str = ""
    indices: deque[Any] = field(default_factory=deque)  # requested and not returned
    batches: int = 0
    random: list[int] = field(default_factory=list)  # state before the current batch


class DataProbe:
    """Observation of data loaders: an event for each iteration, for each batch, and for its end."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._fetched = 0  # by this worker of a loader
        self._loaders: WeakKeyDictionary[Any, _Iteration] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, _Iteration] = WeakKeyDictionary()
        self._made = 0
        observer.around(DataLoader, "__init__", before=self.add)
        observer.around(DataLoader, "__iter__", after=self.begin)
        observer.patch(loaders._BaseDataLoaderIter, "__next__", self._make_next)
        observer.around(loaders._BaseDataLoaderIter, "_next_index", after=self.requested)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            observer.patch(fetcher, "fetch", self._make_fetch)

    def _make_next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            self._observer.look(self.before, iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                self._observer.look(self.exhausted, iterator)
                raise
            self._observer.look(self.drawn, iterator, batch)
            return batch

        return following

    def _make_fetch(self, original: Any) -> Any:
        def fetching(*args: Any) -> Any:
            in_worker = get_worker_info() is not None and self._fetched < _WORKER_FETCHES
            before = self._observer.look(random_state) if in_worker else None
            batch = original(*args)
            if before is not None:
                self._observer.look(self.fetched, before, batch)
            return batch

        return fetching

    def fetched(self, before: list[int], batch: Any) -> None:
        self._fetched += 1
        if states := drawn(before, random_state()):
            self._observer.emit(
                "drew", where="worker", key=[self._fetched], random=states, data=digest_all(batch)
            )

    def add(self, loader: Any, *_: Any, **__: Any) -> _Iteration:
        known = self._loaders[loader] = _Iteration(self._made, line=user_line())
        self._made += 1
        return known

    def begin(self, iterator: Any, loader: Any) -> None:
        known = self._loaders.get(loader) or self.add(loader)  # made before observing began
        # workers have prefetched before the loader has returned the iterator
        epoch = self._epochs.setdefault(iterator, _Iteration())
        epoch.loader, epoch.number = known.loader, known.number
        known.number += 1
        sampler = _innermost_sampler(loader)
        self._observer.emit(
            "epoch",
            loader=known.loader,
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
        self._epochs.setdefault(iterator, _Iteration()).indices.append(index)

    def before(self, iterator: Any) -> None:
        self._epochs[iterator].random = random_state()

    def drawn(self, iterator: Any, batch: Any) -> None:
        epoch = self._epochs[iterator]
        index = epoch.indices.popleft() if epoch.indices else None
        if not isinstance(index, (list, tuple)):
            index = [index]
        whole = all(isinstance(i, int) for i in index)
        samples = sample_digests(batch)
        after = self._observer.random = random_state()
        states = drawn(epoch.random, after)
        if states and epoch.batches:  # the first one also draws the sampler's seed
            key = [epoch.loader, epoch.number, epoch.batches]
            self._observer.emit("drew", where="loader", key=key, random=states, data=samples)
        self._observer.emit(
            "batch",
            loader=epoch.loader,
            epoch=epoch.number,
            index=[int(i) for i in index[:_MOST_SAMPLES]] if whole else None,
            samples=samples[:_MOST_SAMPLES],
            order=zlib.crc32(repr(index if whole else samples).encode()),
        )
        epoch.batches += 1

    def exhausted(self, iterator: Any) -> None:
        epoch = self._epochs[iterator]
        place: dict[str, Any] = {"loader": epoch.loader, "epoch": epoch.number}
        self._observer.emit("exhausted", batches=epoch.batches, **place)


def _innermost_sampler(loader: Any) -> Any:
    """Return the sampler inside of a loader's batch samplers, of frameworks, too."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(8):
        inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        if inner is None:
            break
        sampler = inner
    return sampler


_FEWEST = 3
"""Number of batches or forwards that must agree before a coincidence is ruled out."""
_FEWEST_SAMPLES = 8


def _loader_line(run: Run, rank: int) -> str:
    """Return the line of the only loader that trains without a distributed sampler, else ""."""
    lines = {
        epoch.begin["made"]
        for epoch in run.epochs(rank).values()
        if epoch.trained and epoch.begin["seed"] is None
    }
    return lines.pop() if len(lines) == 1 else ""


@check(explains=("shared-samples",))
def _same_batches(run: Run, model: Replicas) -> Iterator[Finding]:
    """Ranks train on the same batches.

    The inputs of every training forward are equal on two ranks, and change with steps.

    Give each rank its own share: DataLoader(..., sampler=DistributedSampler(dataset)), or a
    seed with the rank in it where batches are drawn at random.
    """
    inputs = {r: [e["inputs"] for e in run.forwards(model, r)] for r in model.ranks}
    for a, b in combinations(model.ranks, 2):
        both = list(zip(inputs[a], inputs[b], strict=False))
        same = all(x == y and x for x, y in both)
        if len(both) >= _FEWEST and same and len(set(inputs[a])) > 1:
            at = run.forwards(model, b)[0]
            text = f"ranks {a} and {b} have equal inputs in all {len(both)} training steps"
            yield seen(text, at, (a, b), _loader_line(run, b))
            break


@check(of_models=False)
def _same_order(run: Run) -> Iterator[Finding]:
    """Every epoch has the same order: set_epoch is not called.

    A sampler that shuffles gave the same samples in the same order in two epochs.

    Call sampler.set_epoch(epoch) at the beginning of each epoch.
    """
    found: dict[str, tuple[Event, list[int]]] = {}
    for rank in run.ranks:
        epochs = run.epochs(rank)
        for (loader, number), epoch in epochs.items():
            after = epochs.get((loader, number + 1))
            if after is not None and _is_same_order(epoch, after):
                _, ranks = found.setdefault(epoch.begin["made"], (after.begin, []))
                if rank not in ranks:
                    ranks.append(rank)
    for line, (at, ranks) in found.items():
        text = f"epochs {at['epoch'] - 1} and {at['epoch']} of {at['sampler']} have equal orders"
        yield seen(text, at, ranks, line)


def _is_same_order(one: Epoch, other: Epoch) -> bool:
    if not (one.trained and other.trained and one.begin["shuffle"] and one.begin["sets_epoch"]):
        return False
    both = list(zip(one.batches, other.batches, strict=False))
    samples = sum(len(batch["samples"]) for batch, _ in both)
    contents = {sample for batch, _ in both for sample in batch["samples"]}
    return (
        samples >= _FEWEST_SAMPLES
        and len(contents) > 1
        and all(a["order"] == b["order"] for a, b in both)
    )


@check()
def _uneven_batches(run: Run, model: Replicas) -> Iterator[Finding]:
    """Ranks have different numbers of batches.

    A rank's loader ended and it trained no more, while another rank went on to train with the
    same loader, without join().

    Give all ranks the same number of batches (DistributedSampler, drop_last=True), or train in
    `with model.join():`.
    """
    for a, b in () if run.any("join") else permutations(model.ranks, 2):
        fewer, more = len(run.forwards(model, a)), len(run.forwards(model, b))
        if not 0 < fewer < more or "limit" in (run.ended(a), run.ended(b)):
            continue
        kinds = [e["kind"] for e in run.events[a] if e["kind"] != "forward" or e["gradients"]]
        after = kinds[::-1].index("exhausted") if "exhausted" in kinds else len(kinds)
        # a framework that draws a batch ahead has one forward after the end of its loader
        if after == len(kinds) or kinds[len(kinds) - after :].count("forward") > 1:
            continue
        others = run.epochs(b)
        for key, epoch in run.epochs(a).items():
            other = others.get(key)
            if other is None or epoch.exhausted is None or not epoch.trained:
                continue
            same = other.begin["made"] == epoch.begin["made"]
            if same and len(other.batches) > epoch.exhausted:
                least = "" if other.exhausted else "at least "
                text = f"rank {a} has {epoch.exhausted} batches in epoch {key[1]}, rank {b} "
                text += f"has {least}{len(other.batches)}"
                yield seen(text, other.begin, (a, b), other.begin["made"])
                return


@check(explains=("same-order",))
def _shared_samples(run: Run, model: Replicas) -> Iterator[Finding]:
    """Two ranks train on the same samples within an epoch.

    More samples than a sampler pads with have the same content on two ranks, and the same index
    unless distributed samplers drew them; no rank draws with replacement.

    Split the dataset between ranks: DataLoader(..., sampler=DistributedSampler(dataset)), with
    the same dataset, seed and set_epoch(epoch) on every rank.
    """
    epochs = {rank: run.epochs(rank) for rank in model.ranks}
    # ranks of different groups may share samples, as in tensor parallelism
    for key, (a, b) in product(epochs[model.ranks[0]], combinations(model.ranks, 2)):
        one, other = epochs[a].get(key), epochs[b].get(key)
        if one is None or other is None or not (one.trained and other.trained):
            continue
        if one.begin["made"] != other.begin["made"]:
            continue
        shared, fewest, padding = _shared(one, other, len(run.ranks))
        if shared > max(padding, fewest / 10) and shared >= _FEWEST_SAMPLES:
            text = f"ranks {a} and {b} share {shared} of {fewest} samples of epoch {key[1]}"
            seeds = [(e.begin["seed"], e.begin["sampler_epoch"]) for e in (one, other)]
            if seeds[0] != seeds[1]:
                text += f"; seeds and epochs of their samplers are {seeds}"
            yield seen(text, one.begin, (a, b), one.begin["made"])
            return


def _shared(one: Epoch, other: Epoch, ranks: int) -> tuple[int, int, int]:
    """Return the numbers of common samples, of the samples of one rank, and of added samples."""
    sets = []
    for epoch in (one, other):
        pairs = [
            pair
            for batch in epoch.batches
            if batch["index"] and len(batch["index"]) == len(batch["samples"])
            for pair in zip(batch["index"], batch["samples"], strict=True)
        ]
        contents = {content for _, content in pairs}
        repeats = len({index for index, _ in pairs}) < 0.9 * len(pairs)
        if epoch.begin["replacement"] or repeats:
            return 0, 0, 0
        by_content = epoch.begin["seed"] is not None and len(contents) == len(pairs)
        sets.append((set(pairs), contents if by_content else set()))
    indexed, contents = zip(*sets, strict=True)
    if all(contents):
        return len(contents[0] & contents[1]), min(map(len, contents)), ranks
    padding = one.begin["batch_size"] * ranks
    return len(indexed[0] & indexed[1]), min(map(len, indexed)), padding
