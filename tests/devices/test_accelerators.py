"""Arguments of NCCL calls, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.devices.copying import nccl_broadcast, nccl_takes


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.int16, torch.bool])
def test_nccl_carries_bytes(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def broadcast(tensors: list[Tensor], root: int) -> None:
        assert {t.dtype for t in tensors} == {torch.uint8}
        for target in tensors[1:]:
            target.copy_(tensors[root])

    monkeypatch.setattr(torch.cuda.nccl, "broadcast", broadcast)
    source = (torch.randn(shape) * 9).to(dtype)
    targets = [torch.zeros_like(source) for _ in range(2)]
    nccl_broadcast(source, targets)
    assert all(torch.equal(target, source) for target in targets)


def test_nccl_is_not_asked_about_the_cpu() -> None:
    assert not nccl_takes([torch.ones(2), torch.ones(2)])
