"""Accelerate's own test_sync script, unedited, with a look at its group before it is destroyed."""

import json
import runpy

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

destroy = dist.destroy_process_group


def look_and_destroy(group=None):
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    if dist.get_rank() == 0:
        wrapped_by = DistributedDataParallel.__module__
        told = [wrapped_by, dist.get_backend(), shares_memory(dist.group.WORLD)]
        print("RESULT", json.dumps(told))
    destroy(group)


dist.destroy_process_group = look_and_destroy
runpy.run_module("accelerate.test_utils.scripts.test_sync", run_name="__main__")
