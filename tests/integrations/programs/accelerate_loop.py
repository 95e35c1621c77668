"""A training loop with Accelerate, under torchrun."""

import json

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which it would keep
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.05), loader)
losses = []
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    told = [type(net).__module__, dist.get_backend(), shares_memory(dist.group.WORLD), losses]
    print("RESULT", json.dumps(told))
# Gloo's threads may abort a process that exits amid their last collective's end. They end with the
# group, that is when nothing refers to it.
del net, optimizer, loader, loss
accelerator.free_memory()
accelerator.end_training()
