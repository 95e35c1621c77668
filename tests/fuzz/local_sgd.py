"""Random runs of LocalSGD: parameters are those of a naive run of all ranks in one process.

A plan draws optimizers, fragments, a hook, a scheduler, a scaler whose gradients overflow, steps
that ranks skip, parameters that are thawed, and where the run is copied or resumed. Runs with a
hook that compresses are compared with the same run without copies.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fuzz.ranks import results_of_ranks
from gradwire import hooks
from gradwire.local_sgd import LocalSGD
from gradwire.local_sgd.outer import assign_fragments, due

INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
OUTER = {
    "mean": lambda anchors: torch.optim.SGD(anchors, lr=1.0),
    "nesterov": lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True),
    # eps: where ranks' differences cancel, the default would turn rounding errors into whole steps
    "adam": lambda anchors: torch.optim.Adam(anchors, lr=0.1, eps=1e-2),
}
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}
SINGLE = ("none", "all_reduce")
"""Hooks with one message for each bucket, which a delay needs."""
EXACT = ("none", "all_reduce", "function", "half")
COMPRESSING = ("int8", "int4")
SHAPES = [(), (1,), (7,), (3, 5), (8, 8), (2, 3, 4), (0,)]


@dataclass(frozen=True)
class Plan:
    """A run; `events` are a kind, a step and a rank or a parameter."""

    seed: int
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    inner: str
    outer: str
    hook: str
    scheduler: str | None
    scaled: bool
    every: int
    fragments: int
    frozen: tuple[int, ...]
    steps: int
    given: str
    delay: int
    alpha: float
    events: frozenset[tuple[str, int, int]]
    device: str = "cpu"

    def at(self, kind: str, step: int) -> list[int]:
        """The ranks or parameters of events at a step."""
        return sorted(which for name, when, which in self.events if (name, when) == (kind, step))

    def active(self, step: int) -> list[int]:
        thawed = {which for name, when, which in self.events if name == "thaw" and when <= step}
        return [i for i in range(len(self.shapes)) if i not in self.frozen or i in thawed]


def make_plan(r: random.Random) -> Plan:
    shapes = tuple(r.choice(SHAPES) for _ in range(r.randint(1, 5)))
    frozen = tuple(i for i in range(1, len(shapes)) if r.randrange(100) < 30)
    every, steps, ranks = r.randint(1, 4), r.randint(3, 10), r.randint(1, 3)
    events = {("thaw", r.randrange(steps), i) for i in frozen if r.randrange(100) < 70}
    for kind, of in (("skip", ranks), ("synchronize", 1), ("deepcopy", 1), ("pickle", 1)):
        events |= {(kind, s, w) for s in range(steps) for w in range(of) if r.randrange(100) < 12}
    hook = r.choice(EXACT * 2 + COMPRESSING)
    events |= {("resume", s, 0) for s in range(steps) if r.randrange(100) < 20}
    return Plan(
        r.getrandbits(32),
        ranks,
        shapes,
        r.choice([torch.float64, torch.float32]),
        r.choice(list(INNER)),
        r.choice(list(OUTER)),
        hook,
        r.choice([None, *SCHEDULERS]),
        r.randrange(100) < 40,
        every,
        r.randint(1, min(every, len(shapes) - len(frozen))),
        frozen,
        steps,
        r.choice(["module", "generator", "list"]),
        r.choice([0, every - 1, r.randrange(every)]) if hook in SINGLE else 0,
        r.choice([0.0, 0.5, 0.25]),
        frozenset(events),
    )


def network(plan: Plan, extra: int = 0) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(plan.seed + extra)
    made = [torch.randn(s, generator=generator, dtype=plan.dtype) for s in plan.shapes]
    net = nn.ParameterList(nn.Parameter(p) for p in made)
    for i in plan.frozen:
        net[i].requires_grad_(False)
    return net.to(plan.device)


def loss_of(plan: Plan, net: nn.ParameterList, step: int, rank: int) -> Tensor:
    """A loss whose gradients differ by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    total = torch.zeros((), dtype=plan.dtype)
    for p in net:
        target = torch.randn(p.shape, generator=generator, dtype=plan.dtype)
        total = total + (p * p * 0.5 - p * target.to(p.device)).sum()
    return total


class Errors(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.update(copy.deepcopy(saved))


def half(state: Errors, bucket: hooks.GradBucket) -> Any:
    """Send half of what there is, and keep the other half, by the parameters' names."""
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        gradient += state.setdefault("errors", {}).get(name, 0)
        gradient /= 2
        state["errors"][name] = gradient.clone()
    return hooks.all_reduce(None, bucket)


def function(state: Any, bucket: hooks.GradBucket) -> Any:
    """The mean, as a user's function computes it."""
    return hooks.all_reduce(None, bucket)


def made(plan: Plan, extra: int = 0) -> tuple[nn.ParameterList, LocalSGD, Any, Any]:
    net, state = network(plan, extra), None
    hook: Any = {"none": None, "function": function, "half": half}.get(plan.hook, plan.hook)
    if plan.hook == "half":
        state = Errors()
    named: Any = net if plan.given == "module" else net.named_parameters()
    optimizer = LocalSGD(
        INNER[plan.inner](net.parameters()),
        list(named) if plan.given == "list" else named,
        every=plan.every,
        fragments=plan.fragments,
        outer=OUTER[plan.outer],
        hook=hook,
        hook_state=state,
        delay=plan.delay,
        alpha=plan.alpha,
    )
    scheduler = None if plan.scheduler is None else SCHEDULERS[plan.scheduler](optimizer)
    scaler = torch.amp.GradScaler(plan.device, init_scale=256.0) if plan.scaled else None
    return net, optimizer, scheduler, scaler


def resumed(plan: Plan, net: nn.ParameterList, *kept: Any) -> Any:
    """The same run in new objects, by way of a file."""
    file = io.BytesIO()
    torch.save([net.state_dict(), *(k and k.state_dict() for k in kept)], file)
    file.seek(0)
    saved = torch.load(file, weights_only=plan.scheduler != "lambda")
    new, *others = made(plan, extra=1 + dist.get_rank())
    new.load_state_dict(saved[0])
    for p, q in zip(net, new, strict=True):
        q.requires_grad_(p.requires_grad)
    for each, state in zip(others, saved[1:], strict=True):
        if each is not None:
            each.load_state_dict(state)
    return (new, *others)


def train(plan: Plan) -> list[list[Tensor]]:
    """Run a plan on this rank; the parameters after each step."""
    net, optimizer, scheduler, scaler = made(plan, extra=dist.get_rank())
    rank, history = dist.get_rank(), []
    for step in range(plan.steps):
        for i in plan.at("thaw", step):
            net[i].requires_grad_(True)
        optimizer.zero_grad()
        loss, skips = loss_of(plan, net, step, rank), rank in plan.at("skip", step)
        if scaler is not None:
            scaler.scale(loss * (float("inf") if skips else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        elif skips:
            optimizer.skip()
        else:
            loss.backward()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if plan.at("synchronize", step):
            optimizer.synchronize()
        history.append([p.detach().clone().cpu() for p in net])
        whole = (net, optimizer, scheduler, scaler)
        if plan.at("deepcopy", step):
            whole = copy.deepcopy(whole)
        if plan.at("pickle", step) and plan.scheduler != "lambda":
            whole = pickle.loads(pickle.dumps(whole))
        if plan.at("resume", step):
            whole = resumed(plan, *whole)
        net, optimizer, scheduler, scaler = whole
    return history


def reference(plan: Plan) -> list[list[list[Tensor]]]:
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # of steps that are skipped
    nets = [network(plan) for _ in range(plan.ranks)]
    inner = [INNER[plan.inner](net.parameters()) for net in nets]
    schedulers = [SCHEDULERS[plan.scheduler](o) for o in inner] if plan.scheduler else []
    anchors = [p.detach().clone() for p in nets[0]]
    outer = OUTER[plan.outer](anchors)
    errors = [[torch.zeros_like(a) for a in anchors] for _ in nets]
    history: list[list[list[Tensor]]] = [[] for _ in nets]

    def send(indices: Iterable[int]) -> dict[int, Tensor]:
        found = {}
        for i in indices:
            gradients = [anchors[i] - net[i].detach() for net in nets]
            if plan.hook == "half":
                gradients = [(g + e[i]) / 2 for g, e in zip(gradients, errors, strict=True)]
                for e, g in zip(errors, gradients, strict=True):
                    e[i] = g
            found[i] = sum(gradients) / plan.ranks
        return found

    def take(gradients: dict[int, Tensor], alpha: float) -> None:
        for i, gradient in gradients.items():
            anchors[i].grad = gradient
        outer.step()
        outer.zero_grad()
        for i in gradients:
            for net in nets:
                net[i].data.copy_(alpha * net[i].data + (1 - alpha) * anchors[i])

    pending: list[tuple[int, dict[int, Tensor]]] = []

    for step in range(plan.steps):
        for rank, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            for i in plan.at("thaw", step):
                net[i].requires_grad_(True)
            optimizer.zero_grad()
            if rank not in plan.at("skip", step):
                loss_of(plan, net, step, rank).backward()
                optimizer.step()
        active = plan.active(step)
        runs = assign_fragments([nets[0][i].nbytes for i in active], plan.fragments)
        fragments = [[active[i] for i in run] for run in runs]
        for fragment in due(step + 1, plan.every, plan.fragments):
            pending.append((step + 1 + plan.delay, send(fragments[fragment])))
        while pending and pending[0][0] <= step + 1:
            take(pending.pop(0)[1], plan.alpha if plan.delay else 0.0)
        for scheduler in schedulers:
            scheduler.step()
        if plan.at("synchronize", step):
            while pending:
                take(pending.pop(0)[1], plan.alpha)
            for indices in fragments:
                take(send(indices), 0.0)
        for own, net in zip(history, nets, strict=True):
            own.append([p.detach().clone() for p in net])
    return history


def _on_ranks(plans: Sequence[Plan]) -> Iterator[list[list[list[Tensor]]]]:
    """Train by each plan; with a hook that compresses, also without copies of the run."""
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # of steps that are skipped
    moving = {"deepcopy", "pickle", "resume"}
    for plan in plans:
        twin = replace(plan, events=frozenset(e for e in plan.events if e[0] not in moving))
        yield [train(each) for each in ([plan, twin] if plan.hook in COMPRESSING else [plan])]


def _differences(plan: Plan, got: Sequence[Any], want: Sequence[Any]) -> list[str]:
    exact = plan.hook in COMPRESSING
    eps = 0.0 if exact else 1e-10 if plan.dtype == torch.float64 else 1e-4
    for rank, (own, right) in enumerate(zip(got, want, strict=True)):
        for step, (values, wanted) in enumerate(zip(own, right, strict=True)):
            for i, (a, b) in enumerate(zip(values, wanted, strict=True)):
                if not torch.allclose(a, b, rtol=eps, atol=eps):
                    far = (a - b).abs().max().item()
                    return [f"rank {rank}, step {step}, parameter {i}: off by {far:.3g}"]
    for step in range(plan.steps):
        active = plan.active(step)
        runs = assign_fragments([got[0][step][i].nbytes for i in active], plan.fragments)
        sent = due(step + 1, plan.every, plan.fragments) if not plan.delay else ()
        together = [active[n] for fragment in sent for n in runs[fragment]]
        for i in active if plan.at("synchronize", step) else together:
            if not all(torch.equal(rank[step][i], got[0][step][i]) for rank in got):
                return [f"step {step}, parameter {i}: ranks differ"]
    return []


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first plans, up to one that fails."""
    results, ended = results_of_ranks(_on_ranks, plans, backend)
    found = []
    for plan, of_ranks in zip(plans, results, strict=False):
        got, *twin = zip(*of_ranks, strict=True)
        want = twin[0] if twin else reference(replace(plan, device="cpu"))
        found.append("\n".join(_differences(plan, got, want)))
    return found + ended
