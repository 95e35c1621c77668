"""Fixtures of the whole suite, and which combinations of parameters are run each time."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_ranks import ForkedRank, end_servers

from gradwire.testing import run_ranks
from gradwire.testing.ranks import POOL

ROOT = Path(__file__).parents[1]
BACKENDS = ("gloo", "shm")
POINTS = re.compile(r'^\[project\.entry-points\."(.+?)"\].*\n((?:.+\n)+)', re.M)
Run = Callable[..., subprocess.CompletedProcess[str]]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background jobs ignore it, and so would the processes that tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


END = pytest.StashKey[float]()
"""Time after which no test begins."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds",
        type=float,
        help="skip tests that have not begun after this time; files run in another order each day",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (seconds := config.getoption("--seconds")) is not None:
        config.stash[END] = time.monotonic() + seconds
        # the processes of pytest-xdist inherit it: all must collect in the same order
        os.environ.setdefault("GRADWIRE_TEST_ORDER", time.strftime("%F"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(END, float("inf")):
        pytest.skip("--seconds are over")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as wide what a test's `narrow` mark does not name, and each case's second backend."""
    if END in config.stash:
        files = sorted({item.path for item in items})
        random.Random(os.environ["GRADWIRE_TEST_ORDER"]).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    cases: dict[str, dict[str, str]] = {}
    for item in items:
        narrow = item.get_closest_marker("narrow")
        chosen = narrow is None or _is_one_of(item, narrow.args)
        if not (chosen and _is_run_on_the_backend_of_its_turn(item, cases)):
            item.add_marker(pytest.mark.wide)


def _is_run_on_the_backend_of_its_turn(item: pytest.Item, cases: dict[str, dict[str, str]]) -> bool:
    """Whether a case that runs on Gloo and on shm is the one of the two to be run each time.

    The two take turns from case to case of a function, which begins with one or the other by its
    name: a choice that does not change from run to run.

    Args:
        item: The test.
        cases: For each function so far, its cases with their backends; this one is added.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    by_backend = [name for name, value in parameters.items() if value in BACKENDS]
    narrow = item.get_closest_marker("narrow")
    if len(by_backend) != 1 or (narrow and any(by_backend[0] in c for c in narrow.args)):
        return True
    function = item.nodeid.partition("[")[0]
    others = repr(sorted((n, repr(v)) for n, v in parameters.items() if n != by_backend[0]))
    of_function = cases.setdefault(function, {})
    turn = zlib.crc32(function.encode()) + len(of_function)
    return parameters[by_backend[0]] == of_function.setdefault(others, BACKENDS[turn % 2])


def _is_one_of(item: pytest.Item, combinations: Collection[Mapping[str, object]]) -> bool:
    """Whether a test's parameters are as one of the combinations has them."""
    parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    unknown = {name for combination in combinations for name in combination} - parameters.keys()
    if unknown or not combinations:
        raise pytest.UsageError(f"{item.nodeid}: narrow names {sorted(unknown) or 'nothing'}")
    return any(
        all(
            parameters[name] in (wanted if isinstance(wanted, list) else [wanted])
            for name, wanted in combination.items()
        )
        for combination in combinations
    )


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    """The processes that `run_ranks` keeps end with the session, not after it."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux" and "SEEN_SYSTEM" not in os.environ:
            start = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank})
            patch.setattr("gradwire.testing.ranks.subprocess", start)
        yield
        POOL.close()
        end_servers()


@pytest.fixture(params=["gloo", "shm"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once on each backend: its module's `run_ranks` has it as the default."""
    backend: str = request.param
    runs = partial(run_ranks, backend=backend)
    monkeypatch.setattr(request.module, "run_ranks", runs, raising=False)
    return backend


def install_at(place: Path) -> None:
    """Write the metadata of a distribution with the entry points that pyproject.toml has."""
    metadata = place / "gradwire-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 0\n")
    groups = POINTS.findall((ROOT / "pyproject.toml").read_text())
    assert {name for name, _ in groups} >= {"torch.backends"}
    text = "".join(f"[{name}]\n{points}\n" for name, points in groups)
    (metadata / "entry_points.txt").write_text(text.replace('"', ""))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which this tree's gradwire is installed."""
    place = tmp_path_factory.mktemp("site")
    install_at(place)
    return place


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """Run a script, or a file, where gradwire is installed; variables are keywords."""

    def run(
        script: str | Path,
        *paths: Path,
        args: Sequence[str] = (),
        ranks: int = 0,
        timeout: float = 110,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        file = script if isinstance(script, Path) else tmp_path / "script.py"
        if isinstance(script, str):
            file.write_text(script)
        found = [*map(str, paths), str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GRADWIRE_", "TORCH_"))}
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with subprocess.Popen(
            [sys.executable, *(torchrun if ranks else []), str(file), *args],
            env=kept
            | {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}
            | {"CUDA_VISIBLE_DEVICES": ""}
            | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # not killed: torchrun ends its ranks
                out, err = process.communicate()
                raise AssertionError(f"no end after {timeout} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run
