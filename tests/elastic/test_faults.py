"""Failures around a run: of its store, hosts, network, launcher and memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hosts import INTERFACE, Hosts, why_no_hosts

from elastic import program
from elastic.kills import Members, serve
from gradwire._processes import ENDED, stat_of, wait_until

PROGRAM = Path(__file__).with_name("program.py")
LONG = pytest.mark.skipif(os.environ.get("GRADWIRE_LONG") != "1", reason="GRADWIRE_LONG=1")
LIMIT = 200.0
STEPS = 40

pytestmark = [pytest.mark.wide, pytest.mark.timeout(300)]


def run_program(
    number: int, environment: dict[str, str], arguments: Sequence[Any], pipe: Any
) -> None:
    os.environ.update(environment)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    program.main(*arguments)


class Programs(Members):
    """Programs that train, and what they have written.

    They go no further than to their last step before `until_ended` is called.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.log = folder / "log"
        self.log.touch()
        self.launched: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        store: str,
        *,
        count: int = 1,
        members: int,
        steps: int = STEPS,
        pause: float = 0.01,
        backend: str = "gloo",
        timeout: float = 10.0,
        mode: str = "",
        launcher: Sequence[str] = (),
    ) -> None:
        """Start some more of the members of a run; without a launcher, in forked processes."""
        names = {"GRADWIRE_ELASTIC_STORE": store, "GRADWIRE_ELASTIC_MEMBERS": str(members)}
        names["MODE"] = mode
        arguments = (str(self.log), steps, pause, backend, timeout)
        for _ in range(count):
            if not launcher:
                self.fork(run_program, names, arguments)
                continue
            process = subprocess.Popen(
                [*launcher, str(PROGRAM), *map(str, arguments)],
                env={**os.environ, **names},
                stderr=subprocess.DEVNULL,
            )
            self.launched.append(process)

    def lines(self, key: str) -> list[dict[str, Any]]:
        """Return the lines that have a key."""
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [line for line in map(json.loads, whole) if key in line]

    def trained(self) -> dict[int, int]:
        """The last step that each process has committed."""
        return {line["pid"]: line["step"] for line in self.lines("step")}

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait."""
        assert wait_until(holds, LIMIT), f"{what}: {self.log.read_text()[-2000:]}"

    def until_trained(self, count: int, steps: int = 3) -> list[int]:
        """Wait until so many processes have committed some steps; their ids."""

        def holds() -> bool:
            return sum(step >= steps for step in self.trained().values()) >= count

        self.until(holds, f"{count} members did not train")
        return sorted(self.trained())

    def until_together(self, size: int) -> None:
        """Wait until a generation has `size` members; the first may begin without late ones."""
        self.until(
            lambda: sum(line["size"] == size for line in self.lines("step")) >= 2 * size,
            f"{size} members did not train together",
        )

    def until_ended(self, count: int) -> list[dict[str, Any]]:
        """Let them end, and wait until so many have; what they wrote of it."""
        Path(f"{self.log}.go").touch()
        self.until(
            lambda: len(self.lines("digest") + self.lines("error")) >= count, "members did not end"
        )
        return self.lines("digest") + self.lines("error")

    def close(self) -> None:
        """End what is left, whole groups of processes that launchers may have made included."""
        super().close()
        for process in self.launched:
            process.terminate()
        for process in self.launched:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for line in self.lines("child"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(line["pid"], signal.SIGKILL)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Programs]:
    found = Programs(tmp_path)
    yield found
    found.close()


def serve_forked(number: int, pipe: Any) -> None:
    store = serve()
    pipe.send(store.port)
    signal.pause()


@contextlib.contextmanager
def served() -> Iterator[tuple[Any, str]]:
    """A store in a process of its own: the process, and the store's address."""
    with contextlib.closing(Members()) as stores:
        process = stores.processes[stores.fork(serve_forked)]
        while not stores.sent:
            stores.read()
            time.sleep(0.01)
        yield process, f"127.0.0.1:{stores.sent[0]}"


@contextlib.contextmanager
def served_by_program(address: str, before: Sequence[str]) -> Iterator[None]:
    """The same by a program, in another namespace."""
    command = [*before, sys.executable, "-m", "gradwire.elastic", "--serve", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert address in process.stdout.readline().decode()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@functools.cache
def digest_of(steps: int) -> str:
    """That of a run of one member in which nothing fails."""
    with tempfile.TemporaryDirectory() as folder:
        found = Programs(Path(folder))
        store = serve()
        found.start(f"127.0.0.1:{store.port}", members=1, steps=steps, pause=0.0)
        (end,) = found.until_ended(1)
        found.close()
    return str(end["digest"])


@pytest.fixture
def quiet() -> str:
    """The digest of a run in which nothing fails."""
    return digest_of(STEPS)


def test_the_store_dies_and_nobody_else(members: Programs, quiet: str) -> None:
    with served() as (store, address):
        members.start(address, count=2, members=2)
        members.until_trained(2)
        store.kill()
        ends = members.until_ended(2)
    assert [end.get("digest", end) for end in ends] == [quiet] * 2


def wakes_when_the_run_is_over(members: Programs, sleeping: int, awake: int) -> None:
    """One ends with the run's result, and the other, which sleeps until then, without any."""
    (end,) = members.until_ended(1)
    os.kill(sleeping, signal.SIGCONT)
    ends = members.until_ended(2)
    assert end["pid"] == awake
    assert "digest" in end
    (late,) = [end for end in ends if end["pid"] == sleeping]
    assert "RunOverError" in late["error"], late


def test_a_member_sleeps_until_the_others_are_done(members: Programs) -> None:
    """It trained on from its own state, alone, and ended with another result."""
    with served() as (_, address):
        members.start(address, count=2, members=2)
        sleeping, awake = members.until_trained(2)
        os.kill(sleeping, signal.SIGSTOP)
        wakes_when_the_run_is_over(members, sleeping, awake)


def test_two_members_sleep_by_turns(members: Programs) -> None:
    """Each takes the other for dead, and goes on alone: one has the run's result, and one none."""
    with served() as (_, address):
        members.start(address, count=2, members=2)
        first, second = members.until_trained(2)
        os.kill(first, signal.SIGSTOP)
        before = members.trained()[second]
        members.until(lambda: members.trained()[second] > before + 2, "the second does not go on")
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGCONT)
        wakes_when_the_run_is_over(members, sleeping=second, awake=first)


def test_the_store_dies_and_then_a_member(members: Programs) -> None:
    with served() as (store, address):
        members.start(address, count=3, members=3)
        pids = members.until_trained(3)
        store.kill()
        os.kill(pids[0], signal.SIGKILL)
        killed = time.monotonic()
        ends = members.until_ended(2)
    for end in ends:
        assert "DistributedError" in end["error"], end
        assert "store of the elastic run does not answer" in end["message"]
        assert end["time"] - killed < 30.0


def test_the_store_hangs_and_then_a_member_dies(members: Programs) -> None:
    with served() as (store, address):
        members.start(address, count=2, members=2, timeout=2.0)
        pids = members.until_trained(2)
        os.kill(store.pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        killed = time.monotonic()
        (end,) = members.until_ended(1)
    assert "DistributedError" in end["error"], end
    assert end["time"] - killed < 60.0


def test_a_member_asks_for_more_memory_than_there_is(members: Programs, quiet: str) -> None:
    with served() as (_, address):
        members.start(address, members=3, mode="memory")
        members.start(address, count=2, members=3)
        ends = members.until_ended(3)
    failed = [end for end in ends if "error" in end]
    assert [end["pid"] for end in failed] == [members.processes[0].pid]
    assert "RuntimeError" in failed[0]["error"], failed
    assert [end["digest"] for end in ends if "digest" in end] == [quiet] * 2


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=LONG)])
def test_a_member_without_memory_for_a_group(members: Programs, quiet: str, backend: str) -> None:
    with served() as (_, address):
        members.start(address, count=3, members=3, backend=backend)
        pids = members.until_trained(3)
        pages = int(Path(f"/proc/{pids[0]}/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        resource.prlimit(pids[0], resource.RLIMIT_AS, (used, used))
        os.kill(pids[1], signal.SIGKILL)
        ends = members.until_ended(1)
        while not (mine := [end for end in ends if end["pid"] == pids[2]]):
            ends = members.until_ended(len(ends) + 1)
    assert [end.get("digest", end) for end in mine] == [quiet]


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=LONG)])
def test_killed_while_a_forked_child_lives(members: Programs, quiet: str, backend: str) -> None:
    with served() as (_, address):
        members.start(address, members=2, backend=backend, mode="fork")
        members.start(address, members=2, backend=backend)
        members.until_trained(2)
        members.processes[0].kill()
        killed = time.monotonic()
        (end,) = members.until_ended(1)
    assert end["digest"] == quiet
    alone = [line["time"] for line in members.lines("step") if line["size"] == 1]
    assert min(alone) - killed < 30.0  # the child, who has the connections too, lives for 60 s


def test_the_supervisor_is_killed(members: Programs) -> None:
    launcher = [sys.executable, "-m", "gradwire.elastic", "--nproc-per-node", "2"]
    members.start("", members=2, steps=10**6, launcher=launcher)
    pids = members.until_trained(2)
    members.launched[0].kill()
    ended = lambda: all(getattr(stat_of(pid), "state", "gone") in ENDED for pid in pids)  # noqa: E731
    members.until(ended, "members outlive their supervisor")


# -- two hosts

STORE = f"{Hosts.address(0)}:29417"


def start_on_hosts(hosts: Hosts, started: Programs, **options: Any) -> None:
    for host in range(2):
        python = [*hosts.command(host), "env", f"GLOO_SOCKET_IFNAME={INTERFACE}", sys.executable]
        started.start(STORE, launcher=python, **options)


def switch(hosts: Hosts, state: str) -> None:
    """Set the second host's network "up" or "down"."""
    subprocess.run([*hosts.command(1), "ip", "link", "set", INTERFACE, state], check=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_no_hosts():
        pytest.skip(f"no hosts can be made: {reason}")
    with Hosts([1, 1]) as found:
        yield found


def test_a_member_of_each_host_is_killed(hosts: Hosts, members: Programs, quiet: str) -> None:
    with served_by_program(STORE, hosts.command(0)):
        start_on_hosts(hosts, members, count=2, members=4, timeout=60.0, backend="shm")
        members.until_together(4)
        for process in members.launched[::2]:
            process.kill()
        ends = members.until_ended(2)
    assert [end.get("digest", end) for end in ends] == [quiet] * 2


@LONG
def test_a_host_is_cut_off(hosts: Hosts, members: Programs, quiet: str) -> None:
    with served_by_program(STORE, hosts.command(0)):
        start_on_hosts(hosts, members, members=2, pause=0.1)
        members.until_together(2)
        switch(hosts, "down")
        cut = time.monotonic()
        ends = members.until_ended(2)
    assert sorted("digest" in end for end in ends) == [False, True], ends
    for end in ends:
        if "digest" in end:  # with the store's host: it went on alone
            assert end["digest"] == quiet
        else:
            assert "DistributedError" in end["error"], end
            assert end["time"] - cut < 60.0
