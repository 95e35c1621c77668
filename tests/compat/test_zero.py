"""torch's ZeroRedundancyOptimizer, which steps within a communication hook, under compat."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradwire import compat
from gradwire.testing import run_ranks

WITHOUT_A_STEP = 2  # the hook first waits until the buckets are rebuilt


def trained(hook: str | None, **options: bool) -> list[Tensor]:
    # here, as their import warns of torch.jit
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with compat.installed():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
        wrapped = nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=1e-3, gradient_as_bucket_view=True
        )
        zero = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            optimizer_class=torch.optim.SGD,
            overlap_with_ddp=hook is not None,
            lr=0.1,
            momentum=0.9,
        )
        if hook is not None:
            make = getattr(ddp_zero_hook, hook)
            wrapped.register_comm_hook(None, make(allreduce_hook, wrapped, zero, **options))
        torch.manual_seed(dist.get_rank())
        for step in range(6):
            net.zero_grad()
            wrapped(torch.randn(4, 8)).square().mean().backward()
            if hook is not None or step >= WITHOUT_A_STEP:
                zero.step()
        return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("hook_with_zero_step", {}),
        ("hook_with_zero_step_interleaved", {}),
        ("hook_with_zero_step_interleaved", {"shard_buckets": True}),
    ],
    ids=["at the end", "interleaved", "sharded buckets"],
)
def test_a_step_within_the_hook(hook: str, options: dict[str, bool]) -> None:
    """On shm: with Gloo, torch's hook refuses."""

    def main() -> list[list[Tensor]]:
        return [trained(hook, **options), trained(None)]

    for within, after in run_ranks(main, 2, timeout=60):
        torch.testing.assert_close(within, after)
