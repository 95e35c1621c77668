"""The benchmark of steps in Python: every operation once."""

from __future__ import annotations

import torch.distributed as dist
from benchmarks import differentiable, overhead
from benchmarks.options import Options


def test_every_operation_from_end_to_end() -> None:
    results = overhead.measure(overhead.CASES, Options(rounds=1, world_size=1))
    assert [case.name for case in results] == [op.name for op in differentiable.OPS]
    for case in results:
        (measure,) = case.measures
        times = {name: spread.median for name, spread in measure.contenders.items()}
        above = times.pop("gradwire, above raw"), times.pop("torch, above raw")
        assert above == (times["gradwire"] - times["raw"], times["torch"] - times["raw"])
    assert not dist.is_initialized()
