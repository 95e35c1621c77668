"""What a caller can say about a group when it is made: pg_options of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from gradwire.errors import ArgumentTypeError

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What a shm group over several hosts goes by: `init_process_group(..., pg_options=...)`.

    All ranks give equal engines; each gives the host that it is on.

    Args:
        engine: Makes what carries messages between hosts, from a store, a rank, a size and a
            timeout: an object with `send` and `recv` as a ProcessGroup has them, for bytes on the
            CPU. Gloo by default.
        host: Ranks that give different names share no memory, even if they could: for the sockets
            of a large machine, or to try out on one host what runs on several.

    Example:
        >>> import gradwire.shm
        >>> def main():
        ...     options = gradwire.shm.Options(host=f"host {dist.get_rank() // 2}")
        ...     group = dist.new_group(backend="shm", pg_options=options)
        ...     x = torch.ones(3)
        ...     dist.all_reduce(x, group=group)
        ...     return gradwire.shm.teams(group), x.tolist()
        >>> run_ranks(main, world_size=3, backend="gloo")[0]
        (((0, 1), (2,)), [3.0, 3.0, 3.0])
    """

    engine: Callable[[Store, int, int, timedelta], Any] = dist.ProcessGroupGloo
    host: str = ""

    def __post_init__(self) -> None:
        if not callable(self.engine):
            raise ArgumentTypeError(
                f"engine is {self.engine!r}: pass a function of a store, a rank, a size and a "
                "timeout, such as torch.distributed.ProcessGroupGloo"
            )
        if not isinstance(self.host, str):
            raise ArgumentTypeError(f"host is {self.host!r}: pass a str")
