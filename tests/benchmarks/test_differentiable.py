"""The benchmark of differentiable collectives: every operation once, and what it refuses."""

from __future__ import annotations

import math
import os

import pytest
import torch
from benchmarks import differentiable
from benchmarks.options import Options

OPS = [op.name for op in differentiable.OPS]


@pytest.mark.wide
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OPS[:3], id="three"),
        pytest.param(
            OPS,
            id="every",
            marks=pytest.mark.skipif(
                os.environ.get("GRADWIRE_LONG") != "1", reason="GRADWIRE_LONG=1"
            ),
        ),
    ],
)
def test_operations_from_end_to_end(names: list[str]) -> None:
    small = [case for case in differentiable.CASES if case.nbytes == 4 << 10]
    tiny = [case for case in small if case.op.name in names]
    assert [case.op.name for case in tiny] == names
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
