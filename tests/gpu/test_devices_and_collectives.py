"""`devices` with one GPU twice and with the CPU beside it; collectives of the device's tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpu.common import DEVICE, ON_GPU, ONE, WORLDS, run
from gradwire import collectives, devices
from gradwire.ddp import broadcast_coalesced

PLACE = "cuda:0" if ON_GPU else "cpu"
PLACES = [[PLACE, PLACE], [PLACE, "cpu"], ["cpu", PLACE]]


@pytest.mark.parametrize("places", PLACES)
def test_broadcast_and_its_adjoint(places):
    x = torch.randn(1000, device=places[0], requires_grad=True)
    copies = devices.broadcast(x, places)
    sum((i + 1) * c.sum().to("cpu") for i, c in enumerate(copies)).backward()
    assert [c.device.type for c in copies] == [torch.device(p).type for p in places]
    assert torch.equal(x.grad.cpu(), torch.full((1000,), 3.0))


@pytest.mark.parametrize("places", PLACES)
def test_scatter_gather_and_reduce_add(places):
    x = torch.randn(7, 3, device=PLACE)
    chunks = devices.scatter(x, places)
    assert torch.equal(devices.gather(chunks, destination="cpu"), x.cpu())
    parts = [torch.full((5,), i + 1.0, device=p) for i, p in enumerate(places)]
    assert torch.equal(devices.reduce_add(parts, destination=PLACE).cpu(), torch.full((5,), 3.0))


@pytest.mark.parametrize("places", [[PLACE] * 2, [PLACE] * 4])
def test_data_parallel(places):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).to(PLACE)
    x = torch.randn(9, 6, device=PLACE)
    module(x).square().sum().backward()
    want = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    devices.DataParallel(module, places)(x).square().sum().backward()
    for p, w in zip(module.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-4, atol=1e-5)


COLLECTIVES = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "broadcast": lambda x: collectives.broadcast(x, src=0),
    "all_to_all": collectives.all_to_all,
}


@pytest.mark.parametrize(("ranks", "backend"), WORLDS)
def test_collectives_and_their_adjoints(ranks, backend):
    """⟨y, f(x)⟩ summed over ranks is ⟨f*(y), x⟩."""

    def main():
        torch.manual_seed(dist.get_rank())
        for name, collective in COLLECTIVES.items():
            x = torch.randn(4, 3, dtype=torch.float64).to(DEVICE).requires_grad_()
            out = collective(x)
            y = torch.randn(out.shape, dtype=torch.float64).to(DEVICE)
            (out * y).sum().backward()
            sums = torch.stack([(out * y).sum().detach(), (x * x.grad).sum().detach()])
            dist.all_reduce(sums)
            torch.testing.assert_close(*sums.cpu().unbind(), msg=name)

    run(main, ranks, backend)


def test_broadcast_coalesced():
    def main():
        torch.manual_seed(dist.get_rank())
        tensors = [torch.randn(n).to(DEVICE) for n in (3, 1000, 70_000, 1_500_000)]
        broadcast_coalesced(dist.group.WORLD, tensors)
        return [t.double().sum().item() for t in tensors]

    first, second = run(main, 2)
    assert first == second
    run(main, 1, ONE)
