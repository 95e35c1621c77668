"""Streams and pinned memory on a GPU, and the order of reads and writes."""

from __future__ import annotations

import pytest
import torch

from gradwire.devices import broadcast, gather, reduce_add, scatter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_gather_to_the_host_is_pinned() -> None:
    parts = [torch.randn(3, 4, device="cuda:0") for _ in range(2)]
    result = gather(parts, destination="cpu")
    assert result.is_pinned()
    assert torch.equal(result, torch.cat(parts).cpu())


def test_scatter_on_given_streams() -> None:
    x = torch.randn(1 << 20).pin_memory()
    streams = [torch.Stream("cuda:0"), None]
    chunks = scatter(x, ["cuda:0"] * 2, streams=streams)
    assert torch.equal(torch.cat([c.cpu() for c in chunks]), x)


def test_streams_do_not_race() -> None:
    """Work on side streams while chunks are scattered and gathered; every value is checked."""
    source = torch.arange(1 << 18, dtype=torch.float32).pin_memory()
    noise = torch.randn(1 << 20, device="cuda:0")
    side = torch.cuda.Stream()
    for i in range(1000):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                noise.mul_(1.0001)
            replicas = scatter(source, ["cuda:0"] * 4)
            changed = [chunk + i for chunk in replicas]
            total = reduce_add([*broadcast(changed[0], ["cuda:0"] * 2)])
            result = gather(changed, destination="cpu")
            twice = gather([total], destination="cpu")
        assert torch.equal(result, source + i)
        assert torch.equal(twice, 2 * (source[: 1 << 16] + i))
