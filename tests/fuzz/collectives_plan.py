"""A case of the collectives' fuzzer: a program of collectives, step by step.

A step takes a register, brings it to the shape that its collective wants, and its result is a new
register. Registers 0, 1, … are the leaves; all ranks run the same steps.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fuzz.collectives_ops import COMPLEX, INTEGERS, OPS, Case, Step, shape

IN_ANY_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""Whether a group's ranks may be in another order than the world's, which 2.11 does not have."""
REAL = ("float32",) * 6 + ("float64",) * 4 + ("bfloat16", "float16")
LOW = ("bfloat16", "float16")
LAYOUTS = (
    *("plain",) * 4, "transposed", "strided", "expanded", "offset", "conj", "neg", "reversed",
)  # fmt: skip
POSTS = ("none", "none", "half", "in_place", "tanh", "square")
LOSSES = ("weights", "sum", "transposed", "expanded", "part", "square", "conj", "twice")


@dataclass(frozen=True)
class Leaf:
    """What the program starts from, by rank; on a grid, values are multiples of 1/4, with ties."""

    shapes: tuple[tuple[int, ...], ...]
    wanted: tuple[bool, ...]
    dtype: str
    grid: bool


@dataclass(frozen=True)
class Plan:
    """A case; `by_grad` takes derivatives by `torch.autograd.grad` instead of `backward`."""

    seed: int
    ranks: int
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    checks: bool | None = None
    twice: bool = False
    by_grad: bool = False
    device: str = "cpu"


class _Maker:
    def __init__(self, rng: random.Random, worlds: Sequence[int]) -> None:
        self.rng, self.worlds = rng, worlds

    def chance(self, p: float) -> bool:
        return self.rng.randrange(100) < 100 * p

    def plan(self) -> Plan:
        rng = self.rng
        self.ranks = rng.choice(self.worlds)
        kinds = rng.choice([REAL] * 10 + [COMPLEX] * 4 + [INTEGERS])
        self.dtype = rng.choice(kinds)
        self.integers = kinds is INTEGERS
        self.checks = rng.choice([None, None, None, True, False])
        # Where some ranks want no gradient, ranks have to compare calls, or the backend has to.
        self.uneven = not self.integers and self.chance(0.25)
        self.marks_only = self.uneven and self.chance(0.4)
        if self.uneven:
            self.checks = None if self.marks_only else True
        self.twice = not (self.integers or self.uneven) and self.chance(0.3)
        self.by_grad = not (self.integers or self.uneven) and self.chance(0.3)
        leaves = tuple(self.leaf() for _ in range(rng.choice([1, 1, 2, 3])))
        self.count = len(leaves)
        self.exact = [*range(self.count)]
        steps = []
        for _ in range(rng.choice([1, 1, 2, 3, 4, 6])):
            steps.append(self.step(last=bool(steps) and self.chance(0.65)))
        seed = rng.getrandbits(32)
        return Plan(
            seed, self.ranks, leaves, tuple(steps), self.checks, self.twice, self.by_grad
        )  # fmt: skip

    def leaf(self) -> Leaf:
        rng = self.rng
        wanted = tuple(not self.uneven or self.chance(0.5) for _ in range(self.ranks))
        own = shape(rng)
        shapes = [shape(rng) if self.chance(0.3) else own for _ in range(self.ranks)]
        grid = self.integers or self.dtype in LOW or self.chance(0.6)
        return Leaf(tuple(shapes), wanted, self.dtype, grid)

    def step(self, *, last: bool) -> Step:
        rng = self.rng
        members = () if self.chance(0.6) else self.group()
        world = len(members) or self.ranks
        dtype = self.dtype
        if not self.integers and self.chance(0.12):
            dtype = rng.choice(COMPLEX if dtype in COMPLEX else (*REAL, "complex64"))
        op = rng.choices([*OPS], weights=[one.weight for one in OPS.values()])[0]
        while not self.suits(op):
            op = rng.choice([*OPS])
        case = Case(rng, world, dtype, self.twice, self.by_grad, self.checks)
        shapes, args = OPS[op].draw(case)
        # In few digits, values that are computed tie where they do not in many.
        exact = dtype in LOW or self.dtype in LOW
        before = self.exact if exact and args.get("op") in ("max", "min") else [*range(self.count)]
        first = before[-1] if last else rng.choice(before)
        asynchronous = OPS[op].has("async") and self.chance(0.3)
        checkpoint = ""
        if not (asynchronous or self.integers or self.uneven or OPS[op].has("token")):
            checkpoint = rng.choice([""] * 8 + ["plain", "reentrant"])
            if checkpoint == "reentrant" and (self.twice or self.by_grad):
                checkpoint = "plain"
        post = "none" if self.integers else rng.choice(POSTS)
        if post == "tanh" and dtype in COMPLEX:
            post = "square"
        number = self.count
        self.count += 1
        return Step(
            number, op, first, members, shapes, dtype, self.layouts(world), args,
            asynchronous, asynchronous and self.chance(0.6),
            "square" if checkpoint else post, checkpoint, self.losses(),
        )  # fmt: skip

    def suits(self, op: str) -> bool:
        if self.uneven and OPS[op].has("not resolved"):
            return False
        if self.marks_only and not OPS[op].has("marked"):
            return False
        return not (self.twice and OPS[op].has("one way"))

    def group(self) -> tuple[int, ...]:
        count = self.rng.choice([1, *range(2, self.ranks + 1), *range(2, self.ranks + 1)])
        members = self.rng.sample(range(self.ranks), count)
        return tuple(members if IN_ANY_ORDER else sorted(members))

    def layouts(self, world: int) -> tuple[str, ...]:
        if self.chance(0.5):
            return (self.rng.choice(LAYOUTS),) * world
        return tuple(self.rng.choice(LAYOUTS) for _ in range(world))

    def losses(self) -> tuple[str, ...]:
        if self.twice:  # linear on one rank and not on another is no graph on one alone
            return ("square",) * self.ranks
        if self.chance(0.15):
            return ()
        return tuple(self.rng.choice(LOSSES) for _ in range(self.ranks))


def make_plan(rng: random.Random, worlds: Sequence[int] = (2, 2, 3, 3, 4)) -> Plan:
    return _Maker(rng, worlds).plan()
