"""Contexts of torch.distributed.autograd, which keep gradients to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.ddp import DistributedDataParallel
from gradwire.errors import NotSupportedError
from gradwire.testing import run_ranks

rpc = pytest.importorskip("torch.distributed.rpc")
if not rpc.is_available():
    pytest.skip("this PyTorch has no RPC", allow_module_level=True)


@contextmanager
def rpc_of_two(tmp_path: Path) -> Iterator[int]:
    """RPC between two ranks, in the block; this rank."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'rpc'}")
    rank = dist.get_rank()
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        yield rank
    finally:
        rpc.shutdown()


def test_a_forward_in_a_context_of_distributed_autograd_is_refused(tmp_path: Path) -> None:
    def main() -> float:
        with rpc_of_two(tmp_path) as rank:
            net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            x = torch.tensor([[1.0 + rank]])
            with (
                dist.autograd.context(),
                pytest.raises(NotSupportedError, match=r"distributed\.autograd"),
            ):
                net(x)
            net(x).sum().backward()  # outside of it all is as before
            return net.module.weight.grad.item()

    assert run_ranks(main, 2) == [1.5, 1.5]


@pytest.mark.wide
@pytest.mark.parametrize("reduced_before", [False, True])
def test_a_backward_in_a_context_never_reduces_what_is_in_grad(
    tmp_path: Path, reduced_before: bool
) -> None:
    def main() -> float:
        with rpc_of_two(tmp_path) as rank:
            net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            x = torch.tensor([[1.0 + rank]])
            with dist.autograd.context() as context, net.no_sync():
                dist.autograd.backward(context, [net(x).sum()])
                (own,) = dist.autograd.get_gradients(context).values()
            assert own.item() == 1.0 + rank
            out = net(x).sum()
            if reduced_before:
                out.backward(retain_graph=True)
            stale = net.module.weight.grad = torch.tensor([[7.0 + rank]])
            with dist.autograd.context() as context, pytest.raises(RuntimeError):
                dist.autograd.backward(context, [out])
            assert stale.item() == 7.0 + rank
            net.zero_grad()
            net(x).sum().backward()
            return net.module.weight.grad.item()

    assert run_ranks(main, 2) == [1.5, 1.5]
