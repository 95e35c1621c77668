"""Program of a rank under mpiexec, in an environment that has torch and mpi4py.

`mpiexec -n 4 python -m benchmarks.engines_rank ROUNDS BYTES…` prints, as JSON, for each size and
engine the seconds of each round, the slowest rank's.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from mpi4py import MPI

from benchmarks.alternate import OURS, alternate
from gradwire import shm

GLOO = "gradwire, Gloo between hosts"


def main(rounds: int, sizes: list[int]) -> None:
    """Times all_reduce of float32 with each engine; half of the ranks are on each host."""
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    port = None
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    port = world.bcast(port)
    if world.rank > 0:
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    host = f"host {2 * world.rank // world.size}"
    options = shm.Options(host=host, engine=shm.mpi_engine)
    dist.init_process_group(
        "shm", store=store, rank=world.rank, world_size=world.size, pg_options=options
    )
    gloo = dist.new_group(backend="shm", pg_options=shm.Options(host=host))
    taken = {}
    for size in sizes:
        ours, theirs = (shm.empty(size // 4, group=g).zero_() for g in (dist.group.WORLD, gloo))
        steps = {
            OURS: partial(dist.all_reduce, ours),
            GLOO: partial(dist.all_reduce, theirs, group=gloo),
        }
        taken[size] = alternate(steps, rounds)
    if world.rank == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
