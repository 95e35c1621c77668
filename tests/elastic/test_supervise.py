"""The supervisor: whom it starts again, for whom it waits, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradwire import elastic
from gradwire._processes import wait_until
from gradwire.elastic.__main__ import main
from gradwire.elastic.membership import (
    LAUNCH_VARIABLES,
    STORE_VARIABLE,
    Membership,
)
from gradwire.errors import DistributedError, RunOverError

# members without torch, which say what a member's `join` and its run say
START = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def tell(**fields):
    number = int(os.environ["GRADWIRE_ELASTIC_REPORTS"].partition(":")[0])
    os.write(number, json.dumps(fields).encode() + b"\\n")
def place():
    for number in range(100):
        try:
            (folder / f"start-{number}").touch(exist_ok=False)
            return number
        except FileExistsError:
            pass
def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)
tell(finished=False)
number = place()
"""


class Supervised:
    """Runs a program in supervised processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()

    def __call__(self, program: str, **options: Any) -> int:
        command = [sys.executable, "-c", START + program, str(self.folder)]
        return elastic.supervise(command, log=self.lines.append, **options)

    @property
    def starts(self) -> int:
        return len(list(self.folder.glob("start-*")))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


def test_processes_that_run_after_the_others_are_done_are_waited_for(
    supervised: Supervised,
) -> None:
    program = """
tell(finished=True)
if number == 0:
    time.sleep(0.3)
    (folder / "saved").touch()
"""
    assert supervised(program, nproc=2) == 0
    assert (supervised.folder / "saved").exists()


def test_the_end_names_the_last_failure_when_no_restarts_are_left(supervised: Supervised) -> None:
    program = "tell(member=7); sys.exit(number + 2)"
    assert supervised(program, nproc=1, max_restarts=1) == 3
    first, *_, last = supervised.lines
    assert first.startswith("started process ")
    assert "gave up after 1 restart: the last failure: process" in last
    assert "(member 7) exited with code 3; exit code 3" in last


def test_processes_with_a_recorder_have_a_rank(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_RECORDER", str(supervised.folder / "dumps"))
    monkeypatch.delenv("RANK", raising=False)
    program = """
place = os.environ["RANK"]
(folder / f"rank-{place}-{number}").touch()
if place == "1" and number < 2:
    os.kill(os.getpid(), signal.SIGKILL)
tell(finished=True)
"""
    assert supervised(program, nproc=2) == 0
    places = sorted(path.name.split("-")[1] for path in supervised.folder.glob("rank-*"))
    assert places == ["0", "1", "1"]


HANDLES = """
def handle(signum, frame):
    (folder / f"got-{number}-{signum}").touch()
    if signum != signal.SIGUSR1:
        time.sleep(SECONDS)
        sys.exit(0)
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, handle)
(folder / f"ready-{number}").touch()
until("nothing")
"""


def send(supervised: Supervised, *numbers: int) -> threading.Thread:
    """Send signals to this process when two members are ready, each when the one before came."""

    def wait(pattern: str) -> None:
        wait_until(lambda: len(list(supervised.folder.glob(pattern))) == 2, 60)

    def run() -> None:
        wait("ready-*")
        for number in numbers:
            os.kill(os.getpid(), number)
            wait(f"got-*-{number}")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_signals_are_forwarded_and_handlers_have_their_time(supervised: Supervised) -> None:
    sending = send(supervised, signal.SIGUSR1, signal.SIGTERM)
    program = HANDLES.replace("SECONDS", "0.2")
    with pytest.raises(SystemExit) as raised:
        supervised(program, nproc=2, max_restarts=5)
    sending.join()
    assert raised.value.code == 128 + signal.SIGTERM
    assert supervised.starts == 2
    got = sorted(path.name for path in supervised.folder.glob("got-*"))
    assert got == ["got-0-10", "got-0-15", "got-1-10", "got-1-15"]
    assert "killed" not in supervised.text


def test_a_handler_that_takes_too_long_is_killed(supervised: Supervised) -> None:
    sending = send(supervised, signal.SIGTERM)
    with pytest.raises(SystemExit):
        supervised(HANDLES.replace("SECONDS", "60"), nproc=2, shutdown_timeout=0.2)
    sending.join()
    assert supervised.text.count("was killed by SIGKILL") == 2


def test_an_interrupt_is_raised_after_the_processes_have_ended(supervised: Supervised) -> None:
    sending = send(supervised, signal.SIGINT)
    program = HANDLES.replace("signal.SIGTERM, ", "signal.SIGINT, ").replace("SECONDS", "0")
    with pytest.raises(KeyboardInterrupt):
        supervised(program, nproc=2)
    sending.join()
    assert len(list(supervised.folder.glob("got-*-2"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "10.0.0.1"], "--serve is '10.0.0.1': give host:port"),
        (["--serve", "192.0.2.1:0"], "no store can be served at 192.0.2.1:0"),
        (["--nproc-per-node", "0", __file__], "nproc is 0: pass 1 or more"),
        (["--grace", "-1", __file__], "grace is -1.0: pass 0 or more"),
        (["nosuch.py"], "PROGRAM is 'nosuch.py', which does not exist in"),
        ([], "PROGRAM is missing: pass a Python file, or -m and a module"),
    ],
)
def test_arguments_that_cannot_be_used_are_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_an_uncaught_run_over_error_ends_a_program_with_its_code(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # a program may join several runs, one after the other
        elastic.join(dist.HashStore())._runtime.stop()
    assert sys.excepthook.gradwire_before is sys.__excepthook__  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as raised:
        sys.excepthook(RunOverError, RunOverError("it is done", code), None)
    assert raised.value.code == code
    assert capsys.readouterr().err == "gradwire: it is done\n"


def dead_store() -> dist.Store:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set_timeout(timedelta(seconds=1))
    del store
    return client


def by_variable(monkeypatch: pytest.MonkeyPatch) -> dist.Store | None:
    monkeypatch.setenv(STORE_VARIABLE, "127.0.0.1:1")
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (by_variable, "no store answers at 127.0.0.1:1 \\(GRADWIRE_ELASTIC_STORE\\)"),
        (lambda _: dead_store(), "the store of the elastic run does not answer"),
    ],
)
def test_joining_a_dead_store_is_a_typed_error(
    make: Callable[[pytest.MonkeyPatch], dist.Store | None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DistributedError, match=message):
        elastic.join(make(monkeypatch), timeout=timedelta(seconds=1))


ENDS = {
    "still running after the grace": (
        "tell(finished=True)\nif number == 0: until('nothing')",
        {"grace": 0.0},
        (1, 2, "still running 0 s after another is done"),
    ),
    "ended early, which does not end the others": (
        "if number == 0: sys.exit(0)\n"
        "until('start-1')\n"
        "if number == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "tell(finished=True)",
        {"grace": 0.0},
        (0, 3, "was killed by SIGKILL; started process"),
    ),
    "failed after its run is done": (
        "tell(finished=True); sys.exit(5 * number)",
        {},
        (5, 2, "exited with code 5; not restarted, because the run is done"),
    ),
    "came when the run was done": (
        "tell(over='done before'); sys.exit(1)",
        {"max_restarts": 20},
        (1, 2, ""),
    ),
    "errors at other steps": (
        "if number < 5:\n"
        "    tell(error='ValueError', message='bad luck', step=number // 2)\n"
        "    sys.exit(1)",
        {"max_restarts": 50},
        (0, 7, ""),
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_how_processes_end(supervised: Supervised, how: str) -> None:
    program, options, (code, starts, text) = ENDS[how]
    assert (supervised(program, nproc=2, **options), supervised.starts) == (code, starts)
    assert text in supervised.text


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        (
            "tell(error='KeyError', message='a\\x1b[31m\\nb', step=None); sys.exit(3)",
            3,
            r"KeyError: a\x1b[31m\nb",
        ),
        (
            "tell(finished=False); until('start-1')\n"
            "tell(error='ValueError', message='bad data', step=3); sys.exit(1)",
            1,
            "ValueError: bad data at step 3",
        ),
    ],
)
def test_an_error_that_repeats_at_the_start_or_at_one_step_ends_all(
    supervised: Supervised, program: str, code: int, error: str
) -> None:
    command = [sys.executable, "-c", START.replace("tell(finished=False)", "") + program]
    ended = elastic.supervise(
        [*command, str(supervised.folder)], nproc=2, max_restarts=50, log=supervised.lines.append
    )
    assert ended == code
    assert supervised.starts <= 4
    assert f"gave up after 2 restarts: every start ended with {error}; exit code" in supervised.text
    assert all(line.isprintable() for line in supervised.lines)


@pytest.mark.parametrize(
    ("launches", "code"),
    [(("a", "b"), 1), ((None, "a"), 1), (("a", None), 1), ((None, None), 1), (("a", "a"), 0)],
)
def test_a_process_that_comes_after_the_end(
    launches: tuple[str | None, str | None], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training on a store is told so; one that is started again has not failed."""
    store = dist.HashStore()
    for launch in launches:
        for name in LAUNCH_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if launch:
            monkeypatch.setenv(LAUNCH_VARIABLES[1], launch)
        member = Membership(store, 5.0, "run", "")
        done = member.has("finished")
        if not done:
            member.finish(1)
    assert done
    message, found = member.why_over()
    assert found == code
    for text in (
        ("the store has a run 'run' that was done before", "serve a new store or pass join(name=")
        if code
        else ("the run's members are done",)
    ):
        assert text in message
