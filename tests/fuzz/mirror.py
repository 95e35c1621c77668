"""A process group of one process that stands for two: the other rank has what this one has.

Sums are doubled when they are waited for, not before, as if they were under way until then. Cases
run many times faster than between processes; what differs between ranks is not seen.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, ReduceOp, Work

__all__ = ["start"]


class _Mirrored(Work):
    def __init__(self, tensors: list[Tensor], *, double: bool) -> None:
        super().__init__()
        self._tensors, self._double = tensors, double

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._double:
            self._double = False
            with torch.no_grad():
                for tensor in self._tensors:
                    tensor.mul_(2)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Mirror(ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 2)
        self._names = ""

    def getBackendName(self) -> str:
        return "mirror"

    name = getBackendName

    def getRank(self) -> int:
        return 0

    def getSize(self) -> int:
        return 2

    def getGroupName(self) -> str:
        return self._names

    def setGroupName(self, name: str) -> None:
        self._names = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def setGroupDesc(self, desc: str) -> None:
        pass

    _set_group_desc = setGroupDesc

    @property
    def bound_device_id(self) -> None:
        return

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        work = _Mirrored(tensors, double=op == ReduceOp.SUM)
        return _now(work, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return _now(_Mirrored(tensors, double=False), opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _now(_Mirrored(inputs, double=False), opts)

    def barrier(self, opts: Any = None) -> Work:
        return _now(_Mirrored([], double=False), opts)


def _now(work: _Mirrored, opts: Any) -> Work:
    if opts is not None and not opts.asyncOp:
        work.wait()
    return work


def start() -> None:
    """Make such a group the default one of this process."""
    if dist.is_initialized():
        return
    Backend.register_backend("mirror", lambda *_: _Mirror(), devices=["cpu"])
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    _be_alone()


def _be_alone() -> None:
    """The other rank does not come when this one has an error."""
    from gradwire.ddp.faults.fault_domain import FaultDomain

    FaultDomain.begin_round = lambda self, error: True  # type: ignore[method-assign]
