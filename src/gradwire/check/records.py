"""Records of the ranks of a run, and the findings of checks in them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.check.observer import ALONE, LIMIT_PREFIX
from gradwire.errors import ArgumentError

Event = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A mistake in a program.

    Args:
        check: Name of the check.
        finds: Mistake that the check looks for.
        summary: Description with the values that show it.
        remedy: Advice for the program.
        ranks: Ranks that it was seen on.
        line: Line of the program, as "file:line"; "" if unknown.
        tensor: Parameter or tensor; "" if none.
        step: Number of optimizer steps before it.
    """

    check: str
    finds: str
    summary: str
    remedy: str
    ranks: tuple[int, ...]
    line: str = ""
    tensor: str = ""
    step: int = 0


@dataclass(frozen=True)
class Replicas:
    """A wrapped module that has the same trainable parameters on all ranks of its group."""

    number: int | str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    line: str = ""


def differing(events: Sequence[Event], field: str) -> str | None:
    """Return the name of the first parameter whose digests differ between ranks at a step."""
    if any(event["names"] != events[0]["names"] for event in events):
        return None
    for name, *digests in zip(events[0]["names"], *(e[field] for e in events), strict=True):
        if None not in digests and len(set(digests)) > 1:
            return str(name)
    return None


def is_backward(event: Event, model: Replicas) -> bool:
    """Return True for a backward before which a model's wrapper, or a part of it, was called."""
    if event["kind"] != "backward":
        return False
    return model.number in event["models"] or str(model.number) in event["around"]


def _key(event: Event) -> tuple[Any, ...]:
    return event["kind"], event.get("optimizer"), event.get("number")


@dataclass
class Epoch:
    """One iteration of a data loader on a rank."""

    begin: Event
    batches: list[Event] = field(default_factory=list)
    exhausted: int | None = None  # number of batches, if the loader reached its end
    trained: int = 0  # number of backwards after its batches


class Run:
    """Events of all ranks, in the order in which each rank wrote them."""

    def __init__(self, events: Sequence[Sequence[Event]]) -> None:
        self.events = events
        self.ranks = range(len(events))
        self.wider: Run | None = None  # of the same program, on more ranks
        self._windows: dict[Any, dict[Any, list[Event]]] = {}

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the files of all ranks; the last line may be incomplete if a rank was killed."""
        ranks: list[list[Event]] = []
        while (path := folder / f"rank-{len(ranks)}.jsonl").exists():
            events = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    break
            ranks.append(events)
        return cls(ranks)

    def of(self, kind: str, rank: int) -> list[Event]:
        """Return a rank's events of a kind."""
        return [event for event in self.events[rank] if event["kind"] == kind]

    def any(self, kind: str) -> bool:
        """Return True if a rank has an event of a kind."""
        return any(self.of(kind, rank) for rank in self.ranks)

    def ended(self, rank: int) -> str:
        """Return how a rank's file ends: "end", "limit", "error", or "" if it was killed."""
        kinds = (event["kind"] for event in self.events[rank])
        return next((kind for kind in kinds if kind in ("end", "limit", "error")), "")

    def replicas(self) -> list[Replicas]:
        """Return the wrapped modules in use, with at least two ranks that agree on parameters."""
        found: dict[tuple[int, tuple[int, ...]], list[Event]] = {}
        for rank in self.ranks:
            used = {e["model"] for e in self.of("forward", rank)}
            used |= {int(model) for e in self.of("backward", rank) for model in e["around"]}
            models = [e for e in self.of("model", rank) if e["model"] in used]
            for model in {e["model"]: e for e in models}.values():
                found.setdefault((model["model"], tuple(model["ranks"])), []).append(model)
        return [
            Replicas(number, ranks, tuple(models[0]["names"]), models[0]["line"])
            for (number, ranks), models in found.items()
            if len(models) == len(ranks) > 1
            and all(m["names"] == models[0]["names"] for m in models)
        ]

    def alone(self) -> list[Replicas]:
        """Return the parameters of optimizers that have no wrapper, as one more model."""
        stepped = all(
            any(ALONE in e["models"] for e in self.of("stepped", rank)) for rank in self.ranks
        )
        return [Replicas(ALONE, tuple(self.ranks), ())] if stepped and len(self.ranks) > 1 else []

    def forwards(self, model: Replicas, rank: int) -> list[Event]:
        """Return a rank's training forwards of a model."""
        return [
            e
            for e in self.of("forward", rank)
            if e["model"] == model.number and e["gradients"] and e["training"]
        ]

    def steps(self, kind: str, model: Replicas) -> Iterator[list[Event]]:
        """Yield the events of the model's ranks at each step of each optimizer, in order.

        Each event also has the fields of the model's state.
        """
        number = str(model.number)
        by_rank: list[dict[tuple[int, int], Event]] = [
            {
                (e["optimizer"], e["number"]): e | e["models"][number]
                for e in self.of(kind, rank)
                if number in e["models"]
            }
            for rank in model.ranks
        ]
        for key in by_rank[0]:
            found = [events[key] for events in by_rank if key in events]
            if len(found) == len(by_rank):
                yield found

    def windows(self, events: Sequence[Event], model: Replicas) -> list[list[Event]]:
        """Return the events between the last step of a model and one of each rank."""
        return [self._window(r, _key(e), model) for r, e in zip(model.ranks, events, strict=True)]

    def _window(self, rank: int, key: Any, model: Replicas) -> list[Event]:
        found = self._windows.get((rank, model.number))
        if found is None:
            found = self._windows[rank, model.number] = {}
            current: list[Event] = []
            for event in self.events[rank]:
                if event["kind"] in ("step", "stepped"):
                    found[_key(event)] = list(current)
                current.append(event)
                if event["kind"] == "stepped" and str(model.number) in event["models"]:
                    current.clear()
        return found[key]

    def hooked(self, model: Replicas) -> bool:
        """Return True if a hook of the program's own replaces the mean of the gradients."""
        return any(e["hooked"] for events in self.steps("stepped", model) for e in events)

    def epochs(self, rank: int) -> dict[Any, Epoch]:
        """Return a rank's iterations of data loaders, by loader and number."""
        found: dict[Any, Epoch] = {}
        latest: Epoch | None = None
        for event in self.events[rank]:
            kind, key = event["kind"], (event.get("loader"), event.get("epoch"))
            if kind == "epoch":
                found[key] = Epoch(event)
            elif kind == "batch" and key in found:
                latest = found[key]
                latest.batches.append(event)
            elif kind == "exhausted" and key in found:
                found[key].exhausted = event["batches"]
            elif kind == "backward" and latest is not None:
                latest.trained += 1
        return found

    def reductions(self, model: Replicas) -> list[list[list[Event]]]:
        """Return the backwards of each reduction of a model, by reduction and rank.

        Those of an accumulation are one reduction. Each has "last" in addition: True if a data
        loader ended next to it.
        """
        by_rank: list[list[list[Event]]] = [[[]] for _ in model.ranks]
        for rank, found in zip(model.ranks, by_rank, strict=True):
            ended, previous = False, None
            for event in self.events[rank]:
                if event["kind"] == "exhausted":
                    ended = True
                    if previous is not None:
                        previous["last"] = True
                elif event["kind"] in ("forward", "batch"):
                    previous = None
                elif is_backward(event, model):
                    previous = event | {"last": ended}
                    ended = False
                    found[-1].append(previous)
                    if model.number in event["syncs"] or model.number not in event["models"]:
                        found.append([])
                elif event["kind"] == "stepped" and found[-1] and model.number == ALONE:
                    found.append([])
            found.pop()  # not reduced
        return [list(ranks) for ranks in zip(*by_rank, strict=False)]


def seen(
    text: str, at: Event, ranks: Iterable[int], line: str = "", tensor: str = "", remedy: str = ""
) -> Finding:
    """Return a finding at an event, without what its check adds."""
    return Finding("", "", text, remedy, tuple(ranks), line or at["line"], tensor, at["step"])


@dataclass(frozen=True)
class Check:
    """A kind of mistake.

    Args:
        name: Name for `--only` and `--skip`.
        finds: The mistake.
        remedy: Advice for the program.
        evidence: Observations without which the check is silent.
        search: Function of a run, and of each of its models if `of_models`.
        explains: Names of checks whose findings follow from this one's.
        on_request: True if only `--only` runs it, because correct programs have findings, too.
        of_models: True if the check looks at each model.
    """

    name: str
    finds: str
    remedy: str
    evidence: str
    search: Callable[..., Iterable[Finding]]
    explains: tuple[str, ...] = ()
    on_request: bool = False
    of_models: bool = True

    def conclude(self, run: Run) -> list[Finding]:
        """Return what a run shows."""
        calls = [(run, model) for model in run.replicas()] if self.of_models else [(run,)]
        found = [finding for call in calls for finding in self.search(*call)]
        return [
            replace(f, check=self.name, finds=self.finds, remedy=f.remedy or self.remedy)
            for f in found
        ]


CHECKS: list[Check] = []
"""All checks, in the order of their definitions, which is that of the report."""


def check(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a function as a check, by its name and docstring."""
    # the docstring's paragraphs are what it finds, the evidence, and the remedy

    def add(search: Any) -> Any:
        texts = [" ".join(text.split()) for text in (search.__doc__ or "").split("\n\n")]
        finds, evidence, remedy = texts
        name = search.__name__.removeprefix("_").replace("_", "-")
        CHECKS.append(Check(name, finds.rstrip("."), remedy, evidence, search, **options))
        return search

    return add


def choose(
    checks: Sequence[Check], only: Sequence[str] = (), skip: Sequence[str] = ()
) -> list[Check]:
    """Return the checks with some names, or all but some and those that run on request.

    Raises:
        ArgumentError: There is no check of a name.
    """
    names = [check.name for check in checks]
    for name in (*only, *skip):
        if name not in names:
            raise ArgumentError(f"{name!r} is not a check: pass one of {', '.join(names)}")
    chosen = [c for c in checks if (c.name in only if only else not c.on_request)]
    return [c for c in chosen if c.name not in skip]


def conclude(run: Run, checks: Sequence[Check]) -> list[Finding]:
    """Return the findings of some checks, without those that follow from others."""
    found = {check.name: check.conclude(run) for check in checks}
    explained = {name for check in checks if found[check.name] for name in check.explains}
    return [f for check in checks if check.name not in explained for f in found[check.name]]


_Process = subprocess.Popen[bytes]
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
"""Time for the other ranks to end after one has failed."""
_START_SECONDS = 120.0
"""Time for the ranks to import PyTorch, in addition to the timeout."""
_STDERR = 2


@dataclass(frozen=True)
class Outcome:
    """End of a checked program."""

    run: Run
    failed: dict[int, int]  # exit codes of ranks that failed by themselves
    stalled: bool  # nothing happened for too long


def run_ranks(
    program: Sequence[str], ranks: int, steps: int, timeout: float, *, trace: bool = False
) -> Outcome:
    """Run a program on the ranks of this host, and return what they recorded."""
    # ranks are ended after `steps` optimizer steps of each (0 for no limit), or after `timeout`
    # seconds without an event of any; program is a file or "-m" and a module, with arguments
    with tempfile.TemporaryDirectory(prefix="gradwire-check-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", __package__, name, str(steps), str(+trace), *program]
        # the output of a second run would only be in the way, and so would waiting for its errors
        output, end = (subprocess.DEVNULL, 0.0) if trace else (_STDERR, _END_SECONDS)
        with _started(command, ranks, output) as processes:
            stalled = _wait(processes, folder, timeout, end)
            codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        return Outcome(Run.read(folder), failed, stalled)


@contextmanager
def _started(command: Sequence[str], ranks: int, output: int) -> Iterator[list[_Process]]:
    """Start the ranks with torchrun's environment variables; none is left at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "gradwire-check",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GRADWIRE_LAUNCHER": str(os.getpid()),
    }
    processes: list[_Process] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            environment = os.environ | common | own
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[_Process], folder: Path, timeout: float, end: float) -> bool:
    """Wait for the last observed step or the end; return True if nothing happened for too long."""
    failed_at = None
    while True:
        codes = [process.poll() for process in processes]
        limits = [(folder / f"{LIMIT_PREFIX}{rank}").exists() for rank in range(len(codes))]
        over = all(code == 0 or limit for code, limit in zip(codes, limits, strict=True))
        if None not in codes or over:
            return False
        if any(codes):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + end:
                return False
        files = list(folder.iterdir())
        latest = max(path.stat().st_mtime for path in [folder, *files])
        if time.time() > latest + timeout + _START_SECONDS * (len(files) < len(codes)):
            return True
        time.sleep(_POLL_SECONDS)
