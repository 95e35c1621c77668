"""Drawn models and programs: results are those of the references, and nothing else is written.

hypothesis makes a case that fails small, and runs it first the next time. `python tests/fuzz` runs
many more of each kind.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuzz.containers import plain, wrapped
from fuzz.kinds import KINDS
from gradwire.devices import DataParallel, gather_nested, scatter_nested

FEW = {
    "small-models": 20,
    "programs": 12,
    "routes": 16,
    "groups": 4,
    "collectives": 20,
    "local-sgd": 30,
}
MANY = {
    "models": 120,
    "programs": 150,
    "routes": 60,
    "groups": 24,
    "collectives": 300,
    "local-sgd": 200,
}


def check(kind: str, backend: str, count: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=count,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        case = KINDS[kind].draw(rng)
        note(KINDS[kind].show(case))
        ((_, problem),) = KINDS[kind].run([case], backend)
        assume(not problem.startswith("invalid"))
        assert not problem, problem

    run()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("kind", FEW)
def test_some(kind: str, backend: str) -> None:
    check(kind, backend, FEW[kind], derandomize=True)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("kind", MANY)
def test_many(kind: str, backend: str) -> None:
    more = 3 if os.environ.get("GRADWIRE_LONG") == "1" else 1
    check(kind, backend, MANY[kind] * more, derandomize=False)


# -- containers in `devices`: what comes back is what went in


def drawn(rng: random.Random, rows: int, depth: int = 0) -> Any:
    kind = rng.choice(["dict", "list", "leaf"]) if depth else "dict"
    if depth == 3 or kind == "leaf":
        return torch.randn(rows, rng.choice([1, 3]), requires_grad=True)
    count = rng.choice([1, 2, 3])
    if kind == "list":
        return [drawn(rng, rows, depth + 1) for _ in range(count)]
    keys = rng.sample(["a", "b", "c", "d"], count)
    return {key: drawn(rng, rows, depth + 1) for key in keys}


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    children = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else tree
    return [t for child in children for t in tensors(child)]


class Doubled(nn.Module):
    """Its output has the containers of another seed, filled in the order of the replica."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.scale, self.seed = nn.Parameter(torch.full((1,), 2.0)), seed

    def forward(self, value: Any) -> Any:
        def double(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: double(child) for key, child in tree.items()}
            return [*map(double, tree)] if isinstance(tree, list) else tree * self.scale

        found = double(plain(value))
        return wrapped(found, self.seed, int(tensors(found)[0].detach().abs().sum() * 1000))


def test_random_containers() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        tree = drawn(rng, rows=5)
        given = wrapped(tree, seed, seed)
        places = ["cpu"] * rng.choice([1, 2, 3])
        whole = gather_nested(scatter_nested(given, places), "cpu")
        assert type(whole) is type(given)
        for got, want in zip(tensors(plain(whole)), tensors(tree), strict=True):
            assert torch.equal(got, want), seed
        out = plain(DataParallel(Doubled(seed + 1), places)(given))
        sum(t.sum() for t in tensors(out)).backward()
        for got, want in zip(tensors(out), tensors(tree), strict=True):
            assert torch.equal(got, 2 * want), seed
            assert want.grad is not None
            assert torch.equal(want.grad, torch.full_like(want, 2)), seed
