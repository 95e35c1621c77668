"""Groups over several hosts, beyond the operations in test_conformance."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.hosts import INTERFACE, Hosts, why_no_hosts

import gradwire
import gradwire.shm
from gradwire._processes import wait_until
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm import Options
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

pytestmark = pytest.mark.wide  # processes of several hosts take seconds to start

TWO = (2, 2)
SOON_S = 5.0  # far below the group's timeout: a machine may be busy


class Counting:
    """An engine that counts the bytes it sends to each rank."""

    def __init__(self, *args):
        self.inner, self.sent = dist.ProcessGroupGloo(*args), {}

    def send(self, tensors, dst, tag):
        self.sent[dst] = self.sent.get(dst, 0) + tensors[0].nbytes
        return self.inner.send(tensors, dst, tag)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def names(hosts):
    return [f"host {host}" for host, count in enumerate(hosts) for _ in range(count)]


def counted(hosts, call, count):
    """The bytes that leave this rank's host in a call."""
    engines = []

    def engine(*args):
        engines.append(Counting(*args))
        return engines[0]

    options = Options(host=names(hosts)[dist.get_rank()], engine=engine)
    group = dist.new_group(backend="shm", pg_options=options)
    dist.barrier(group)
    engines[0].sent.clear()
    x = torch.ones(count)
    call(x, group)
    team = next(t for t in gradwire.shm.teams(group) if dist.get_rank() in t)
    assert not engines[0].sent.keys() & set(team)
    mine = torch.zeros(dist.get_world_size())
    mine[dist.get_rank()] = sum(engines[0].sent.values())
    dist.all_reduce(mine, group=group)
    total = mine[list(team)].sum().item()
    dist.destroy_process_group(group)
    return total


@pytest.mark.parametrize(
    ("call", "hosts", "bytes_a_byte"),
    [
        (lambda x, group: dist.all_reduce(x, group=group), (2, 2), 1.0),
        (lambda x, group: dist.all_reduce(x, group=group), (1, 3), 1.0),
        (lambda x, group: dist.all_reduce(x, group=group), (2, 1, 1), 4 / 3),
    ],
)
@pytest.mark.narrow({"hosts": (2, 2), "bytes_a_byte": 1.0})
def test_bytes_that_leave_a_host(call, hosts, bytes_a_byte):
    count = 600_000
    sent = run_ranks(counted, sum(hosts), args=(hosts, call, count), backend="gloo")
    for taken in sent:
        assert bytes_a_byte <= taken / (4 * count) <= bytes_a_byte + 0.01


def reduce_for_ever(x):
    while True:
        dist.all_reduce(x)


def dying(dead, count, within):
    x = torch.ones(count)
    dist.all_reduce(x)
    dist.barrier()
    if dist.get_rank() == dead:
        if within:
            delay = random.Random(dead).random() / 20
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            reduce_for_ever(x)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        reduce_for_ever(x)
    taken = time.monotonic() - started
    named = re.findall(r"rank (\d+) (?:died|is gone|left)", str(raised.value))
    assert set(named) <= {str(dead)}, raised.value  # not by its place on its host
    with pytest.raises(BrokenGroupError):
        dist.all_reduce(x)
    dist.destroy_process_group()
    return taken


@pytest.mark.parametrize("hosts", [(2, 2), (1, 3), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize(("count", "within"), [(3, False), (1_000_000, True)])
@pytest.mark.narrow({"hosts": (2, 2), "dead": 1, "within": True})
def test_a_death_is_noticed_on_every_host(hosts, dead, count, within):
    taken = run_ranks(dying, 4, hosts=hosts, args=(dead, count, within), may_die=[dead])
    assert max(seconds for seconds in taken if seconds is not None) < SOON_S


def teams():
    return gradwire.shm.teams(dist.group.WORLD)


@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts can be made: {why_no_hosts()}")
def test_a_death_is_noticed_over_cables():
    with Hosts(TWO) as hosts:
        for dead in (0, 3):
            args = (dead, 1_000_000, True)
            taken = run_ranks(dying, 4, hosts=hosts, args=args, may_die=[dead])
            assert max(seconds for seconds in taken if seconds is not None) < SOON_S
            # the process that takes the dead one's place is on its host
            assert run_ranks(teams, 4, hosts=hosts)[0] == ((0, 1), (2, 3))


def late():
    group = dist.new_group(backend="shm", pg_options=Options(host=names(TWO)[dist.get_rank()]))
    shm_backend_of(group).set_timeout(timedelta(seconds=0.5))
    if dist.get_rank() == 3:
        return "late"
    with pytest.raises(DistributedError) as caught:
        dist.all_reduce(torch.ones(100_000), group=group)
    return type(caught.value)


def test_a_rank_that_takes_no_part_is_a_timeout():
    *found, _ = run_ranks(late, 4, backend="gloo")
    assert CollectiveTimeoutError in found  # others may hear of it before their time is over
    assert set(found) <= {CollectiveTimeoutError, PeerLostError, PeerFailedError}


def disagreeing(call):
    rank = dist.get_rank()
    with pytest.raises(MismatchError) as caught:
        call(rank)
    x = torch.full((5_000,), float(rank))
    dist.all_reduce(x)  # nothing moved: the group can be used
    assert x.unique().tolist() == [6.0]
    return str(caught.value)


CALLS = {
    "another size on one host": lambda r: dist.all_reduce(torch.ones(900_000 + (r > 1))),
    "another size on one rank": lambda r: dist.all_reduce(torch.ones(2 + (r == 3))),
    "another dtype": lambda r: dist.all_reduce(
        torch.ones(9, dtype=[torch.int32, torch.int64][r % 2])
    ),
    "another root": lambda r: dist.broadcast(torch.ones(90_000), r // 2),
    "another collective": lambda r: (
        dist.barrier() if r == 2 else dist.all_reduce(torch.ones(90_000))
    ),
    "tables": lambda r: dist.all_to_all(
        [torch.empty(2) for _ in range(4)], [torch.empty(2 + (r == 1)) for _ in range(4)]
    ),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.narrow({"what": ["another size on one host", "tables"]})
def test_ranks_that_disagree_raise_the_same_on_all(what):
    messages = run_ranks(disagreeing, 4, hosts=TWO, args=(CALLS[what],))
    assert len(set(messages)) == 1
    assert "rank 3" in messages[0] or "rank 1" in messages[0]


@pytest.mark.on_ranks(4, hosts=(3, 1))
def test_halves_are_rounded_twice():
    """Each host's sum and the result are rounded, and nothing else."""
    host = torch.tensor(1 + 3 * 2.0**-9).bfloat16()  # rounded after each addition, it would be 1
    expected = (host.float() + 2.0**-9).bfloat16().item()
    assert expected > 1.0
    mine = [1.0, 3 * 2.0**-10, 3 * 2.0**-10, 2.0**-9][dist.get_rank()]
    x = torch.full((50_000,), mine, dtype=torch.bfloat16)
    dist.all_reduce(x)
    assert x.unique().tolist() == [expected]
    y = torch.full((50_000,), 60_000.0, dtype=torch.float16)
    dist.all_reduce(y, dist.ReduceOp.AVG)  # its sum would overflow
    assert y.unique().tolist() == [60_000.0]


def random_sums(count):
    torch.manual_seed(dist.get_rank())
    x = torch.randn(count)
    total = x.clone()
    dist.all_reduce(total)
    return x, total


@pytest.mark.parametrize("hosts", [(2, 2), (1, 3), (2, 1, 2)], ids=str)
@pytest.mark.narrow({"hosts": (1, 3)})
def test_all_ranks_get_the_same_bits(hosts):
    for count in (40, 700, 50_000, 1_000_003):
        results = run_ranks(random_sums, sum(hosts), hosts=hosts, args=(count,))
        expected = torch.stack([x for x, _ in results]).double().sum(0)
        for _, total in results:
            assert torch.equal(total, results[0][1])
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_invalid_options():
    def wrong():
        with pytest.raises(ArgumentTypeError, match="pg_options"):
            dist.new_group(backend="shm", pg_options="host")

    with pytest.raises(ArgumentTypeError, match="engine is 3"):
        Options(engine=3)
    with pytest.raises(ArgumentTypeError, match="host is 3"):
        Options(host=3)
    run_ranks(wrong, 1)
    with pytest.raises(ArgumentError, match=r"hosts has \[2, 1\]"):
        run_ranks(wrong, 4, hosts=(2, 1))


@pytest.mark.on_ranks(3, hosts=(2, 1))
def test_invalid_messages():
    x = torch.ones(3)
    with pytest.raises(ArgumentError, match="tag is -1"):
        dist.group.WORLD.send([x], 1 - dist.get_rank() % 2, -1)
    with pytest.raises(ArgumentError, match="dst is rank"):
        shm_backend_of(dist.group.WORLD).send([x], dist.get_rank(), 0)


AT_EXIT = """
import os, sys, torch, torch.distributed as dist, gradwire.shm
rank = int(os.environ["RANK"])
options = gradwire.shm.Options(host=f"host {rank // 2}")
dist.init_process_group("shm", pg_options=options)
x = torch.full((100_000,), 1.0)
dist.all_reduce(x)
work = dist.all_reduce(x, async_op=True)
work.wait()
print(f"{rank} {x[0].item()}\\n", end="")  # one write: the ranks share a pipe
"""


def test_processes_may_end_without_leaving(run):
    done = run(AT_EXIT, ranks=4)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["0", "1", "2", "3"] + ["16.0"] * 4)


def left_behind():
    def open_now():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    options = Options(host=names(TWO)[dist.get_rank()])
    counts = []
    for _ in range(3):
        group = dist.new_group(backend="shm", pg_options=options)
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        if counts:  # a thread destroys the engine between hosts
            wait_until(lambda: open_now() == counts[-1], 20)
        else:
            time.sleep(1)
        counts.append(open_now())
    return counts[1] == counts[2]


def test_groups_leak_nothing():
    assert all(run_ranks(left_behind, 4, backend="gloo"))


# -- torchrun on two hosts


TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=2", "--master-port=29500"]
PROGRAM = """
import torch
import torch.distributed as dist
from gradwire import DistributedDataParallel

dist.init_process_group("shm")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
print("trained", model.module.weight.tolist())
dist.destroy_process_group()
"""


@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts can be made: {why_no_hosts()}")
@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "backend"), [(1, "gloo"), (2, "shm")])
def test_ranks_on_two_hosts_train(tmp_path: Path, ranks: int, backend: str) -> None:
    logs, program = [tmp_path / "first", tmp_path / "second"], tmp_path / "train.py"
    program.write_text(PROGRAM)
    with Hosts([ranks, ranks]) as hosts:
        common = [f"--nproc-per-node={ranks}", f"--master-addr={hosts.address(0)}"]
        nodes = []
        for host, log in enumerate(logs):
            there = [*hosts.command(host), "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
            command = [*TORCHRUN, *common, f"--node-rank={host}", str(program)]
            with log.open("w") as out:
                nodes.append(
                    subprocess.Popen([*there, sys.executable, *command], stdout=out, stderr=out)
                )
        try:
            codes = [node.wait(110) for node in nodes]
        finally:
            for node in nodes:
                node.terminate()  # not killed: torchrun ends its ranks
                node.wait()
    text = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    assert text.count("this group runs on Gloo, not on shm") == (backend == "gloo")
    trained = [line for line in text.splitlines() if line.startswith("trained")]
    assert len(trained) == 2 * ranks
    assert len(set(trained)) == 1
