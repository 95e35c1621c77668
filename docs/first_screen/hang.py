"""Skip batches with an infinite loss: one rank does, and the others wait."""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on batches of which one has an infinite loss."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        x = torch.randn(8, 16)
        if step == 7 and dist.get_rank() == 2:
            x[0, 0] = float("inf")  # one bad sample
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
gc.collect()
