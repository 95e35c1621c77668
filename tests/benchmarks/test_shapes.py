"""The lists of tensors have the sizes that the networks are known for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks import shapes


@pytest.mark.parametrize(
    ("tensors", "count", "floats"),
    [
        # 161 parameters of 25,557,032 elements; 53 norms with a mean, a variance and a counter
        (shapes.resnet50, 161 + 3 * 53, 25_557_032 + 53_120),
        (shapes.gpt2_small, 148, 124_439_808),
        (shapes.vit_b16, 152, 86_567_656),
        (shapes.many_small, 1000, 250_000),
        (shapes.one_large, 1, 25_000_000),
    ],
)
def test_counts(tensors: Callable[[], list[torch.Tensor]], count: int, floats: int) -> None:
    made = tensors()
    assert len(made) == count
    assert sum(t.numel() for t in made if t.dtype == torch.float32) == floats
    assert {t.device.type for t in made} == {"meta"}


def test_resnets_counters_are_integers() -> None:
    counters = [t for t in shapes.resnet50() if t.dtype == torch.int64]
    assert [t.shape for t in counters] == [torch.Size([])] * 53
