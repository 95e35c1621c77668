"""Tests of other files on ranks that mpiexec started: `mpiexec -n 5 python under_mpi.py TESTS ...`.

Each rank runs pytest with the same arguments, and `run_ranks` calls the function on as many of
these ranks as it is to have, with messages between hosts through MPI; the others wait for the
results.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import traceback
import warnings
from datetime import timedelta

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import gradwire.testing
from gradwire.shm import Options, mpi_engine

CALLS = itertools.count()
ADDRESS = os.environ.get("STORE_ADDRESS", "127.0.0.1")  # of the first rank's host


def open_store():
    world = MPI.COMM_WORLD
    limit = timedelta(seconds=100)
    if world.rank == 0:
        store = dist.TCPStore(ADDRESS, 0, is_master=True, timeout=limit, wait_for_workers=False)
        world.bcast(store.port)
        return store
    return dist.TCPStore(ADDRESS, world.bcast(None), timeout=limit, wait_for_workers=False)


STORE = open_store()


def outcome(call, store, rank, options, world_size, backend, timeout, fn, args):
    torch.manual_seed(rank)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            pg_options=options,
        )
        with warnings.catch_warnings():
            warnings.resetwarnings()  # errors in pytest's process, and not in the ranks' own
            found = fn(*args), ""
    except BaseException as error:
        found = error, traceback.format_exc()
    return cloudpickle.dumps(found)


def run_here(fn, world_size=2, *, backend="shm", timeout=60.0, args=(), may_die=(), hosts=()):
    """As `gradwire.testing.run_ranks`."""
    assert not may_die, "mpiexec ends all ranks when one dies"
    assert world_size <= MPI.COMM_WORLD.size
    call, rank = next(CALLS), MPI.COMM_WORLD.rank
    store = dist.PrefixStore(f"call {call}", STORE)
    keys = [f"outcome {r}" for r in range(world_size)]
    if rank < world_size:
        names = [f"host {h}" for h, count in enumerate(hosts) for _ in range(count)]
        options = Options(host=names[rank]) if names and backend == "shm" else None
        mine = outcome(call, store, rank, options, world_size, backend, timeout, fn, args)
        store.set(keys[rank], mine)
        if pickle.loads(mine)[1]:  # it leaves at once, so that no rank waits for it
            leave()
    store.wait(keys)
    leave()
    found = [pickle.loads(answer) for answer in store.multi_get(keys)]
    for error, text in found:
        if text:
            raise AssertionError(text) from error
    return [result for result, _ in found]


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    gradwire.testing.run_ranks = run_here
    Options.__init__.__defaults__ = (mpi_engine, "")
    if MPI.COMM_WORLD.rank:  # the first tells for all: they get the same results
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider"]))
