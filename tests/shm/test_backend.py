"""shm as a Backend of torch's own groups: routing, hooks, recorder, splits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire import all_reduce
from gradwire._torch import PYTHON_BACKENDS
from gradwire.recorder.flight_record import flight_record
from gradwire.shm.register import ShmBackend

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not PYTHON_BACKENDS, reason="this torch has no constructor for a Backend written in Python"
)


since_215 = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"),
    reason="this torch records torch's own backends alone, and splits groups of accelerators alone",
)


@pytest.mark.on_ranks(2)
def test_the_group_is_torch_s_own():
    group = dist.group.WORLD
    backend = group._get_backend(CPU)
    assert type(group) is dist.ProcessGroup
    assert isinstance(backend, ShmBackend)
    assert (dist.get_backend(), backend.name()) == ("shm", "shm")
    assert (backend.rank(), backend.size()) == (group.rank(), group.size())
    assert gradwire.shm.shares_memory(group)
    named = dist.new_group(group_desc="two of them")
    assert named.group_desc == "two of them"
    assert named.group_name != group.group_name
    names = [None] * 2
    dist.all_gather_object(names, group.group_name)
    assert names == [group.group_name] * 2


@pytest.mark.on_ranks(2)
def test_torch_s_hooks_fire():
    group, seen, x = dist.group.WORLD, [], torch.ones(3)
    group.register_pre_hook(7, lambda args: seen.append(("before", args.name.name)))
    group.register_post_hook(7, lambda args: seen.append(("after", args.name.name)))
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    dist.all_reduce(x)
    kinds = ["ALLREDUCE", "ALLREDUCE", "BARRIER"]
    assert seen == [(when, kind) for kind in kinds for when in ("before", "after")]


@pytest.mark.on_ranks(2)
def test_torch_s_check_for_nan_works():
    from torch._C._distributed_c10d import NanCheckHook

    hook = NanCheckHook.attach(dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"(?i)nan"):
        dist.all_reduce(torch.tensor([float("nan")]))
    hook.remove()
    dist.all_reduce(torch.ones(1))


@pytest.mark.on_ranks(2)
def test_torch_s_profiler_and_comm_debug_mode_see_collectives():
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(3)
    with CommDebugMode() as mode:
        dist.all_reduce(x)
        all_reduce(x)  # gradwire's own goes past the dispatcher where nobody looks, but not here
    assert mode.get_total_counts() == 2
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(x)
        all_reduce(x)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["c10d::allreduce_"] == 2


@since_215
@pytest.mark.on_ranks(2)
def test_shm_records_itself_and_torch_s_recorder_does_not_do_so_again():
    group = dist.new_group(group_desc="recorded")
    dist.all_reduce(torch.ones(2, 3), group=group)
    dist.broadcast(torch.ones(5), 0, group=group)
    mine = [e for e in flight_record()["entries"] if e["process_group"][1] == "recorded"]
    attached = dist.distributed_c10d._world.pg_flight_recorder_hooks
    ops = [(e["op"], e["input_sizes"], e["retired"]) for e in mine if e["op"] != "barrier"]
    assert ops == [("all_reduce", [[2, 3]], True), ("broadcast", [[5]], True)]
    assert group not in attached


@since_215
@pytest.mark.on_ranks(3)
def test_groups_split():
    rank = dist.get_rank()
    ranks = [[2, 0], [1]]
    group = dist.split_group(split_ranks=ranks)
    x = torch.tensor([10.0 + rank])
    dist.all_reduce(x, group=group)
    assert x.item() == (22.0 if rank in ranks[0] else 11.0)
    assert group.rank() == {2: 0, 0: 1, 1: 0}[rank]
    assert gradwire.shm.shares_memory(group)
    if rank == 1:
        with pytest.raises(RuntimeError, match="in none of split_ranks"):
            dist.split_group(split_ranks=[[0, 2]])
    else:
        y = torch.ones(1)
        dist.all_reduce(y, group=dist.split_group(split_ranks=[[0, 2]]))
        assert y.item() == 2


PAIR = """
import sys
import torch, torch.distributed as dist, gradwire.shm
from torch.testing._internal.distributed.fake_pg import FakeStore
rank = int(sys.argv[1])
dist.init_process_group(
    "cpu:shm,meta:fake", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2
)
group = dist.group.WORLD
assert {d.type for d in group._device_types} == {"cpu", "meta"}
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3, x
dist.all_reduce(torch.empty(3, device="meta"))
y = gradwire.shm.empty(4).fill_(1)
dist.all_reduce(y)
assert y.tolist() == [2.0] * 4
assert gradwire.shm.shares_memory(group)
sub = dist.new_group([1, 0])
dist.all_reduce(y, group=sub)
dist.all_reduce(torch.empty(3, device="meta"), group=sub)
assert y.tolist() == [4.0] * 4
dist.destroy_process_group()
"""

DETAILED = """
import sys
import torch, torch.distributed as dist, gradwire, gradwire.shm
rank = int(sys.argv[1])
dist.init_process_group("shm", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
group = dist.group.WORLD
assert type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
assert gradwire.shm.shares_memory(group)
x = gradwire.shm.empty(3).fill_(1)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 3
assert gradwire.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
try:
    dist.all_reduce(torch.ones(3 + rank))
except RuntimeError as error:
    assert "Detected mismatch between collectives" in str(error), error
else:
    raise AssertionError("no mismatch was detected")
dist.destroy_process_group()
"""


def run_both(program, path, **environment):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_two_devices_of_one_group(tmp_path):
    run_both(PAIR, tmp_path / "store")


def test_torch_s_wrapper_of_detailed_debugging(tmp_path):
    run_both(DETAILED, tmp_path / "store", TORCH_DISTRIBUTED_DEBUG="DETAIL")
