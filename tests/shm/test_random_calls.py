"""Random calls on one host and on several: the same as on Gloo.

With GRADWIRE_LONG=1 in the environment: thousands of calls, some minutes.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.shm import Options
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

pytestmark = pytest.mark.timeout(1200)

LONG = os.environ.get("GRADWIRE_LONG") == "1"
# the host of each rank: one for all, side by side, by turns, of unequal numbers
LAYOUTS = ["AAA", "AABB", "ABAB", "ABBB", "ABCA", "AABCB"]
SIZES = [0, 1, 3, 17, 900, 1025, 9_000, 70_001, 400_003]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
CALLS = ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_tensor", "gather"]
CALLS += ["scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_tensor"]
SOON_S = 5.0


def numbers(count, dtype, salt):
    """Small whole numbers, of which sums and products are exact; they differ between ranks."""
    return ((torch.arange(count) * 7 + dist.get_rank() * 13 + salt * 5) % 3).to(dtype)


def laid_out(tensor, strided):
    """The same values, with gaps between them if `strided`."""
    if not strided:
        return tensor
    wide = torch.zeros(len(tensor), 2, dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


class Call:
    """One call, drawn alike on all ranks; `run` makes it on a group and returns what it filled."""

    def __init__(self, draw, salt):
        self.name, self.salt = draw.choice(CALLS), salt
        self.dtype, self.count = draw.choice(FLOATS + INTEGERS), draw.choice(SIZES)
        self.op, self.root = draw.choice(OPS), draw.random()
        self.is_async, self.strided = draw.random() < 0.5, draw.random() < 0.3
        self.inside = draw.choice(["none", "none", "one", "all"])
        self.cuts = [draw.choice([0, 1, 5, 300]) for _ in range(64)]

    def __repr__(self):
        return str(vars(self))

    def placed(self, tensor, group):
        """Return a copy in shared memory on the ranks that have it there."""
        if self.inside == "none" or (self.inside == "one" and dist.get_rank(group)):
            return tensor
        inside = gradwire.shm.empty(tensor.shape, dtype=tensor.dtype, group=group)
        return inside.copy_(tensor)

    def run(self, group, ranks, *, strided=True):
        world, me = len(ranks), dist.get_rank(group)
        root = ranks[int(self.root * world)]
        strided = strided and self.strided
        options = {"group": group, "async_op": self.is_async}
        x = laid_out(numbers(self.count, self.dtype, self.salt), strided)
        x = x if strided else self.placed(x, group)
        blocks = [laid_out(numbers(self.count, self.dtype, i), strided) for i in range(world)]
        empty = [laid_out(torch.zeros(self.count, dtype=self.dtype), strided) for _ in ranks]
        whole = self.placed(numbers(self.count * world, self.dtype, self.salt), group)
        at_root = dist.get_rank() == root
        if self.name == "all_reduce":
            work, filled = dist.all_reduce(x, self.op, **options), [x]
        elif self.name == "reduce":
            work, filled = dist.reduce(x, root, self.op, **options), [x] if at_root else []
        elif self.name == "broadcast":
            work, filled = dist.broadcast(x, root, **options), [x]
        elif self.name == "all_gather":
            work, filled = dist.all_gather(empty, x, **options), empty
        elif self.name == "all_gather_tensor":
            work, filled = dist.all_gather_into_tensor(whole, x.contiguous(), **options), [whole]
        elif self.name == "gather":
            into = empty if at_root else None
            work, filled = dist.gather(x, into, root, **options), into or []
        elif self.name == "scatter":
            given = blocks if at_root else None
            work, filled = dist.scatter(x, given, root, **options), [x]
        elif self.name == "reduce_scatter":
            work, filled = dist.reduce_scatter(x, blocks, self.op, **options), [x]
        elif self.name == "reduce_scatter_tensor":
            x = x.contiguous()
            work, filled = dist.reduce_scatter_tensor(x, whole, self.op, **options), [x]
        elif self.name == "all_to_all":
            work, filled = dist.all_to_all(empty, blocks, **options), empty
        else:  # what rank i sends to rank j is of a size of its own
            sends = [self.cuts[me * 7 + j] for j in range(world)]
            receives = [self.cuts[i * 7 + me] for i in range(world)]
            out = torch.zeros(sum(receives), dtype=self.dtype)
            given = numbers(sum(sends), self.dtype, self.salt)
            work = dist.all_to_all_single(out, given, receives, sends, **options)
            filled = [out]
        return work, filled


def subsets(draw, world):
    """Some groups of ranks, in their order."""
    found = [list(range(world))]
    found += [sorted(draw.sample(range(world), draw.randint(2, world))) for _ in range(3)]
    return found


def compared(layout, calls, seed, crowded):
    """Run the calls on both; every rank makes them in the same order, and waits when it likes."""
    usable = os.sched_getaffinity(0)
    if crowded:  # all ranks on one core, by which their groups choose how to pass data
        os.sched_setaffinity(0, {min(usable)})
        dist.barrier()
    draw, own = random.Random(seed), random.Random(seed + dist.get_rank())
    options = Options(host=layout[dist.get_rank()])
    groups = []
    for ranks in subsets(draw, len(layout)):
        ours = dist.new_group(ranks, backend="shm", pg_options=options)
        groups.append((ranks, ours, dist.new_group(ranks, backend="gloo")))
    assert not crowded or shm_backend_of(groups[0][1]).state._crowded
    flying = []
    for salt in range(calls):
        call, (ranks, ours, gloo) = Call(draw, salt), draw.choice(groups)
        if dist.get_rank() in ranks:
            # Gloo gets strided tensors wrong; and ours is Gloo where no two ranks share memory
            shared = len({layout[r] for r in ranks}) < len(ranks)
            theirs = call.run(gloo, ranks, strided=False)
            flying.append((call, call.run(ours, ranks, strided=shared), theirs))
        while flying and own.random() < 0.5:
            check(*flying.pop(0))
    for entry in flying:
        check(*entry)
    os.sched_setaffinity(0, usable)


def check(call, ours, theirs):
    for work in (ours[0], theirs[0]):
        if work is not None:
            work.wait()
    for got, expected in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(got, expected), call


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("layout", "crowded"), [("AAA", True), *((layout, False) for layout in LAYOUTS)]
)
@pytest.mark.narrow({"layout": ["AAA", "ABBB"], "crowded": False})
def test_random_calls_give_what_gloo_gives(layout, crowded):
    for seed in range(20 if LONG else 1):
        args = (layout, 150, seed, crowded)
        run_ranks(compared, len(layout), args=args, backend="gloo", timeout=100)
