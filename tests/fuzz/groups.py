"""Random programs with wrappers in several groups of one process, checked against plain modules.

Each rank runs the forwards of its wrappers in an order of its own, one behind the other or beside
it, and one backward for all of them, once or twice; some are frozen, as in a GAN. The reference
averages the gradients of unwrapped copies over the wrapper's group.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fuzz.ranks import results_of_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.hooks import GradBucket

WIDTH = 4


@dataclass(frozen=True)
class Wrapper:
    """One wrapper: the index of its group, and its options."""

    group: int
    find_unused: bool
    hook: str
    sparse: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class GroupsPlan:
    seed: int
    ranks: int
    groups: tuple[tuple[int, ...], ...]
    wrappers: tuple[Wrapper, ...]
    steps: int


def make_plan(rng: random.Random) -> GroupsPlan:
    ranks = rng.choice([2, 3, 3, 4])
    everyone = tuple(range(ranks))
    ring = [tuple(sorted((r, (r + 1) % ranks))) for r in everyone]
    some = [c for n in range(2, ranks + 1) for c in combinations(everyone, n)]
    groups = (
        ring if rng.randrange(100) < 40 else rng.choices([everyone, *some], k=rng.randint(2, 4))
    )
    count = rng.randint(len(groups), len(groups) + 2)
    places = [*range(len(groups)), *rng.choices(range(len(groups)), k=count - len(groups))]
    rng.shuffle(places)
    wrappers = tuple(
        Wrapper(
            group=place,
            find_unused=rng.randrange(100) < 50,
            hook=rng.choice(["", "", "one", "chain"]),
            sparse=rng.randrange(100) < 15,
            options={
                "bucket_cap_mb": rng.choice([None, 1e-6]),
                "gradient_as_bucket_view": rng.randrange(100) < 30,
            },
        )
        for place in places
    )
    return GroupsPlan(rng.getrandbits(32), ranks, tuple(groups), wrappers, steps=4)


class Net(nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, sparse=sparse).double()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))

    def forward(self, x: Tensor, index: int, whole: bool) -> Tensor:
        y = torch.tanh(self.first(x)) + self.table(torch.tensor(index))
        return self.second(y) if whole else y


def one_sum(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def two_sums(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average by two all_reduces, of which a callback sends the second."""
    buffer = bucket.buffer().div_(group.size() ** 2)
    first = dist.all_reduce(buffer, group=group, async_op=True).get_future()

    def again(_: object) -> Tensor:
        dist.all_reduce(buffer, group=group)
        return buffer

    return first.then(again)


HOOKS = {"one": one_sum, "chain": two_sums}


def average(module: nn.Module, group: ProcessGroup) -> None:
    """Replace gradients by their mean over the group; those that no rank has stay None."""
    for p in module.parameters():
        used = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(used, group=group)
        if used:
            own = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            dist.all_reduce(own, group=group)
            p.grad = own / group.size()


def run_plan(plan: GroupsPlan) -> list[str]:
    """Run a program on this rank; returns the parameters whose gradients are wrong."""
    rank, made = dist.get_rank(), [dist.new_group(list(ranks)) for ranks in plan.groups]
    mine = [i for i, w in enumerate(plan.wrappers) if rank in plan.groups[w.group]]
    torch.manual_seed(plan.seed)
    modules = [Net(w.sparse) for w in plan.wrappers]
    twins = {i: copy.deepcopy(modules[i]) for i in mine}
    nets: dict[int, DistributedDataParallel] = {}
    for i in mine:
        w = plan.wrappers[i]
        options = {"find_unused_parameters": w.find_unused, **w.options}
        nets[i] = DistributedDataParallel(modules[i], process_group=made[w.group], **options)
        if w.hook and not w.sparse:
            nets[i].register_comm_hook(made[w.group], HOOKS[w.hook])
    wrong = []
    for step in range(plan.steps):
        rng, everyones = (random.Random(f"{plan.seed} {step} {r}") for r in (rank, "all"))
        chained, again = everyones.randrange(100) < 40, everyones.randrange(100) < 20
        frozen = {i for i in range(len(plan.wrappers)) if everyones.randrange(100) < 25}
        # wrappers of one group in one order on all of its ranks, as their messages share it
        own = rng.sample(mine, len(mine))
        order = ordered_by_group(own, [w.group for w in plan.wrappers])
        inputs = {i: one_input(plan.wrappers[i], rng) for i in order}
        for by in (nets, twins):
            for i, module in by.items():
                module.zero_grad()
                module.requires_grad_(i not in frozen)
            losses, y = [], None
            for i in order:
                x, index, whole = inputs[i]
                y = by[i](x if y is None or not chained else y, index, whole)
                losses.append(y.square().mean())
            for last in (False, True)[not again :] if losses else ():
                torch.stack(losses).sum().backward(retain_graph=not last)
        for i in mine:
            average(twins[i], made[plan.wrappers[i].group])
            wrong += [f"step {step}, wrapper {i}: {n}" for n in differing(nets[i], twins[i])]
    return wrong


def one_input(wrapper: Wrapper, rng: random.Random) -> tuple[Tensor, int, bool]:
    x = torch.full((2, WIDTH), rng.random(), dtype=torch.float64, requires_grad=True)
    return x, rng.randrange(3), not wrapper.find_unused or rng.randrange(100) < 50


def ordered_by_group(drawn: list[int], groups: list[int]) -> list[int]:
    """Keep the groups' places in a drawn order, and sort the wrappers of each group."""
    left = {g: sorted(i for i in drawn if groups[i] == g) for g in set(groups)}
    return [left[groups[i]].pop(0) for i in drawn]


def differing(net: DistributedDataParallel, twin: nn.Module) -> list[str]:
    return [
        n
        for (n, p), q in zip(net.module.named_parameters(), twin.parameters(), strict=True)
        if (p.grad is None) != (q.grad is None)
        or (q.grad is not None and not torch.allclose(p.grad.to_dense(), q.grad.to_dense()))
    ]


def _on_ranks(plans: Sequence[GroupsPlan]) -> Iterator[list[str]]:
    yield from map(run_plan, plans)


def run_batch(plans: Sequence[GroupsPlan], backend: str) -> list[str]:
    """Run the first program on all ranks; return what is wrong."""
    found, ended = results_of_ranks(_on_ranks, plans[:1], backend)
    wrong = ["\n".join(f"rank {r}: {t}" for r, ts in enumerate(own) for t in ts) for own in found]
    return wrong + ended
