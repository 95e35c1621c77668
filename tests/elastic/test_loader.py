"""Batches of shards: whoever fetches them, ahead or again, they and what is drawn are the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from gradwire import elastic
from gradwire.errors import ArgumentError, ArgumentTypeError


class Drawing(Dataset[Any]):
    """Each sample with a number of each kind that was drawn for it."""

    offset = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[float]:
        drawn = (torch.rand(()).item(), random.random(), np.random.rand())
        return [float(index + self.offset), *drawn]


def opened(worker: int) -> None:
    """A `worker_init_fn` that opens a dataset, as one of files."""
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 100


Draws = dict[tuple[int, int], tuple[Any, float]]


def draws(dealt: list[elastic.Shard], **options: Any) -> Draws:
    """Of each shard of two steps, its batch, and what the loop draws then; each comes twice."""
    run = elastic.join(dist.HashStore(), shards=4)
    model = nn.Linear(1, 1)
    run.keep(model=model)
    loader = elastic.ShardLoader(run, Drawing(), **options)
    found: Draws = {}
    for step in run.steps(2, samples=64, batch=16):
        own, run._steps.dealt = run._steps.dealt, dealt
        for shard in dealt * 2:
            run._steps.begin_shard(shard)
            batch = [values.tolist() for values in loader[step, shard]]
            offset = 100.0 if "worker_init_fn" in options else 0.0
            assert batch[0] == [i + offset for i in step.sample_ids(shard)]
            one = (batch, torch.rand(()).item())
            assert found.setdefault((step.number, shard.first), one) == one
        run._steps.dealt = own
        with step:
            for _ in step.shards:
                step.backward(model(torch.ones(1, 1)).sum())
            step.commit()
    return found


SHARDS = [elastic.Shard(i, i + 1) for i in range(4)]


@pytest.mark.narrow({"workers": 0})
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_follows_from_step_and_shard(workers: int) -> None:
    options = {"num_workers": workers, "worker_init_fn": opened} if workers else {}
    alone = draws(SHARDS, **options)
    assert len({batch[1][0] for batch, _ in alone.values()}) == 8  # each shard has its own
    for part in (SHARDS[:2], SHARDS[2:], SHARDS[3:]):
        for place, one in draws(part, **options).items():
            assert one == alone[place]
    before = random.getstate(), np.random.get_state()[1].tolist()
    draws(SHARDS[:1], **options)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def mixed(items: list[list[float]]) -> list[torch.Tensor]:
    """A `collate_fn` that draws, as those that mix samples."""
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return [torch.tensor(items)[:, 0], torch.tensor(drawn)]


def test_what_a_collate_fn_draws_follows_from_step_and_shard() -> None:
    here = draws(SHARDS, collate_fn=mixed)
    assert here == draws(SHARDS, collate_fn=mixed, num_workers=1)
    assert len({batch[1][0] for batch, _ in here.values()}) == 8


class Failing(Drawing):
    """Fails once."""

    failed = False

    def __getitem__(self, index: int) -> list[float]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("a file is gone")
        return super().__getitem__(index)


def test_after_an_error_of_the_dataset_batches_are_those_that_are_asked_for() -> None:
    run = elastic.join(dist.HashStore(), shards=4)
    run.keep(model=nn.Linear(1, 1))
    loader = elastic.ShardLoader(run, Failing())
    step = next(run.steps(1, samples=64, batch=16))
    with pytest.raises(RuntimeError, match="a file is gone"):
        loader[step, SHARDS[0]]
    for shard in SHARDS[1:]:
        assert loader[step, shard][0].tolist() == step.sample_ids(shard)
    run._runtime.stop()


class Endless(IterableDataset[Any]):
    """Has no indices."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_what_cannot_be_dealt_is_refused() -> None:
    run = elastic.join(dist.HashStore())
    with pytest.raises(ArgumentTypeError, match="dataset is Endless: pass a map-style dataset"):
        elastic.ShardLoader(run, Endless())
    with pytest.raises(ArgumentError, match="in_order is False"):
        elastic.ShardLoader(run, Drawing(), in_order=False)
    run._runtime.stop()
