"""`dcp.async_save` while training goes on, in a group of its own."""

import gc
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group(sys.argv[1])
    saving = dist.new_group()  # not the group of training: two threads would mix their collectives
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses, saves = [], []
    for step in range(4):
        x = torch.ones(8, 8) * (dist.get_rank() + 1)
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            wanted = {name: value.clone() for name, value in net.module.state_dict().items()}
            state = {"model": net.module.state_dict()}
            saves.append(dcp.async_save(state, checkpoint_id=sys.argv[2], process_group=saving))
    saves[0].result()
    loaded = {"model": nn.Linear(8, 1).state_dict()}
    dcp.load(loaded, checkpoint_id=sys.argv[2], process_group=saving)
    for name, value in wanted.items():
        torch.testing.assert_close(loaded["model"][name], value)
    if dist.get_rank() == 0:
        from gradwire.shm import shares_memory  # here, so that it puts nothing in place

        told = [type(net).__module__, dist.get_backend(), shares_memory(dist.group.WORLD), losses]
        print("RESULT", json.dumps(told))
    dist.destroy_process_group()


# What refers to a group goes before the interpreter does: Gloo's threads end with the group, and
# one that lets go of a tensor after that takes the GIL and aborts the process (PyTorch 2.13).
main()
gc.collect()
