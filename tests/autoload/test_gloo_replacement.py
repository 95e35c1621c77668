"""GRADWIRE_BACKEND=shm: programs that name Gloo run on shm, which reports the name Gloo."""

from __future__ import annotations

import importlib

import pytest

register = importlib.import_module("gradwire.shm.register")  # the package has such a function
ON = {"GRADWIRE_BACKEND": "shm"}
GROUPS = """
import os
from datetime import timedelta
import torch, torch.distributed as dist

def told(group=None):
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 3
    objects = [None, None]
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    assert objects == [0, 1]
    dist.barrier(group)
    return dist.get_backend(group), dist.get_backend_config(group)

seen = []
rank = int(os.environ["RANK"])
for i, name in enumerate(["gloo", "GLOO", None, "cpu:gloo", "cpu:gloo,cuda:gloo"]):
    store = dist.FileStore(f"{os.environ['STORES']}/{i}", 2)
    options = {"store": store, "rank": rank, "world_size": 2}
    dist.init_process_group(name, timeout=timedelta(seconds=60), **options)
    seen.append(told())
    if name == "gloo":
        seen += [told(dist.new_group()), told(dist.new_group(backend="gloo"))]
        alone = [dist.new_group([rank]) for rank in (0, 1)]
        assert alone[1 - dist.get_rank()] is dist.GroupMember.NON_GROUP_MEMBER
        assert alone[dist.get_rank()].size() == 1
    dist.destroy_process_group()
if rank == 0:
    print(seen)
"""
SHM = """
import torch, torch.distributed as dist
from gradwire.shm import shares_memory
dist.init_process_group("gloo")
assert shares_memory(dist.group.WORLD) and shares_memory(dist.new_group())
dist.destroy_process_group()
"""


@pytest.mark.wide
def test_groups_report_gloo(run, tmp_path):
    def with_variables(stores: str, **variables: str):
        (tmp_path / stores).mkdir()
        ended = run(GROUPS, ranks=2, STORES=str(tmp_path / stores), **variables)
        assert ended.returncode == 0, ended.stderr
        return ended

    on, off = with_variables("on", **ON), with_variables("off")
    line = "gradwire: 2 ranks use shm in place of Gloo, because GRADWIRE_BACKEND is shm"
    assert on.stderr.count(line) == 1
    assert line not in off.stderr
    assert line not in with_variables("quiet", **ON, GRADWIRE_QUIET="1").stderr
    assert on.stdout == off.stdout
    assert "('gloo', 'cpu:gloo,cuda:gloo')" in on.stdout


@pytest.mark.wide
@pytest.mark.parametrize(("variables", "error"), [(ON, ""), ({}, "AssertionError")])
def test_groups_share_memory_only_if_asked(run, variables, error):
    ended = run(SHM, ranks=2, **variables)
    assert bool(ended.returncode) == bool(error), ended.stderr
    assert error in ended.stderr


INSTEAD = {
    **dict.fromkeys(["gloo", "undefined", "cpu:gloo", "cpu:gloo,cuda:gloo"], "shm"),
    "cpu:gloo,cuda:nccl": "cpu:shm,cuda:nccl",
    "cpu:gloo,meta:fake": "cpu:shm,meta:fake",
    **{name: name for name in ("cuda:gloo", "nccl", "shm", "cpu:mpi,cuda:gloo")},
}


@pytest.mark.parametrize(("asked", "instead"), INSTEAD.items())
def test_backend_without_accelerators(monkeypatch, asked, instead):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *a, **k: None)
    monkeypatch.setattr("torch._C._get_accelerator", lambda: __import__("torch").device("cpu"))
    monkeypatch.setattr(register, "PYTHON_BACKENDS", True)
    assert register.with_shm(asked) == instead


@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("routed", [True, False])
def test_backend_with_a_gpu(monkeypatch, asked, routed):
    """Gloo groups carry CUDA tensors as well, unlike groups of shm alone."""
    import torch

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda *a, **k: torch.device("cuda")
    )
    monkeypatch.setattr(register, "PYTHON_BACKENDS", routed)
    if routed:
        second = asked.partition("cuda:")[2] or "gloo"
        assert register.with_shm(asked) == f"cpu:shm,cuda:{second}"
    else:
        with pytest.warns(UserWarning, match="is unchanged"):
            assert register.with_shm(asked) == asked
