"""Goodput of training across sites with slow links, whose processes are killed and links cut.

Sites are network namespaces of this machine, each with one process, and a cable of limited rate to
a switch. Every 30 seconds a process gets SIGKILL or a cable is cut, in turn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.alternate import OURS
from benchmarks.benchmark import Benchmark
from benchmarks.hosts import INTERFACE, Hosts
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.sites_members import INNER_SECONDS, Site, ddp_loss, make_data, network
from benchmarks.stats import Spread

__all__ = ["BENCHMARK", "Case", "Outcome", "measure", "outcome"]

SECONDS = 180.0
"""Time of a run without faults."""
BETWEEN_FAULTS, CUT_SECONDS = 30.0, 2.0
TORCHFT = "torchft"
DDP = "plain DDP"
DDP_SEEDS = range(5)
AT_ONCE = 2
"""Cases that are measured at once: computing is mostly sleep."""
PORT = 29400
BURST = "3200b"  # two packets: a larger one would let an exchange pass at once
LIMIT = 4 * SECONDS  # a run that takes longer has failed


@dataclass(frozen=True)
class Case:
    """Sites with links of a rate.

    Args:
        name: Name of the case.
        sites: Number of sites.
        rate: Bits a second of a cable in each direction.
        inner: Inner steps of a shard between two exchanges.
        shards: Shards of an outer step, over all sites.
        learning: Learning rate at the beginning, and the momentum of the outer optimizer.
        beside: The same for torchft, which has one replica for each site; None to leave it out.
    """

    name: str
    sites: int
    rate: float
    inner: int
    shards: int
    learning: tuple[float, float]
    beside: tuple[float, float] | None = None

    @property
    def outer_seconds(self) -> float:
        """Computing time of an outer step, for the site with the most shards."""
        return -(-self.shards // self.sites) * self.inner * INNER_SECONDS

    @property
    def steps(self) -> int:
        """Outer steps of a run."""
        return round(SECONDS / self.outer_seconds)


CASES = [
    Case(
        "2 sites, 100 Mbit/s", 2, 100e6, inner=5, shards=4, learning=(1.0, 0.7), beside=(1.0, 0.3)
    ),
    Case("2 sites, 10 Mbit/s", 2, 10e6, inner=12, shards=4, learning=(1.0, 0.7), beside=(1.0, 0.3)),
    Case("3 sites, 100 Mbit/s", 3, 100e6, inner=10, shards=8, learning=(1.5, 0.7)),
    Case("3 sites, 10 Mbit/s", 3, 10e6, inner=13, shards=8, learning=(1.5, 0.7)),
]


# --- one run ---


@dataclass
class Events:
    """Lines of a run's log."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def read(self) -> None:
        """Take in the lines that were added."""
        text = self.path.read_text(encoding="utf-8")[self._read :]
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole)
        self.lines += map(json.loads, whole.splitlines())

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds."""
        return [line for line in self.lines if line["event"] in kinds]


def run(kind: str, case: Case, rate: float | None, faults: bool, data: Path) -> Events:
    """Train across sites; return the log, with the faults.

    Raises:
        RuntimeError: A site failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts([1] * case.sites) as hosts:
        log = Path(folder) / "log"
        log.touch()
        events = Events(log)
        hosts.limit(None if rate is None else f"{rate:.0f}bit", BURST)
        store = f"{hosts.address(0)}:{PORT}"
        learning = case.beside if kind == TORCHFT and case.beside else case.learning
        sites = [
            Site(
                kind, number, case.sites, hosts.address(number), store, case.inner, case.shards,
                case.steps, learning, str(data), str(log),
            )
            for number in range(case.sites)
        ]  # fmt: skip
        with _started(_serve(kind, hosts), *(_site(site, hosts) for site in sites)) as processes:
            _disturb(hosts, events, processes, faults)
        return events


def _serve(kind: str, hosts: Hosts) -> list[str]:
    address = f"{hosts.address(0)}:{PORT}"
    if kind == TORCHFT:
        program = (
            "import time; from torchft.coordination import LighthouseServer; server = "
            f"LighthouseServer(bind='{address}', min_replicas=1, heartbeat_timeout_ms=1000, "
            "join_timeout_ms=2000); time.sleep(1e6)"
        )
        return [*hosts.command(0), sys.executable, "-c", program]
    return [*hosts.command(0), sys.executable, "-m", "gradwire.elastic", "--serve", address]


def _site(site: Site, hosts: Hosts) -> list[str]:
    program = [sys.executable, "-m", "benchmarks.sites_members", json.dumps(asdict(site))]
    return [*hosts.command(site.number), *program]


@contextlib.contextmanager
def _started(*commands: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]  # where `-m` finds the members' program
    processes = [
        subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
        for command in commands
    ]
    for process in processes:
        with contextlib.suppress(OSError):  # other programs should not change the figures
            Path(f"/proc/{process.pid}/autogroup").write_text("-10")
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _disturb(
    hosts: Hosts, events: Events, processes: list[subprocess.Popen[bytes]], faults: bool
) -> None:
    """Wait for the end, with a fault every 30 s."""
    draw, began = random.Random(0), time.monotonic()
    due, cut_until, cut = BETWEEN_FAULTS / 2, 0.0, 0
    kinds = itertools.cycle(("kill", "cut"))
    count = len(hosts.ranks)
    while any(process.poll() is None for process in processes[1:]):
        time.sleep(0.05)
        now = time.monotonic()
        events.read()
        if now - began > LIMIT or any(process.poll() for process in processes):
            codes = [process.poll() for process in processes]
            raise RuntimeError(f"sites failed, or took too long: exit codes {codes}")
        if cut and now > cut_until:
            _cable(hosts, cut, "up")
            cut = 0
        first = [line["began"] for line in events.of("committed") if line["size"] == count]
        if not faults or not first or events.of("end") or now - min(first) < due:
            continue
        due += BETWEEN_FAULTS
        if next(kinds) == "cut":
            cut, cut_until = draw.randrange(1, count), now + CUT_SECONDS
            _cable(hosts, cut, "down")
            events.lines.append({"event": "fault", "kind": "cut", "site": cut, "time": now})
            continue
        site = draw.randrange(count)
        pids = [line["pid"] for line in events.of("start") if line["site"] == site]
        os.kill(pids[-1], signal.SIGKILL)
        events.lines.append({"event": "fault", "kind": "kill", "pid": pids[-1], "time": now})
    events.read()


def _cable(hosts: Hosts, site: int, state: str) -> None:
    command = [*hosts.command(site), "ip", "link", "set", "dev", INTERFACE, state]
    subprocess.run(command, check=True)


# --- what a log shows ---


@dataclass(frozen=True)
class Outcome:
    """Figures of a run.

    Args:
        rate: Committed samples a second.
        exposed: Share of an outer step that its exchange takes after the last site has computed:
            median over the steps that all sites committed together.
        loss: Loss at the end.
        digests: Digests of the parameters at the end, one for each site.
        faults: Number of faults.
        lost: Seconds that a fault cost.
        wrong: Outer steps of which a shard was counted not at all, or twice.
        samples: Number of committed samples.
    """

    rate: float
    exposed: float
    loss: float
    digests: frozenset[str]
    faults: int
    lost: float
    wrong: int
    samples: int


def outcome(events: Events, sites: int, shards: int) -> Outcome:
    """Return the figures of a run that has ended."""
    by_step = defaultdict[int, list[dict[str, Any]]](list)
    for line in events.of("committed"):
        by_step[line["step"]].append(line)
    whole = [by_step[s] for s in sorted(by_step) if {x["size"] for x in by_step[s]} == {sites}]
    first = whole[0][0]  # from here, all take part; torchft begins with one
    steps = [step for step in sorted(by_step) if step >= first["step"]]
    ended = [min(line["time"] for line in by_step[step]) for step in steps]
    seconds = ended[-1] - ended[0]
    samples = by_step[steps[-1]][0]["samples"]
    whole = [lines for lines in whole if len(lines) == sites]
    exposed = [_last(s, "time") - _last(s, "computed") for s in whole]
    taken = [_last(s, "time") - min(x["began"] for x in s) for s in whole]
    faults = len(events.of("fault"))
    usual = median(b - a for a, b in itertools.pairwise(ended))
    ends = events.of("end")
    return Outcome(
        rate=(samples - first["samples"]) / seconds,
        exposed=median(map(truediv, exposed, taken)),
        loss=max(line["loss"] for line in ends),
        digests=frozenset(line["digest"] for line in ends),
        faults=faults,
        lost=(seconds - usual * (len(steps) - 1)) / max(1, faults),
        wrong=_wrong(events, shards),
        samples=samples,
    )


def _last(lines: Sequence[Mapping[str, Any]], what: str) -> float:
    return max(float(line[what]) for line in lines)


def _wrong(events: Events, shards: int) -> int:
    """Count the outer steps whose last reduction did not have each shard once."""
    last: dict[int, int] = {}
    counted = defaultdict[tuple[int, int], Counter[int]](Counter)
    for line in events.of("reduced"):
        step, generation = line["step"], line["generation"]
        last[step] = max(last.get(step, 0), generation)
        counted[step, generation].update(line["shards"])
    once = Counter(range(shards))
    return sum(counted[key] != once for key in last.items())


# --- the benchmark ---


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Measure each case; torchft, too, where it is installed.

    Raises:
        AssertionError: The ledger is not exact, or bits differ from the run without faults.
    """
    installed = importlib.util.find_spec(TORCHFT) is not None
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        make_data(data)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            beside = {
                case: [OURS, TORCHFT][: 1 + (installed and case.beside is not None)]
                for case in cases
            }
            return list(pool.map(partial(measure_case, data), *zip(*beside.items(), strict=True)))


def measure_case(data: Path, case: Case, contenders: Sequence[str]) -> CaseResult:
    """Run a case without a limit and faults, and with both, at once."""
    say(f"{case.name}: {case.steps} outer steps in {SECONDS:.0f} s or more")
    found: dict[str, tuple[Outcome, Outcome]] = {}
    with ThreadPoolExecutor() as pool:
        runs = {
            name: [
                pool.submit(run, name, case, rate, faults, data)
                for rate, faults in ((None, False), (case.rate, True))
            ]
            for name in contenders
        }
        for name, futures in runs.items():
            plain, faulty = (outcome(f.result(), case.sites, case.shards) for f in futures)
            found[name] = plain, faulty
            say(f"{case.name}: {name}, {plain}, {faulty}")
    plain, faulty = found[OURS]
    if faulty.wrong or len(plain.digests | faulty.digests) > 1:
        raise AssertionError(f"{case.name}: {faulty.wrong} wrong steps, {plain}, {faulty}")
    losses = [ddp_loss(data, seed, case.sites, faulty.samples) for seed in DDP_SEEDS]
    return CaseResult(case.name, _prediction(case), 1, _measures(found, losses))


def _measures(
    found: Mapping[str, tuple[Outcome, Outcome]], losses: Sequence[float]
) -> list[Measure]:
    def of(name: str, unit: str, value: Callable[[Outcome, Outcome], float]) -> Measure:
        values = {who: value(*outcomes) for who, outcomes in found.items()}
        return Measure(name, unit, {who: Spread(x, x, x) for who, x in values.items()}, {})

    loss = of("loss at the end", "mnat", lambda plain, faulty: 1e3 * faulty.loss)
    ddp = Spread(*(1e3 * value for value in (median(losses), min(losses), max(losses))))
    return [
        of("goodput", "%", lambda plain, faulty: 100 * faulty.rate / plain.rate),
        of("exposed exchange", "% of an outer step", lambda plain, faulty: 100 * faulty.exposed),
        of("cost of a fault", "s", lambda plain, faulty: faulty.lost),
        of("faults", "", lambda plain, faulty: faulty.faults),
        replace(loss, contenders={**loss.contenders, DDP: ddp}),
    ]


def _prediction(case: Case) -> str:
    numel = sum(parameter.numel() for parameter in network().parameters())
    exchange = 2 * (case.sites - 1) / case.sites * 4 * numel * 8 / case.rate
    return (
        f"An outer step computes for {case.outer_seconds:.1f} s, and its exchange of "
        f"{4 * numel / 1e3:.0f} kB takes {1e3 * exchange:.0f} ms on the link."
    )


BENCHMARK = Benchmark(
    "sites",
    "Goodput across sites with slow links, kills and cuts",
    CASES,
    measure,
    rounds=1,
    own_worlds=True,
)
