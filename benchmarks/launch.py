"""One launch: the ranks of a benchmark as processes of this host, and rank 0's result.

The ranks meet at a store of the starting process, whose port the system chooses: no two launches
can take each other's. Whatever ends the launch, no rank outlives it.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import gradwire  # noqa: F401  (its backends are registered on import)

__all__ = ["launch"]

T = TypeVar("T")
HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=2)


def launch(work: Callable[..., T], *args: object, world_size: int, backend: str) -> T:
    """What `work(*args)` returns on rank 0, run on `world_size` ranks of one thread each.

    Args:
        work: A module's function; it finds the default process group initialised.
        args: Given to every rank; picklable.
        world_size: Processes, >= 1.
        backend: A torch.distributed backend that carries CPU tensors.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank raised; the message has its traceback.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = mp.spawn(
        _rank, (world_size, backend, store.port, work, args), world_size, join=False, daemon=True
    )
    assert context is not None
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    result: T = pickle.loads(store.get("result"))
    return result


def _rank(
    rank: int,
    world_size: int,
    backend: str,
    port: int,
    work: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    # Ctrl-C ends a rank at once, even in the middle of a collective, where Python cannot react.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    # as under torchrun: libraries look at these
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    store = dist.TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    result = work(*args)
    if rank == 0:
        store.set("result", pickle.dumps(result))  # type: ignore[arg-type]  # bytes will do
    dist.destroy_process_group()
    # Gloo's threads may still be freeing their last tensors, which aborts the process if Python
    # is being torn down meanwhile.
    os._exit(0)
