"""Members on several hosts, which are namespaces of networks and processes with a link between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.test_faults import LONG, Members, members, quiet, served_by_program

__all__ = ["members", "quiet"]  # fixtures

LINK = """
ip link set lo up
ip addr add 10.78.0.{number}/24 dev link0
ip link set link0 up
"""
STORE = "10.78.0.1:29417"
# a host's namespaces, whose first process ends with its parent
NEW = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]


class Hosts:
    """Two hosts; processes that are started in them begin with `inside`."""

    def __init__(self) -> None:
        self._outside = [subprocess.Popen([*NEW, "sleep", "600"]) for _ in range(2)]
        try:
            self._pids = [_child(process.pid) for process in self._outside]
            made = f"ip link add link0 type veth peer name link0 netns {self._pids[1]}"
            self.call(0, made)
            for host in range(2):
                self.call(host, LINK.format(number=host + 1))
        except BaseException:
            self.close()
            raise

    def inside(self, host: int) -> list[str]:
        """Prefix of a command that runs on a host."""
        return ["nsenter", "-t", str(self._pids[host]), "--net", "--pid", "--mount"]

    def call(self, host: int, script: str) -> None:
        """Run a script in a host's network."""
        network = ["nsenter", "-t", str(self._pids[host]), "--net"]
        subprocess.run([*network, "sh", "-ec", script], check=True)

    def close(self) -> None:
        """End all that runs on them."""
        for process in self._outside:
            process.kill()
            process.wait()


def _child(pid: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        # it has its namespaces once it runs its program
        if text and Path(f"/proc/{text.split()[0]}/comm").read_text().strip() == "sleep":
            return int(text.split()[0])
        time.sleep(0.02)
    raise TimeoutError("no namespace")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.getuid() or not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        pytest.skip("namespaces take root, unshare, nsenter and ip")
    tried = subprocess.run(
        [*NEW, "ip", "link", "add", "link0", "type", "veth"],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if tried.returncode:
        pytest.skip("no host can be made here")
    found = Hosts()
    yield found
    found.close()


pytestmark = [pytest.mark.wide, pytest.mark.timeout(300)]


def test_a_member_of_each_host_is_killed(hosts: Hosts, members: Members, quiet: str) -> None:
    with served_by_program(STORE, hosts.inside(0)):
        for host in range(2):
            launcher = [*hosts.inside(host), *_python()]
            members.start(STORE, count=2, members=4, timeout=60.0, backend="shm", launcher=launcher)
        members.until_together(4)
        for process in members.processes[::2]:
            os.kill(_child_of(process), 9)
        ends = members.until_ended(2)
    assert [end.get("digest", end) for end in ends] == [quiet] * 2


@LONG
def test_a_host_is_cut_off(hosts: Hosts, members: Members, quiet: str) -> None:
    with served_by_program(STORE, hosts.inside(0)):
        for host in range(2):
            launcher = [*hosts.inside(host), *_python()]
            members.start(STORE, members=2, pause=0.1, launcher=launcher)
        members.until_together(2)
        hosts.call(1, "ip link set link0 down")
        cut = time.monotonic()
        ends = members.until_ended(2)
    assert sorted("digest" in end for end in ends) == [False, True], ends
    for end in ends:
        if "digest" in end:  # with the store's host: it went on alone
            assert end["digest"] == quiet
        else:
            assert "DistributedError" in end["error"], end
            assert end["time"] - cut < 60.0


@LONG
def test_a_host_is_cut_off_and_comes_back(hosts: Hosts, members: Members) -> None:
    with served_by_program(STORE, hosts.inside(0)):
        for host in range(2):
            launcher = [*hosts.inside(host), *_python()]
            members.start(STORE, members=2, pause=0.1, steps=400, timeout=60.0, launcher=launcher)
        members.until_together(2)
        hosts.call(1, "ip link set link0 down")
        members.until(lambda: members.lines("step")[-1]["size"] == 1, "nobody went on alone")
        hosts.call(1, "ip link set link0 up")
        ends = members.until_ended(2)
    assert len({end.get("digest", str(end)) for end in ends}) == 1, ends
    assert members.lines("step")[-1]["size"] == 2


def _python() -> list[str]:
    return ["env", "GLOO_SOCKET_IFNAME=link0", sys.executable]


def _child_of(process: subprocess.Popen[bytes]) -> int:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return int(text.split()[0])
