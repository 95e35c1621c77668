"""Plain PyTorch: change one import, start with torchrun.

torchrun --standalone --nproc-per-node 2 examples/train_with_torchrun.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradwire import DistributedDataParallel  # was: from torch.nn.parallel import …


def spirals(points: int = 600) -> TensorDataset:
    """Two spirals, to be told apart."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(points) % 2
    radius = torch.rand(points, generator=generator) * 2 + 0.3
    angle = 2.5 * radius + torch.pi * label
    noise = 0.05 * torch.randn(points, 2, generator=generator)
    return TensorDataset(
        torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None] + noise, label
    )


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(dist.get_rank())  # replicas start as rank 0's, whatever they were

    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DistributedDataParallel(net.to(device), device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    data = spirals()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for x, label in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()  # after this, gradients are the mean over ranks
            optimizer.step()

    with torch.no_grad():
        x, label = data.tensors
        right = (net(x.to(device)).argmax(1).cpu() == label).double().mean().item()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, right: {right:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
