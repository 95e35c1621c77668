"""Generate a random accident: a program, the culprit, and the verdicts that are allowed.

The program is text, a training loop of a few collectives, the same on all ranks but for one
statement, so that its lines are those of a file. Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["ACCIDENTS", "Case", "draw"]

HEAD = """\
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
import gradwire
from gradwire import collectives
from datetime import timedelta
from staging import wait_for_announcements
from fragments import Branches, HangingData, failing_hook

CULPRIT, WORLD, SECONDS = {culprit}, {world}, {seconds}


class TrainingError(Exception):
    pass


def main(rank):
    mine = rank == CULPRIT
    size = WORLD
"""


@dataclass
class Case:
    """Accident.

    Attributes:
        seed: Seed that generated it.
        world, culprit, backend: Number of ranks, culprit, and backend of the default group.
        accident: Kind of accident.
        away: Ranks on another host, whose clock differs by `skew` ns.
        lost: True if the dumps of these ranks are lost.
        launched: True if a launcher notes exits of processes.
        source: Source of the program.
        allowed: Ranks that the verdict may name; naming none is always allowed.
    """

    seed: int
    world: int
    culprit: int
    backend: str
    accident: str
    away: tuple[int, ...] = ()
    skew: int = 0
    lost: bool = False
    launched: bool = False
    source: str = ""
    allowed: frozenset[int] = frozenset()
    steps: int = 4
    at: int = 2
    lines: list[str] = field(default_factory=list)


class _Draw:
    """Generator of one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = self.random.choice([2, 3, 3, 4, 4, 5, 8])
        self.culprit = self.random.choice([0, self.world - 1, self.random.randrange(self.world)])
        self.backend = self.random.choice(["gloo", "shm"])
        self.ddp = self.random.choice(["", "gradwire.DistributedDataParallel", "TORCH"])
        self.steps, self.at = 5, self.random.randrange(5)
        self.setup = ["group = dist.group.WORLD"]
        self.subgroup = self.random.random() < 0.4 and self.world > 2
        if self.subgroup:
            others = [r for r in range(self.world) if r != self.culprit]
            size = self.random.randint(2, self.world)
            members = sorted([self.culprit, *self.random.sample(others, size - 1)])
            self.members = members
            self.setup.append(
                f"sub = dist.new_group({members}, timeout=timedelta(seconds=SECONDS))"
            )
        if self.ddp:
            cls = self.ddp.replace("TORCH", "torch.nn.parallel.DistributedDataParallel")
            self.setup.append(f"model = {cls}(Branches())")
        count = self.random.randint(1, 4)
        self.calls = [self._call() for _ in range(count)]
        if self.ddp:
            self.calls.insert(self.random.randrange(count + 1), self._step())

    def _call(self) -> list[str]:
        n = self.random.choice([1, 3, 8, 20, 1000])
        theirs = self.random.random() < 0.5
        kinds = ["all_reduce", "all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter"]
        op = self.random.choice(kinds)
        in_sub = self.subgroup and self.random.random() < 0.4
        group = "sub" if in_sub else "group"
        world = f"{len(self.members)}" if in_sub else "size"
        first = self.members[0] if in_sub else 0
        if theirs:
            text = {
                "all_reduce": f"dist.all_reduce(torch.ones({n}), group={group})",
                "all_gather": f"dist.all_gather(list(torch.ones({world}, {n}).unbind()), "
                f"torch.ones({n}), group={group})",
                "broadcast": f"dist.broadcast(torch.ones({n}), {first}, group={group})",
                "barrier": f"dist.barrier(group={group})",
                "reduce_scatter": f"dist.reduce_scatter(torch.ones({n}), "
                f"list(torch.ones({world}, {n}).unbind()), group={group})",
            }[op]
        else:
            text = {
                "all_reduce": f"collectives.all_reduce(torch.ones({n}), group={group})",
                "all_gather": f"collectives.all_gather(torch.ones({n}), group={group})",
                "broadcast": f"collectives.broadcast(torch.ones({n}), {first}, group={group})",
                "barrier": f"dist.barrier(group={group})",
                "reduce_scatter": f"collectives.reduce_scatter(torch.ones({world}, {n}), "
                f"group={group})",
            }[op]
        return [f"if rank in {self.members}:", f"    {text}"] if in_sub else [text]

    def _step(self) -> list[str]:
        return [
            "model.zero_grad()",
            "loss = model(torch.ones(2, 4)).square().mean()",
            "loss.backward()",
        ]

    def on_world(self) -> list[int]:
        """Return the calls that all ranks make on the default group."""
        return [i for i, c in enumerate(self.calls) if "if rank in" not in c[0]]


Accident = Callable[[_Draw, Case], None]
ACCIDENTS: dict[str, Accident] = {}


def accident(function: Accident) -> Accident:
    ACCIDENTS[function.__name__] = function
    return function


def _here(case: Case) -> str:
    return f"mine and step == {case.at}"


def _insert(d: _Draw, case: Case, statement: str) -> None:
    """Insert a statement of the culprit before one of the calls."""
    at = d.random.randrange(len(d.calls))
    d.calls.insert(at, [f"if {_here(case)}:", f"    {statement}"])


def _world_call(d: _Draw) -> int:
    """Return the position of a new call on the default group."""
    return d.random.randrange(len(d.calls) + 1)


@accident
def nothing(d: _Draw, case: Case) -> None:
    case.allowed = frozenset()


@accident
def skip(d: _Draw, case: Case) -> None:
    at = d.random.randrange(len(d.calls))
    d.calls[at] = [f"if not ({_here(case)}):", *("    " + line for line in d.calls[at])]


@accident
def skips_always(d: _Draw, case: Case) -> None:
    at = d.random.randrange(len(d.calls))
    d.calls[at] = ["if not mine:", *("    " + line for line in d.calls[at])]


@accident
def extra(d: _Draw, case: Case) -> None:
    _insert(d, case, d.random.choice(["dist.all_reduce(torch.ones(7))", "dist.barrier()"]))


@accident
def swap(d: _Draw, case: Case) -> None:
    d.calls.append([f"for part in (two, one) if {_here(case)} else (one, two):"])
    d.calls[-1].append("    part()")
    d.setup += [
        "one = lambda: dist.all_reduce(torch.ones(6))",
        "two = lambda: dist.broadcast(torch.ones(4), 0)",
    ]


@accident
def size(d: _Draw, case: Case) -> None:
    other = d.random.choice([2, 5, 30])
    text = f"dist.all_reduce(torch.ones({other} if {_here(case)} else 8))"
    d.calls.insert(_world_call(d), [text])


@accident
def dtype(d: _Draw, case: Case) -> None:
    other = d.random.choice(["double", "int32", "half"])
    text = f"dist.all_reduce(torch.ones(8, dtype=torch.{other} if {_here(case)} else torch.float))"
    d.calls.insert(_world_call(d), [text])


@accident
def reduce_op(d: _Draw, case: Case) -> None:
    text = (
        f"dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX if {_here(case)} else dist.ReduceOp.SUM)"
    )
    d.calls.insert(_world_call(d), [text])


@accident
def root(d: _Draw, case: Case) -> None:
    text = f"dist.broadcast(torch.ones(8), 1 if {_here(case)} else 0)"
    d.calls.insert(_world_call(d), [text])


@accident
def another_op(d: _Draw, case: Case) -> None:
    at = _world_call(d)
    d.calls.insert(at, [f"if {_here(case)}:", "    dist.broadcast(torch.ones(8), 0)"])
    d.calls[at] += ["else:", "    dist.all_reduce(torch.ones(8))"]


@accident
def endless_loop(d: _Draw, case: Case) -> None:
    _insert(d, case, "while True: time.sleep(0.01)")


@accident
def busy_loop(d: _Draw, case: Case) -> None:
    _insert(d, case, "while True: pass")


@accident
def long_sleep(d: _Draw, case: Case) -> None:
    _insert(d, case, "time.sleep(4 * SECONDS)")


@accident
def stopped(d: _Draw, case: Case) -> None:
    d.setup.append("wait_for_announcements()")
    _insert(d, case, "os.kill(os.getpid(), signal.SIGSTOP)")


@accident
def killed(d: _Draw, case: Case) -> None:
    d.setup.append("wait_for_announcements()")
    _insert(d, case, "os.kill(os.getpid(), signal.SIGKILL)")


@accident
def segfault(d: _Draw, case: Case) -> None:
    d.setup.append("wait_for_announcements()")
    _insert(d, case, d.random.choice(["os.abort()", "ctypes.string_at(0)"]))


@accident
def exits(d: _Draw, case: Case) -> None:
    _insert(d, case, d.random.choice(["sys.exit(0)", "os._exit(0)", "sys.exit(3)", "return"]))


@accident
def fewer_batches(d: _Draw, case: Case) -> None:
    d.calls.insert(0, [f"if {_here(case)}:", "    break"])


@accident
def raises(d: _Draw, case: Case) -> None:
    error = d.random.choice(
        ["ValueError('bad')", "RuntimeError('bad')", "KeyError(3)", "TimeoutError('of a download')"]
    )
    _insert(d, case, f"raise {error}")


@accident
def no_memory(d: _Draw, case: Case) -> None:
    _insert(d, case, d.random.choice(["torch.empty(1 << 50)", "bytearray(1 << 60)"]))


@accident
def swallowed(d: _Draw, case: Case) -> None:
    at = d.random.randrange(len(d.calls))
    inner = [f"if {_here(case)}:", "    raise ValueError('a bad sample')", *d.calls[at]]
    d.calls[at] = ["try:", *("    " + line for line in inner), "except ValueError:", "    pass"]


@accident
def errors_wrapped_by_all(d: _Draw, case: Case) -> None:
    """All ranks wrap received errors in errors of their own."""
    _insert(d, case, d.random.choice(["raise KeyError('bad')", "os._exit(1)", "while True: pass"]))
    case.lines = ["except Exception as error:", "    raise TrainingError('step failed') from error"]


@accident
def others_fail_while_they_clean_up(d: _Draw, case: Case) -> None:
    _insert(d, case, d.random.choice(["raise KeyError('bad')", "os._exit(1)", "while True: pass"]))
    case.lines = ["finally:", "    if not mine and sys.exc_info()[0]:", "        {}['gone']"]


@accident
def others_go_on_after_errors(d: _Draw, case: Case) -> None:
    """The other ranks swallow their errors and raise others later."""
    _insert(d, case, d.random.choice(["os._exit(1)", "while True: pass"]))
    case.lines = [
        "except RuntimeError:",
        "    pass",
        "if not mine:",
        "    raise ValueError('no result')",
    ]


@accident
def skips_a_backward(d: _Draw, case: Case) -> None:
    _want_ddp(d)
    at = next(i for i, c in enumerate(d.calls) if c[-1] == "loss.backward()")
    d.calls[at][-1] = f"if not ({_here(case)}): loss.backward()"


@accident
def unused_branch(d: _Draw, case: Case) -> None:
    _want_ddp(d)
    at = next(i for i, c in enumerate(d.calls) if c[-1] == "loss.backward()")
    d.calls[at][1] = f"loss = model(torch.ones(2, 4), {_here(case)}).square().mean()"


@accident
def hook_raises(d: _Draw, case: Case) -> None:
    _want_ddp(d, "gradwire.DistributedDataParallel")
    d.setup.append(f"model.register_comm_hook(None, failing_hook(mine, {case.at}))")


@accident
def bad_loss(d: _Draw, case: Case) -> None:
    _want_ddp(d)
    at = next(i for i, c in enumerate(d.calls) if c[-1] == "loss.backward()")
    other = "model(torch.ones(2, 5))"
    d.calls[at][1] = (
        f"loss = ({other} if {_here(case)} else model(torch.ones(2, 4))).square().mean()"
    )


@accident
def data_loader_hangs(d: _Draw, case: Case) -> None:
    d.setup.append(
        f"data = iter(torch.utils.data.DataLoader(HangingData(mine, {case.at}), "
        "batch_size=None, num_workers=1))"
    )
    d.calls.insert(0, ["next(data)"])


@accident
def never_waited(d: _Draw, case: Case) -> None:
    case.allowed = frozenset()
    d.calls.append(["work = dist.all_reduce(torch.ones(8), async_op=True)"])
    d.calls.append(["if not mine:", "    work.wait()"])


@accident
def everybody_receives_first(d: _Draw, case: Case) -> None:
    d.calls.append(
        [
            f"if step == {case.at}:",
            "    dist.recv(torch.ones(4), (rank - 1) % size)",
            "    dist.send(torch.ones(4), (rank + 1) % size)",
        ]
    )
    case.allowed = frozenset(range(d.world))


@accident
def does_not_send(d: _Draw, case: Case) -> None:
    d.calls.append(
        [
            "for src in range(size):",
            f"    if rank == src and not ({_here(case)}):",
            "        dist.send(torch.ones(4), (rank + 1) % size)",
            "    if rank == (src + 1) % size:",
            "        dist.recv(torch.ones(4), src)",
        ]
    )


@accident
def a_batch_of_messages(d: _Draw, case: Case) -> None:
    d.calls.append(
        [
            f"if not ({_here(case)}):",
            "    for work in dist.batch_isend_irecv([",
            "        dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % size),",
            "        dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % size)]):",
            "        work.wait()",
        ]
    )


@accident
def monitored_barrier(d: _Draw, case: Case) -> None:
    case.backend = "gloo"
    d.calls.append(
        [
            f"if not ({_here(case)}):",
            "    dist.monitored_barrier(timeout=timedelta(seconds=SECONDS))",
        ]
    )


@accident
def a_group_that_one_does_not_make(d: _Draw, case: Case) -> None:
    d.calls.append([f"if step == {case.at} and not mine:", "    dist.new_group(list(range(size)))"])


@accident
def groups_in_other_orders(d: _Draw, case: Case) -> None:
    d.setup.append("pair = [dist.new_group(timeout=timedelta(seconds=SECONDS)) for _ in range(2)]")
    d.calls.append(
        [
            f"for each in reversed(pair) if {_here(case)} else pair:",
            "    dist.all_reduce(torch.ones(5), group=each)",
        ]
    )
    case.allowed = frozenset(range(d.world))


@accident
def objects(d: _Draw, case: Case) -> None:
    d.calls.append(
        [
            f"if not ({_here(case)}):",
            "    dist.all_gather_object([None] * size, {'rank': rank})",
        ]
    )


@accident
def a_second_job(d: _Draw, case: Case) -> None:
    """Run after another job that had groups with the same names."""
    _insert(d, case, d.random.choice(["raise KeyError('bad')", "os._exit(1)", "while True: pass"]))
    d.setup.insert(0, f"again(rank, {d.random.randint(1, 12)})")
    if d.subgroup:
        d.setup.insert(0, "dist.new_group([0, 1])")


def _want_ddp(d: _Draw, cls: str = "") -> None:
    if d.ddp and (not cls or cls == d.ddp):
        return
    cls = cls or d.random.choice(
        ["gradwire.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel"]
    )
    d.setup = [line for line in d.setup if not line.startswith("model =")]
    d.setup.append(f"model = {cls}(Branches())")
    if not d.ddp:
        d.calls.insert(d.random.randrange(len(d.calls) + 1), d._step())
    d.ddp = cls


def draw(seed: int, names: Sequence[str] = ()) -> Case:
    """Return the accident of a seed."""
    d = _Draw(seed)
    name = d.random.choice(list(names) or list(ACCIDENTS))
    case = Case(seed, d.world, d.culprit, d.backend, name, at=d.at)
    case.launched = d.random.random() < 0.5
    if d.random.random() < 0.3:
        case.away = tuple(range(d.random.randint(1, d.world - 1), d.world))
        case.skew = d.random.choice([0, 30_000_000, -30_000_000, 5_000_000_000, -(10**12)])
        case.lost = d.random.random() < 0.5
    case.allowed = frozenset([d.culprit])
    ACCIDENTS[name](d, case)
    body = [line for call in d.calls for line in call]
    lines = [f"    {line}" for line in d.setup]
    if case.lines:
        lines += ["    try:", f"        for step in range({d.steps}):"]
        lines += [f"            {line}" for line in body]
        lines += [f"    {line}" for line in case.lines]
    else:
        lines += [f"    for step in range({d.steps}):", *(f"        {line}" for line in body)]
    case.source = HEAD.format(culprit=d.culprit, world=d.world, seconds=3) + "\n".join(lines) + "\n"
    return case
