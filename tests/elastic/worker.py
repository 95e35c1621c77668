"""A member of the runs that are killed: a small model, and a ledger of the samples in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic import links
from gradwire import _groups, elastic
from gradwire.ddp import DistributedDataParallel
from gradwire.elastic import snapshot
from gradwire.elastic.runtime import Groups, Runtime
from gradwire.elastic.steps import MemberSteps
from gradwire.elastic.tree_sum import TreeSum
from gradwire.errors import RunOverError

SAMPLES, BATCH = 96, 32
POINTS = ("forward", "backward", "reduce", "commit", "rendezvous", "form", "transfer", "sent")
POINTS += ("apply", "validate", "settle", "save")
KINDS = ("plain", "fused", "bfloat16", "local")  # the last needs the tree
LATE = 3  # the exit code of a member that came when the others were done


@dataclass
class Plan:
    """The faults of one run, all from its seed."""

    seed: int
    members: int
    backend: str
    reproducible: bool = True
    kind: str = "plain"
    steps: int = 12
    pause: float = 0.001
    self_kills: dict[int, tuple[str, int]] = field(default_factory=dict)  # by start order
    from_outside: list[tuple[str, float]] = field(default_factory=list)  # one of FAULTS, seconds
    restart: bool = True
    apart: bool = False
    folder: str = ""  # for the checkpoint after the last step

    @staticmethod
    def random(
        seed: int,
        *,
        reproducible: bool = True,
        kind: str = "",
        cuts: bool = False,
        apart: bool = False,
    ) -> Plan:
        """1 to 3 faults: kills at named points, and kills and others at any time.

        Args:
            seed: Of all that is drawn.
            reproducible: The run's.
            kind: Of the model and its optimizer; "" to draw it.
            cuts: True to draw connections that are reset, and members that join.
            apart: True for members with networks of their own, which go down.
        """
        chance = random.Random(seed)
        plan = Plan(seed, chance.randint(2, 4), chance.choice(["shm", "gloo"]), reproducible)
        faults = ["KILL", "KILL", "STOP", *["RESET", "RESET", "STORE", "JOIN"] * cuts]
        faults += ["DOWN"] * 4 * apart
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.5:
                victim = chance.randrange(plan.members + 1)  # the last is one that joins later
                early = ("rendezvous", "form", "transfer", "save")
                point = chance.choice(POINTS)
                times = 1 if point in early else chance.randint(1, 3 if point == "sent" else 20)
                plan.self_kills[victim] = (point, times)
            else:
                fault = chance.choice(faults)
                plan.from_outside.append((fault, chance.random() * (1.6 if cuts else 0.8)))
        plan.restart = chance.random() < 0.8
        plan.kind = kind or chance.choice(KINDS if reproducible else KINDS[:-1])
        plan.apart = apart
        plan.pause = 0.02  # a second for all steps: faults come in the middle of them
        return plan


class Net(nn.Module):
    """Dropout and running statistics, and a parameter that counts each sample by its gradient."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        if kind in ("plain", "local"):
            self.layers = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
            )
        else:  # parameters that are not row-major
            self.layers = nn.Sequential(
                nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 8, 2, padding=1), nn.BatchNorm2d(8),
                nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(72, 4),
            ).to(memory_format=torch.channels_last)  # fmt: skip
        if kind == "bfloat16":
            self.layers.bfloat16()
        self.ledger = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        x = x.to(next(self.layers.parameters()).dtype)
        return self.layers(x).float(), self.ledger[ids]


class Master(torch.optim.SGD):
    """SGD on copies in single precision."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            master = self.state[p].setdefault("master", p.detach().float())
            p.detach().copy_(master.sub_(p.grad.float(), alpha=0.01))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "bfloat16": lambda p: Master(p, lr=0.01),
    "local": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
}


class Losses:
    """Losses on parts of the data, by step: an object that is kept."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[float]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"by_step": self.by_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_step = state["by_step"]


def main(number: int, plan: Plan, port: int, report: Any) -> None:
    """Train, and send the digest of the weights, the ledger, and what is left open for how long."""
    torch.set_num_threads(1)
    if plan.apart:
        links.leave_network()
    store = dist.TCPStore(links.STORE if plan.apart else "127.0.0.1", port, is_master=False)
    open_before = _descriptors()
    if number in plan.self_kills:
        _arm(*plan.self_kills[number], reproducible=plan.reproducible)
    try:
        model, losses = _train(plan, store)
    except RunOverError:
        report.send(None)
        _exit(LATE)
    # without the tree, running statistics are each member's own between two forwards
    values = model.state_dict() if plan.reproducible else dict(model.named_parameters())
    digest = _digest(values, sorted(losses.by_step.items()))
    counts = (model.module.ledger.detach() * -BATCH).tolist()
    if not plan.reproducible:
        counts = [round(count, 3) for count in counts]
    ended = time.monotonic()
    until = ended + 75.0  # what Gloo has under way ends by its timeout at last
    while ((threads := _threads()) or _groups._BACKENDS) and time.monotonic() < until:
        time.sleep(0.1)
    model.zero_grad()  # gradients lie in the memory of the group that reduced them
    now = _descriptors()
    opened = [target for fd, target in now.items() if open_before.get(fd) != target]
    waited = time.monotonic() - ended
    report.send((digest, counts, threads, opened, waited))
    _exit(0)


def _train(plan: Plan, store: dist.Store) -> tuple[DistributedDataParallel, Losses]:
    run = elastic.join(
        store,
        members=plan.members,
        backend=plan.backend,
        reproducible=plan.reproducible,
        silence=timedelta(seconds=1.5),
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0 if run.number == 1 else os.getpid())  # the others' start is not used
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(plan.kind), process_group=run.group, bucket_cap_mb=0.001)
    weights = [p for n, p in model.named_parameters() if "ledger" not in n]
    optimizer, losses = OPTIMIZERS[plan.kind](weights), Losses()
    ledger = torch.optim.SGD([model.module.ledger], lr=1.0)
    run.keep(model=model, optimizer=optimizer, ledger=ledger, losses=losses)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)

    for step in run.steps(plan.steps + 3, samples=SAMPLES, batch=BATCH):
        with step:
            if step.number % 3 == 0:
                losses.by_step[step.number] = validate(run, model.module, x, y)
            if step.number == plan.steps - 1:
                run.stop()
            for shard in step.shards:
                ids = step.sample_ids(shard)
                if plan.kind == "local":
                    with step.local(partial(_inner, model)) as inner:
                        for part in (ids[:2], ids[2:]):
                            time.sleep(plan.pause)
                            inner.zero_grad()
                            _loss(model, x, y, part, len(part) / len(ids)).backward()
                            inner.step()
                else:
                    time.sleep(plan.pause)
                    step.backward(_loss(model, x, y, ids, 1.0))
            step.commit(optimizer, ledger)
    folder = Path(plan.folder)
    run.save(folder)
    snapshot.load(run._kept.objects, folder / f"step-{plan.steps:09d}")  # it has the same bits
    return model, losses


def validate(run: elastic.Run, model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Return losses on parts of the data, divided among the members."""
    losses = torch.zeros(SAMPLES // 16)
    model.eval()
    with torch.no_grad():
        for part in range(run.rank, len(losses), run.size):
            ids = range(16 * part, 16 * part + 16)
            losses[part] = nn.functional.cross_entropy(model(x[ids], [0])[0], y[ids])
    model.train()
    dist.all_reduce(losses, group=run.group)
    return losses.tolist()


def _loss(model: nn.Module, x: Tensor, y: Tensor, ids: list[int], share: float) -> Tensor:
    """Return the loss of samples; the ledger's gradients count them."""
    out, counted = model(x[ids], ids)
    loss = nn.functional.cross_entropy(out, y[ids])
    return loss + share * (counted - counted.detach()).mean()


def _inner(model: DistributedDataParallel, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of local steps; that of the ledger counts each sample once."""
    ledger = model.module.ledger
    weights = [p for p in parameters if p is not ledger]
    groups = [{"params": weights, "lr": 0.05}, {"params": [ledger], "lr": 1.0}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.0)


def _digest(values: dict[str, Tensor], more: object = "") -> str:
    """Return a digest of all values but the ledger and numbers."""
    tensors = [t.detach() for name, t in sorted(values.items()) if "ledger" not in name]
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t.dim())
    return hashlib.sha256(data + repr(more).encode()).hexdigest()[:16]


def _descriptors() -> dict[str, str]:
    """Return the open files of this process by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself is closed again
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _threads() -> list[str]:
    """Those that no group of this process alone has."""
    names = [t.name for t in threading.enumerate() if t.name.startswith("gradwire-")]
    for name in ("gradwire-shm-links", "gradwire-shm-0"):  # of the group of one that is left
        if name in names:
            names.remove(name)
    return names


def _arm(point: str, times: int, *, reproducible: bool) -> None:
    """Let this process kill itself at a point, before or after what happens there."""
    owner, name = {
        "forward": (nn.Sequential, "forward"),
        "backward": (torch.autograd, "backward"),
        "reduce": (TreeSum, "reduce") if reproducible else (Runtime, "commit"),
        "commit": (Runtime, "commit"),
        "rendezvous": (Runtime, "_rendezvous"),
        "form": (Groups, "form"),
        "transfer": (Runtime, "_transfer"),
        "sent": (snapshot, "exchange"),
        "apply": (MemberSteps, "_apply"),
        "validate": (sys.modules[__name__], "validate"),
        "settle": (MemberSteps, "settle"),
        "save": (snapshot, "save"),
    }[point]
    setattr(owner, name, _killing(getattr(owner, name), times))


def _killing(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    calls = [0]

    def killing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != times:
            return function(*args, **kwargs)
        moment = random.Random(times).random()
        if moment < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment < 0.8:  # somewhere within
            delay = random.Random(times).random() * 4e-3
            threading.Thread(target=_kill_after, args=(delay,), daemon=True).start()
        result = function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    return killing


def _kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(code: int) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
