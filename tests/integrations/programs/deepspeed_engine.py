"""A DeepSpeed engine on two CPU ranks, under torchrun."""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed(dist_backend=sys.argv[1])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": int(sys.argv[2])},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(
    model=net, optimizer=torch.optim.SGD(net.parameters(), 0.05), config=config
)
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(6):
    x = torch.randn(8, 8)
    loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    told = [type(engine).__module__, dist.get_backend(), shares_memory(dist.group.WORLD), losses]
    print("RESULT", json.dumps(told))
dist.destroy_process_group()
