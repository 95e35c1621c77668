"""Random models, trained for five steps, get the gradients of one process on the whole batch."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks

STEPS, WIDTH, BATCH = 5, 6, 3


@dataclass(frozen=True)
class Block:
    """A piece of a model.

    Attributes:
        kind: What it computes.
        width: Of its hidden layer.
        dtype: In which it computes.
        share: Use the first block's layer of the same kind.
        skip: Steps in which a forward leaves it out, on the ranks below `ranks`.
        ranks: See there.
        recompute: Whether it is checkpointed.
        inner: A block inside this one.
    """

    kind: str
    width: int
    dtype: str
    share: bool
    skip: frozenset[int]
    ranks: int
    recompute: bool
    inner: Block | None


def blocks(depth=2):
    return st.builds(
        Block,
        kind=st.sampled_from(["linear", "norm", "conv", "embedding", "scale"]),
        width=st.sampled_from([1, 5, 40, 300]),
        dtype=st.sampled_from(["float32", "float64"]),
        share=st.booleans(),
        skip=st.frozensets(st.integers(0, STEPS - 1), max_size=2),
        ranks=st.integers(1, 3),
        recompute=st.booleans(),
        inner=st.none() | blocks(depth - 1) if depth else st.none(),
    )


class Layer(nn.Module):
    """One block, and what it holds inside."""

    def __init__(self, block, shared, static):
        super().__init__()
        self.block, self.static = block, static
        dtype = getattr(torch, block.dtype)
        key = (block.kind, block.width, block.dtype)
        self.core = shared[key] if block.share and key in shared else core(block, dtype)
        shared.setdefault(key, self.core)
        self.spare = nn.Parameter(torch.zeros(3, dtype=dtype))  # never used
        self.inner = None if block.inner is None else Layer(block.inner, shared, static)

    def forward(self, x, step, rank):
        step = STEPS - 1 if self.static else step  # the same graph at each step
        if step in self.block.skip and rank < self.block.ranks:
            return x
        if self.block.recompute:
            x = checkpoint(self.compute, x, use_reentrant=self.static)
        else:
            x = self.compute(x)
        return x if self.inner is None else self.inner(x, step, rank)

    def compute(self, x):
        y = x.to(getattr(torch, self.block.dtype))
        if self.block.kind == "embedding":
            return x + self.core((x.detach() * 7).long().clamp(0, 9).sum(1) % 10).to(x.dtype)
        if self.block.kind == "conv":
            return x + self.core(y[:, None]).mean(1).to(x.dtype)
        if self.block.kind == "scale":
            return x * (1 + self.core["s"]).to(x.dtype)
        return x + self.core(y).tanh().to(x.dtype)


def core(block, dtype):
    if block.kind == "linear":
        return nn.Sequential(
            nn.Linear(WIDTH, block.width, dtype=dtype), nn.Linear(block.width, WIDTH, dtype=dtype)
        )
    if block.kind == "norm":
        return nn.LayerNorm(WIDTH, dtype=dtype)
    if block.kind == "conv":
        return nn.Conv1d(1, block.width, 3, padding=1, dtype=dtype)
    if block.kind == "embedding":
        return nn.Embedding(10, WIDTH, dtype=dtype, sparse=block.width == 1)
    return nn.ParameterDict({"s": nn.Parameter(torch.tensor(0.1, dtype=dtype))})


class Model(nn.Module):
    def __init__(self, plan, static):
        super().__init__()
        torch.manual_seed(0)
        shared = {}
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(block, shared, static) for block in plan)

    def forward(self, x, step, rank):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, step, rank)
        return x


def train(plan, options, hook, accumulate):
    """Five steps of ours, held against one process that computes every rank's part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(Model(plan, options["static_graph"]), **options)
    net.register_comm_hook(None, hook)
    alone = copy.deepcopy(net.module)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = torch.randn(size, BATCH, WIDTH, generator=generator)
        for model in (net, alone):
            model.zero_grad()
        if accumulate:
            with net.no_sync():
                net(batch[rank] / 2, step, rank).square().mean().backward()
        net(batch[rank], step, rank).square().mean().backward()
        parts = [1, 2] if accumulate else [1]
        losses = [alone(batch[r] / d, step, r).square().mean() for r in range(size) for d in parts]
        (sum(losses) / size).backward()
        with torch.no_grad():
            for (n, p), q in zip(net.module.named_parameters(), alone.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (step, n)
                if p.grad is None:
                    continue
                got, want = p.grad.to_dense(), q.grad.to_dense()
                scale = max(1e-6, want.abs().max().item())
                torch.testing.assert_close(got / scale, want / scale, rtol=1e-4, atol=1e-4, msg=n)
                for w in (p, q):
                    w -= 0.1 * want / max(1.0, scale)
    return True


@pytest.mark.wide
@pytest.mark.timeout(240)
@pytest.mark.narrow({"world_size": 2})
@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "gloo"), (2, "shm")])
def test_random_models(world_size, backend):
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        plan=st.lists(blocks(), min_size=1, max_size=5),
        static=st.booleans(),
        view=st.booleans(),
        cap=st.sampled_from([None, 1e-4, 1e-2]),
        hook=st.sampled_from([None, "all_reduce"]),
        accumulate=st.booleans(),
    )
    def run(plan, static, view, cap, hook, accumulate):
        options = {
            "find_unused_parameters": not static,
            "static_graph": static,
            "gradient_as_bucket_view": view,
            "bucket_cap_mb": cap,
        }
        assert all(
            run_ranks(train, world_size, args=(plan, options, hook, accumulate), backend=backend)
        )

    run()


HOOKS = {
    "none": lambda: None,
    "all_reduce": lambda: "all_reduce",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "int8": lambda: hooks.BlockQuantization(8, block=8, start=1),
    "int4": lambda: hooks.BlockQuantization(4, block=8),
    "fp16_int4": lambda: hooks.compress(hooks.BlockQuantization(4, block=8), torch.float16),
}
WEIGHTS = [
    (1, 1, 1, 1),
    (2, 1, 1, 0),
    (4, 2, 1, 1),
    (4, 0, 2, 2),
    (512, 256, 128, 128),
    (0, 8, 0, 0),
]
"""Of two backwards on each of two ranks. With powers of 2, also as sums, nothing is rounded."""


@dataclass(frozen=True)
class Weighted:
    """A program with weights.

    Attributes:
        hook: Name of the communication hook.
        weights: For each step, one of `WEIGHTS`, or None for a step without.
        scales: For each step, what its weights are multiplied by.
        turned: Whether the ranks' weights are exchanged.
        dtype: Default dtype while it runs.
        after: Whether weights are given after the forward.
    """

    hook: str
    weights: tuple[tuple[int, ...] | None, ...]
    scales: tuple[float, ...]
    turned: bool
    dtype: str
    after: bool


weighted_programs = st.builds(
    Weighted,
    hook=st.sampled_from([*HOOKS]),
    weights=st.tuples(*[st.none() | st.sampled_from(WEIGHTS)] * STEPS),
    scales=st.tuples(*[st.sampled_from([0.25, 1.0, 4096.0])] * STEPS),
    turned=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    after=st.booleans(),
)


def train_weighted(plan, options, program):
    """Steps with weights, held against the same steps of losses that are weighted by hand."""
    rank, nets = dist.get_rank(), []
    for _ in range(2):
        net = DistributedDataParallel(Model(plan, options["static_graph"]), **options)
        net.register_comm_hook(None, HOOKS[program.hook]())
        nets.append(net)
    net, twin = nets
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = torch.randn(2, 2, BATCH, WIDTH, generator=generator)[rank]
        every = program.weights[step]
        own = None if every is None else (every[2:] + every[:2] if program.turned else every)
        own = None if own is None else own[2 * rank : 2 * rank + 2]
        for model in nets:
            model.zero_grad()
        torch.set_default_dtype(getattr(torch, program.dtype))
        try:
            for i, x in enumerate(batch):
                n = None if own is None else own[i] * program.scales[step]
                with net.no_sync(enabled=i == 0):
                    if n is not None and not program.after:
                        net.weight(n)
                    out = net(x, step, rank)
                    if n is not None and program.after:
                        net.weight(n)
                    out.square().mean().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        for i, x in enumerate(batch):
            share = 1.0 if own is None else 2 * own[i] / sum(every)
            with twin.no_sync(enabled=i == 0):
                (share * twin(x, step, rank).square().mean()).backward()
        for (n, p), q in zip(net.module.named_parameters(), twin.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (step, n)
            if p.grad is not None:
                got, want = p.grad.to_dense(), q.grad.to_dense()
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=f"{step}, {n}")
                with torch.no_grad():
                    for w in (p, q):
                        w -= 0.1 * want / max(1.0, want.abs().max().item())
    return True


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.narrow({"backend": "shm"})
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_random_models_with_weights(backend):
    count = (int(os.environ.get("GRADWIRE_LONG", 0)) and 200) or 25

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        plan=st.lists(blocks(1), min_size=1, max_size=4),
        static=st.booleans(),
        view=st.booleans(),
        cap=st.sampled_from([None, 1e-4, 1e-2]),
        program=weighted_programs,
    )
    def run(plan, static, view, cap, program):
        options = {
            "find_unused_parameters": not static,
            "static_graph": static,
            "gradient_as_bucket_view": view,
            "bucket_cap_mb": cap,
        }
        assert all(run_ranks(train_weighted, 2, args=(plan, options, program), backend=backend))

    run()
