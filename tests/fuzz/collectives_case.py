"""What a step is made for, and the random parts that ops share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

__all__ = ["COMPLEX", "INTEGERS", "Case", "Made", "named", "shape", "uneven", "with_size"]

Shape = tuple[int, ...]
Made = tuple[tuple[Shape, ...], dict[str, Any]]
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int64", "int32", "bool")


@dataclass
class Case:
    """What a step is made for."""

    rng: random.Random
    world: int
    dtype: str
    twice: bool
    by_grad: bool
    checks: bool | None

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def reduction(self) -> str:
        if self.dtype == "bool":
            return self.rng.choice(["band", "bor", "bxor", "max", "min"])
        names = ["sum", "product"]
        if self.dtype in INTEGERS:
            return self.rng.choice([*names, "max", "min", "band", "bor", "bxor"])
        names += ["sum", "avg"]
        return self.rng.choice(names if self.dtype in COMPLEX else [*names, "max", "min"])

    def reducing(self) -> dict[str, Any]:
        op = self.reduction()
        args: dict[str, Any] = {"op": op}
        if self.chance(0.2):
            args["as_enum"] = True
        return args

    def root(self) -> dict[str, Any]:
        return {"root": self.rng.randrange(self.world), "by": self.rng.choice(["global", "group"])}

    def sizes(self, least: int = 0) -> list[int]:
        """A size for each rank."""
        if self.chance(0.3):
            return [max(least, self.rng.choice([1, 2, 3]))] * self.world
        return [max(least, self.rng.choice([0, 1, 1, 2, 3, 5])) for _ in range(self.world)]

    def alike(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,) * self.world


def shape(rng: random.Random, dims: int | None = None) -> Shape:
    """Of any tensor: mostly small, sometimes empty, seldom large."""
    dims = rng.choice([0, 1, 1, 2, 2, 3]) if dims is None else dims
    if dims == 2 and rng.random() < 0.04:
        return rng.choice([(257, 33), (64, 1025), (3, 40_001)])
    return tuple(rng.choice([0, 1, 1, 2, 3, 3, 4, 5]) if rng.random() < 0.3 else
                 rng.choice([1, 2, 3, 4]) for _ in range(dims))  # fmt: skip


def with_size(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def uneven(case: Case, least: int = 0) -> tuple[list[int], int, tuple[Shape, ...]]:
    """Sizes, the dim, and shapes that differ there."""
    whole = shape(case.rng, case.rng.choice([1, 1, 2, 3]))
    dim = case.rng.randrange(len(whole))
    sizes = case.sizes(least)
    return sizes, dim, tuple(with_size(whole, dim, size) for size in sizes)


def named(case: Case, dim: int, dims: int) -> int:
    """A dim, counted from either end."""
    return dim - dims if dims and case.chance(0.3) else dim
