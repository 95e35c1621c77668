"""Random schedules of failures: no hang, no wrong gradient, no step that only some ranks took.

Ranks train on as a script would that catches errors; each step that is taken is held against the
mean of what each rank computes alone. A test that fails prints its schedules.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, broadcast_coalesced
from gradwire.ddp.faults import collective_log, error_channel
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.protocol import BackwardState
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerFailedError,
    PeerLostError,
    ReductionError,
)
from gradwire.testing import run_ranks

STEPS = 9
LAYERS = 4
OUTSIDE = (BackwardState.LOCAL, BackwardState.EXPECTED, BackwardState.REDUCED)
ENDS = (PeerLostError, CollectiveTimeoutError, BrokenGroupError)


@dataclass
class Schedule:
    """What goes wrong, by (step, rank); and what is trained."""

    seed: int
    ranks: int
    wrappers: int = 1
    hook: str = ""
    cap: float | None = None
    find_unused: bool = False
    events: dict[tuple[int, int], list[tuple[str, int]]] = field(default_factory=dict)


def schedule(seed: int, ranks: int, *, death: bool = False) -> Schedule:
    draw = random.Random(seed)
    made = Schedule(
        seed,
        ranks,
        wrappers=draw.choice([1, 1, 2]),
        hook=draw.choice(["", "", "chained", "single"]),
        cap=draw.choice([None, 1e-4]),
        find_unused=draw.random() < 0.3,
    )
    kinds = ["trap", "trap", "forward", "extra", "delay", "interrupt"]
    kinds += ["hook", "callback"] if made.hook == "chained" else []
    kinds += [] if made.find_unused else ["missing"]
    for step in range(2, STEPS - 1, 3):  # one is over before the next begins
        kind = draw.choice(kinds)
        who = draw.sample(range(ranks), draw.randint(1, ranks) if kind == "trap" else 1)
        for rank in who:
            event = (kind, draw.randrange(LAYERS + 1))
            made.events.setdefault((step, rank), []).append(event)
        if kind == "interrupt":  # somebody else is late, so that it waits
            late = draw.choice([r for r in range(ranks) if r not in who])
            made.events.setdefault((step, late), []).append(("delay", LAYERS))
    if death:
        at = (draw.randrange(2, STEPS - 1), draw.randrange(ranks))
        made.events.setdefault(at, []).append((draw.choice(["die", "die in forward"]), 1))
    return made


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.action()
        return grad, None


class Net(nn.Sequential):
    """Layers, between which a backward runs an action."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 4) for _ in range(LAYERS)]
        super().__init__(*layers)
        self.actions, self.skipped, self.fails = {}, None, False

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("in forward")
        x = x.requires_grad_()
        for i, layer in enumerate(self):
            if i in self.actions:
                x = Trap.apply(x, self.actions[i])
            x = x.tanh() if i == self.skipped else layer(x).tanh()
        return Trap.apply(x, self.actions[LAYERS]) if LAYERS in self.actions else x


def fail():
    raise ArithmeticError("in backward")


class Run:
    def __init__(self, plan: Schedule) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.failing = ""
        self.nets = []
        for number in range(plan.wrappers):
            net = DistributedDataParallel(
                Net(number), bucket_cap_mb=plan.cap, find_unused_parameters=plan.find_unused
            )
            if plan.hook:
                net.register_comm_hook(
                    None, self.chained if plan.hook == "chained" else hooks.all_reduce
                )
            self.nets.append(net)
        self.parameters = [p for net in self.nets for p in net.module.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.log: list[tuple] = []

    def chained(self, state, bucket):
        if self.failing == "hook":
            raise KeyError("in a hook")

        def callback(future):
            if self.failing == "callback":
                raise TypeError("peer connection timed out")
            return future.value()

        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda f: f.value()[0]).then(callback)

    def inputs(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(2, 4, generator=generator)

    def loss(self, nets, step):
        return sum(net(self.inputs(step)).square().sum() for net in nets)

    def alone(self, step):
        nets = [copy.deepcopy(net.module) for net in self.nets]
        for net in nets:
            net.zero_grad()
        self.loss(nets, step).backward()
        return flat(p for net in nets for p in net.parameters())

    def arrange(self, step):
        module, domain = self.nets[-1].module, FaultDomain.of(dist.group.WORLD)
        for kind, where in self.plan.events.get((step, self.rank), ()):
            if kind == "trap":
                module.actions[where] = fail
            elif kind == "delay":
                module.actions[where] = lambda: time.sleep(0.2)
            elif kind == "die":
                module.actions[where] = lambda: os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "die in forward":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind in ("hook", "callback"):
                self.failing = kind
            elif kind == "missing":
                module.skipped = where % LAYERS
            elif kind == "extra":
                for _ in range(1 + where):
                    self.nets[0](self.inputs(0))
            elif kind == "forward":
                module.fails = True
                with pytest.raises(ArithmeticError):
                    self.loss(self.nets, step)
                module.fails = False
            elif kind == "interrupt":

                def poll(waiter):
                    # Not while a forward's ranks agree on the order of buckets: a rank that
                    # ends a forward with an exception, and goes on, is one step behind, and
                    # the others cannot know.
                    if waiter.state in OUTSIDE:
                        return FaultDomain.poll(domain, waiter)
                    del domain.poll
                    raise KeyboardInterrupt

                domain.poll = poll

    def settle(self):
        domain = FaultDomain.of(dist.group.WORLD)
        domain.__dict__.pop("poll", None)
        self.failing = ""
        for net in self.nets:
            net.module.actions.clear()
            net.module.skipped = None

    def step(self, step):
        self.optimizer.zero_grad()
        alone = self.alone(step)
        try:
            self.arrange(step)
            self.loss(self.nets, step).backward()
        finally:
            self.settle()
        self.log.append(("took", alone, flat(self.parameters)))
        self.optimizer.step()

    def train(self):
        step = 0
        while step < STEPS:
            step += 1
            try:
                self.step(step)
            except ENDS as error:
                self.log.append(("ended", str(error)))
                return self.log
            except (ArithmeticError, HookError, KeyboardInterrupt) as error:
                self.log.append(("raised", repr(error)))
            except (PeerFailedError, ReductionError) as error:
                self.log.append(("heard", str(error)))
                if isinstance(error, ReductionError) and error.parameters:
                    del self.log[-2]  # that step was taken with gradients that were not reduced
                    step -= 1  # and the forward that raised is the next one's
                if "same parameters" in str(error) or "got no gradient" in str(error):
                    self.log.append(("again", ""))
                    broadcast_coalesced(dist.group.WORLD, [p.data for p in self.parameters])
        self.log.append(("parameters", torch.cat([p.detach().view(-1) for p in self.parameters])))
        return self.log


def flat(parameters):
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )


def check(plan: Schedule, logs: list) -> None:
    """What all ranks' logs of one schedule have to be like."""
    alive = [log for log in logs if log is not None]
    segments = [[[]] for _ in alive]
    for log, own in zip(alive, segments, strict=True):
        for kind, *values in log:
            if kind == "again":
                own.append([])
            elif kind == "took":
                own[-1].append(values)
    ended = any(log[-1][0] == "ended" for log in alive)
    assert ended or len({len(own) for own in segments}) == 1, "not all ranks began again"
    for number, together in enumerate(zip(*segments, strict=False)):
        lengths = {len(steps) for steps in together}
        last = number + 1 == min(map(len, segments))
        if last and not ended:
            assert len(lengths) == 1, f"some took {lengths} steps"
        assert max(lengths) - min(lengths) <= 1, f"some took {lengths} steps"
        for steps in zip(*together, strict=False):
            local = sum(alone for alone, _ in steps) / len(steps)
            for _, reduced in steps:
                assert torch.equal(reduced, steps[0][1]), "gradients differ between ranks"
                if len(alive) == plan.ranks:
                    torch.testing.assert_close(reduced, local)
    if not ended:
        final = [log[-1][1] for log in alive]
        assert all(torch.equal(one, final[0]) for one in final), "replicas differ"
        assert sum(kind == "took" for kind, *_ in alive[0]) >= 3


def run_schedules(plans: list[Schedule]) -> list[list[tuple]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_channel, "POLL_SECONDS", 0.02)
        patch.setattr(collective_log, "RESYNC_TIMEOUT_SECONDS", 20.0)
        logs = []
        for plan in plans:
            if logs:
                dist.barrier()
            logs.append(Run(plan).train())
        return logs


def run_and_check(seeds, ranks, backend, timeout):
    plans = [schedule(seed, ranks) for seed in seeds]
    try:
        results = run_ranks(run_schedules, ranks, backend=backend, timeout=timeout, args=[plans])
    except DistributedError:
        print("\n".join(map(str, plans)))
        raise
    for plan, *logs in zip(plans, *results, strict=True):
        print(plan)
        check(plan, logs)


def run_death(seed, ranks, backend, timeout):
    plan = schedule(seed, ranks, death=True)
    print(plan)
    dying = [r for (_, r), e in plan.events.items() if any(k.startswith("die") for k, _ in e)]
    options = {"backend": backend, "timeout": timeout, "may_die": dying}
    found = run_ranks(run_schedules, ranks, args=[[plan]], **options)
    logs = [of_rank and of_rank[0] for of_rank in found]
    check(plan, logs)
    for rank, log in enumerate(logs):
        assert (log is None) == (rank in dying)
        assert log is None or log[-1][0] == "ended", "it did not learn that a rank died"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_schedules(backend, ranks):
    run_and_check(range(100 * ranks, 100 * ranks + 5), ranks, backend, timeout=100)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_deaths(backend):
    run_death(2, 3, backend, timeout=60)


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_more_schedules(backend, ranks):
    last = 1300 if os.environ.get("GRADWIRE_LONG") == "1" else 1100
    for first in range(1000, last, 50):
        run_and_check(range(first, first + 50), ranks, backend, timeout=180)


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("seed", range(10, 20))
def test_more_deaths(backend, seed):
    run_death(seed, 2 + seed % 2, backend, timeout=60)
