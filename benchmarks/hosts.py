"""Hosts to test with, on one machine: network namespaces, with a cable between each and a switch.

Processes in different ones share no network and no unix sockets, and reach each other over cables
whose rate can be limited and whose bytes can be counted.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from gradwire.errors import ArgumentError, NotSupportedError
from gradwire.testing.ranks import Pool

__all__ = ["INTERFACE", "Counters", "Hosts", "why_no_hosts"]

INTERFACE = "cable"
"""Each host's end of its cable."""
_ENTER = ["nsenter", "--user", "--net", "--preserve-credentials"]
_WAIT = "cat"  # a process that holds a namespace until its stdin, a pipe of ours, is closed
_SECONDS = 20.0


@dataclass(frozen=True)
class Counters:
    """Bytes that passed a host's cable, with the headers of all layers.

    Attributes:
        sent: From the host.
        received: By the host.
    """

    sent: int
    received: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


class Hosts(Pool):
    """Hosts for `run_ranks(fn, hosts=...)`; a context manager, which ends them.

    Args:
        ranks: Number of ranks on each host.
        rate: Rate of each cable in each direction, in `tc` syntax ("1gbit"); None for no limit.

    Raises:
        NotSupportedError: This system does not let its user make namespaces; the message says why.
        ArgumentError: No hosts, or one without ranks.
    """

    interface = INTERFACE

    def __init__(self, ranks: Sequence[int], rate: str | None = None) -> None:
        if not ranks or min(ranks) < 1:
            raise ArgumentError(f"ranks is {list(ranks)}: give one or more for each host")
        super().__init__(lambda rank: self.command(self.host_of(rank)))
        self.ranks, self.rate = tuple(ranks), rate
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        if reason := why_no_hosts():
            raise NotSupportedError(f"no hosts can be made: {reason}")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        with self.lock:
            self.close()
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            holder.wait(_SECONDS)
        self._holders.clear()

    def host_of(self, rank: int) -> int:
        """Return the host that a rank is on."""
        places = [host for host, count in enumerate(self.ranks) for _ in range(count)]
        return places[rank]

    def command(self, host: int) -> list[str]:
        """Return the command prefix that makes a command run on a host."""
        return [*_ENTER, f"--target={self._holders[host + 1].pid}"]

    @staticmethod
    def address(host: int) -> str:
        """Return a host's address."""
        return f"10.83.{host // 250}.{host % 250 + 1}"

    def counters(self) -> list[Counters]:
        """Return the bytes that have passed each host's cable so far."""
        counted = []
        for host in range(len(self.ranks)):
            text = _run([*self.command(host), "ip", "-j", "-s", "link", "show", "dev", INTERFACE])
            stats = json.loads(text)[0]["stats64"]
            counted.append(Counters(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return counted

    def limit(self, rate: str | None, burst: str = "128kb") -> None:
        """Change the rate of all cables.

        Args:
            rate: Rate, in `tc` syntax; None for no limit.
            burst: Bytes that pass an idle cable without a limit, in `tc` syntax. The default, two
                of the largest packets that the kernel hands on, costs the least computing.
        """
        for host in range(len(self.ranks)):
            _limit(self.command(host), INTERFACE, rate, burst)
            _limit(self._switch, f"port{host}", rate, burst)
        self.rate = rate

    @property
    def _switch(self) -> list[str]:
        return [*_ENTER, f"--target={self._holders[0].pid}"]

    def _make(self) -> None:
        self._hold(["unshare", "--user", "--net", "--map-root-user"])
        _run([*self._switch, "ip", "link", "add", "switch", "type", "bridge"])
        _run([*self._switch, "ip", "link", "set", "switch", "up"])
        for host in range(len(self.ranks)):
            self._hold([*self._switch, "unshare", "--net"])
            there, port = self.command(host), f"port{host}"
            pid = str(self._holders[-1].pid)
            ends = ["name", port, "type", "veth", "peer", "name", INTERFACE, "netns", pid]
            _run([*self._switch, "ip", "link", "add", *ends])
            _run([*self._switch, "ip", "link", "set", port, "master", "switch", "up"])
            _run([*there, "ip", "link", "set", "lo", "up"])
            _run([*there, "ip", "addr", "add", f"{self.address(host)}/16", "dev", INTERFACE])
            _run([*there, "ip", "link", "set", INTERFACE, "up"])
        self.limit(self.rate)

    def _hold(self, command: Sequence[str]) -> None:
        """Start a process in new namespaces, and wait until it is in them."""
        holder = subprocess.Popen(
            # it says so itself: until the last of these commands runs, it is elsewhere
            [*command, "sh", "-c", f"echo; exec {_WAIT}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        with holder.stdout as said:
            if not said.readline():
                raise NotSupportedError(f"{' '.join(command)} failed: see its message")


def _limit(there: Sequence[str], device: str, rate: str | None, burst: str) -> None:
    with contextlib.suppress(NotSupportedError):  # there may be none to delete
        _run([*there, "tc", "qdisc", "del", "dev", device, "root"])
    if rate is not None:
        size = ["burst", burst, "limit", "16mb"]  # none is dropped: TCP holds back what is queued
        _run([*there, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *size])


@cache
def why_no_hosts() -> str:
    """Return the reason why this system has no hosts; "" if hosts can be made."""
    make = "ip link add a type veth peer name b && tc qdisc add dev a root tbf rate 1gbit"
    command = ["unshare", "--user", "--net", "--map-root-user", "sh", "-c"]
    try:
        _run([*command, make.replace(" a ", " left ") + " burst 128kb limit 1mb"])
    except (OSError, NotSupportedError) as error:
        return str(error)
    return ""


def _run(command: Sequence[str]) -> str:
    """Run a command; returns what it prints.

    Raises:
        NotSupportedError: It fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise NotSupportedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
