"""Train on two ranks, of which rank 0's data takes longer."""

import gc
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train with a data loader that is slow on rank 0."""
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        time.sleep(0.08 if dist.get_rank() == 0 else 0.002)  # the data loader
        optimizer.zero_grad()
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
gc.collect()
