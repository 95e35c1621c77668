"""Program of a rank under mpiexec, in an environment that has mpi4py and no torch.

`mpiexec -n 2 python mpi_rank.py ROUNDS BYTES…` prints, as JSON, for each size the seconds of each
round, the slowest rank's.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import numpy as np
from mpi4py import MPI

WARMUP = 3


def main(rounds: int, sizes: list[int]) -> None:
    """Times all_reduce of float32 from one array to another."""
    world = MPI.COMM_WORLD
    taken = {}
    for size in sizes:
        source = np.zeros(size // 4, dtype=np.float32)
        result = np.zeros_like(source)
        seconds = []
        for number in range(-WARMUP, rounds):
            world.Barrier()
            start = perf_counter()
            world.Allreduce(source, result)
            elapsed = perf_counter() - start
            if number >= 0:
                seconds.append(elapsed)
        taken[size] = np.zeros(rounds)
        world.Allreduce(np.array(seconds), taken[size], op=MPI.MAX)
    if world.rank == 0:
        print(json.dumps({size: list(seconds) for size, seconds in taken.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
