"""The benchmark of differentiable collectives: every operation once, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks import differentiable
from benchmarks.options import Options


def test_every_operation_from_end_to_end() -> None:
    tiny = [case for case in differentiable.CASES if case.nbytes == 4 << 10]
    assert {case.op.name for case in tiny} == {op.name for op in differentiable.OPS}
    for case in differentiable.measure(tiny, Options(rounds=1)):
        assert [m.name for m in case.measures] == ["forward", "forward and backward"]
        for measure in case.measures:
            assert list(measure.contenders) == [
                "gradwire",
                "gradwire, checked",
                "gradwire on shm",
                "torch",
                "raw",
            ]
            assert all(math.isfinite(ratio.value) for ratio in measure.ratios.values())


def test_a_wrong_gradient_is_refused() -> None:
    calls = {"gradwire": lambda x: 2 * x, "torch": lambda x: 2 * x.detach() + x}
    with pytest.raises(AssertionError, match="torch's gradient is not gradwire's"):
        differentiable._agree_on_results(calls, torch.ones(2, requires_grad=True))
