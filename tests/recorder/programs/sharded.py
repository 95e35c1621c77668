"""Rank 1 of three deviates in step 3, under FSDP or in compiled DistributedDataParallel.

python -m gradwire run --nproc-per-node 3 sharded.py BACKEND WRAPPER ACCIDENT
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradwire import DistributedDataParallel

backend, wrapper, accident = sys.argv[1:]
dist.init_process_group(backend, timeout=timedelta(seconds=4))
net: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
if wrapper == "fsdp":
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
else:
    net = torch.compile(DistributedDataParallel(net), backend="eager")
for step in range(5):
    if dist.get_rank() == 1 and step == 3:
        if accident == "skip":
            continue
        if accident == "raise":
            raise ValueError("no batch")  # here: raise
        while True:
            time.sleep(0.001)  # here: loop
    net(torch.ones(4, 8)).sum().backward()  # here: others
dist.barrier()  # here: skip
