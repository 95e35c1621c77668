"""timm's setup of distributed training, a small model of its, and its average of statistics."""

import json
import sys

import timm
import torch
import torch.distributed as dist
from timm.utils import distribute_bn, init_distributed_device, reduce_tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = type("Args", (), {"device": "cpu", "dist_backend": sys.argv[1], "dist_url": "env://"})
init_distributed_device(args)
torch.manual_seed(0)
net = DistributedDataParallel(timm.create_model("test_resnet", num_classes=4))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
torch.manual_seed(args.rank)
losses = []
for _ in range(3):
    loss = nn.functional.cross_entropy(net(torch.randn(4, 3, 32, 32)), torch.arange(4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(reduce_tensor(loss.detach(), args.world_size).item())
distribute_bn(net, args.world_size, reduce=True)
if args.rank == 0:
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    told = [type(net).__module__, dist.get_backend(), shares_memory(dist.group.WORLD), losses]
    print("RESULT", json.dumps(told))
dist.destroy_process_group()
