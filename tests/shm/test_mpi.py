"""Messages between hosts through MPI: the tests of several hosts, on ranks that mpiexec starts.

With GRADWIRE_LONG=1 in the environment: all of them. An MPI is that of mpiexec beside this Python,
or on the PATH.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwire.errors import DistributedError, MismatchError, NotSupportedError, PeerFailedError
from gradwire.shm import Options, mpi_engine
from gradwire.shm.hierarchy import mpi
from gradwire.testing import run_ranks

pytestmark = pytest.mark.timeout(1100)

HERE = Path(__file__).parent
LONG = os.environ.get("GRADWIRE_LONG") == "1"
SECONDS = 300  # a machine may be busy
BODIES = ["reduce_scatter", "movement", "blocks of different sizes", "averages and bits"]
BODIES += ["messages", "several in flight"]
SHAPES = ["(2, 2)", "(1, 3)", "(2, 1, 1)"]
# what a test machine needs: root, fewer cores than ranks, ranks on any core, no network
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "I_MPI_FABRICS": "shm",
    "I_MPI_PIN": "0",
    "OMP_NUM_THREADS": "1",
}


def find_mpiexec():
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_no_mpi():
    if importlib.util.find_spec("mpi4py") is None:
        return "no mpi4py"
    return "" if find_mpiexec() else "no mpiexec"


needs_mpi = pytest.mark.skipif(why_no_mpi() != "", reason=f"MPI cannot be used: {why_no_mpi()}")


def start(ranks, *arguments):
    search = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": search}
    return subprocess.Popen(
        [find_mpiexec(), "-n", str(ranks), sys.executable, *map(str, arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process, seconds=SECONDS):
    """What it printed; whatever happens, it has ended, and its ranks with it."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            process.terminate()  # not killed: mpiexec ends its ranks
            process.communicate(timeout=30)


def passed(*arguments):
    process = start(5, HERE / "under_mpi.py", "-q", "-m", "", *arguments)
    text = ended(process, 1000 if LONG else SECONDS)
    assert process.returncode == 0, text
    assert " passed" in text
    assert "failed" not in text


@needs_mpi
@pytest.mark.wide
def test_every_operation():
    file = HERE / "test_conformance.py"
    cases = [f"{file}::test_over_hosts[{body}-{hosts}]" for body in BODIES for hosts in SHAPES]
    passed(*([file, "-k", "test_over_hosts and not network"] if LONG else cases))


@needs_mpi
@pytest.mark.wide
def test_several_hosts():
    # mpiexec ends all ranks when one dies
    names = "not death and not cables and not without_leaving and not invalid_options"
    names += " and not bytes_that"
    if not LONG:
        names += " and not bits and not layout and not ABAB and not AABCB"
    passed(HERE / "test_hosts.py", HERE / "test_hosts_random.py", "-k", names)


@needs_mpi
@pytest.mark.wide
def test_mpi_cases():
    passed(HERE / "mpi_cases.py")


RANK = """
import os, sys, time, torch, torch.distributed as dist, gradwire.shm
from datetime import timedelta
from mpi4py import MPI
from under_mpi import STORE

world = MPI.COMM_WORLD
options = gradwire.shm.Options(host="AABB"[world.rank], engine=gradwire.shm.mpi_engine)
dist.init_process_group(
    "shm", store=STORE, rank=world.rank, world_size=4, pg_options=options,
    timeout=timedelta(seconds=1000),  # longer than the test
)
x = torch.ones(100_000)
dist.all_reduce(x)
print("ready\\n", end="", flush=True)
try:
    if sys.argv[1] == "raise" and world.rank == 3:
        raise ValueError("mine")
    while sys.argv[1] != "end":
        dist.all_reduce(x)
except Exception as error:
    print(f"{type(error).__name__}\\n", end="", flush=True)
    raise
"""


@needs_mpi
@pytest.mark.wide
@pytest.mark.parametrize("what", ["end", "raise", "interrupt"])
def test_processes_end(what):
    """In order without leaving; with one that raises; and by Ctrl-C."""
    process = start(4, "-c", RANK, what)
    if what == "interrupt":
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    text = ended(process)
    assert (process.returncode == 0) == (what == "end"), text
    if what == "raise":
        assert text.count("ready") == 4
        words = text.split()
        assert "ValueError" in words
        assert "PeerLostError" in words  # mpiexec may end the others before they say so
        assert "CollectiveTimeoutError" not in words


def refused(answers):
    with pytest.raises(DistributedError) as caught:
        mpi._agreed(answers)
    return caught.value


def test_ranks_in_mpi_are_compared():
    assert mpi._agreed(["1 2 7", "0 2 9"]) == ([1, 0], 7)
    assert mpi._agreed(["5 8 7", "0 8 9"]) == ([5, 0], 7)
    assert isinstance(refused(["0 1 7", "0 1 8"]), MismatchError)  # no mpiexec
    assert isinstance(refused(["0 2 7", "1 3 8"]), MismatchError)
    lacking = refused(["0 2 7", "cannot: no mpi4py"])
    assert isinstance(lacking, PeerFailedError)
    assert "rank 1" in str(lacking)


def without_mpi4py():
    sys.modules["mpi4py"] = None
    options = Options(host="AABB"[dist.get_rank()], engine=mpi_engine)
    with pytest.raises((NotSupportedError, DistributedError)) as caught:
        dist.new_group(backend="shm", pg_options=options)
    del sys.modules["mpi4py"]
    return type(caught.value), str(caught.value)


@pytest.mark.wide
def test_without_mpi4py_the_error_says_what_to_install():
    errors = run_ranks(without_mpi4py, 4, backend="gloo")
    # others may hear of the first one's before they come to their own
    own = [text for kind, text in errors if kind is NotSupportedError]
    assert own
    assert all('pip install "gradwire[mpi]"' in text for text in own)
