"""Device lists that every op is tried on: logical replicas on the CPU, and GPUs where there are."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

LISTS = [
    pytest.param(["cpu"], id="cpu"),
    pytest.param(["cpu"] * 2, id="cpu*2"),
    pytest.param(["cpu"] * 4, id="cpu*4"),
    pytest.param(["cuda:0"], id="cuda", marks=needs_cuda),
    pytest.param(["cuda:0"] * 4, id="cuda*4", marks=needs_cuda),
    pytest.param(["cuda:0", "cpu", "cuda:0"], id="mixed", marks=needs_cuda),
    pytest.param(["cpu", "cuda:0", "cpu"], id="mixed-from-cpu", marks=needs_cuda),
]


@pytest.fixture(params=LISTS)
def places(request: pytest.FixtureRequest) -> list[str]:
    """A device list; tensors that an op takes from one device are made on its first entry."""
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
