"""`devices` with one GPU twice and with the CPU beside it; collectives of the device's tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpu.common import DEVICE, ONE, WORLDS, on_each, run
from gradwire import collectives
from gradwire.ddp import broadcast_coalesced

COLLECTIVES = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "broadcast": lambda x: collectives.broadcast(x, src=0),
    "all_to_all": collectives.all_to_all,
}


@on_each(WORLDS)
def test_collectives_and_their_adjoints():
    """⟨y, f(x)⟩ summed over ranks is ⟨f*(y), x⟩."""
    torch.manual_seed(dist.get_rank())
    for name, collective in COLLECTIVES.items():
        x = torch.randn(4, 3, dtype=torch.float64).to(DEVICE).requires_grad_()
        out = collective(x)
        y = torch.randn(out.shape, dtype=torch.float64).to(DEVICE)
        (out * y).sum().backward()
        sums = torch.stack([(out * y).sum().detach(), (x * x.grad).sum().detach()])
        dist.all_reduce(sums)
        torch.testing.assert_close(*sums.cpu().unbind(), msg=name)


def test_broadcast_coalesced():
    def main():
        torch.manual_seed(dist.get_rank())
        tensors = [torch.randn(n).to(DEVICE) for n in (3, 1000, 70_000, 1_500_000)]
        broadcast_coalesced(dist.group.WORLD, tensors)
        return [t.double().sum().item() for t in tensors]

    first, second = run(main, 2)
    assert first == second
    run(main, 1, ONE)
