"""What the pages say of PyTorch's own DistributedDataParallel and FSDP2: one test for each feature.

`gradwire check` is tested with PyTorch's class in tests/check, `explain --live` by README's first
screen, and shm in tests/shm/test_torch_features.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import all_gather
from gradwire.testing import run_ranks

pytestmark = pytest.mark.timeout(150)


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


CLASSES = [DistributedDataParallel, sharded]


def data(rank: int | None = None) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    return x if rank is None else x.chunk(2)[rank]


def network() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3, bias=False)


def loss_over_all(z: Tensor) -> Tensor:
    return (z @ z.T).square().mean()


@pytest.mark.parametrize("wrap", CLASSES)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_collectives_in_a_loss(wrap: Any, backend: str) -> None:
    def member() -> Tensor:
        model = wrap(network())
        loss_over_all(all_gather(model(data(dist.get_rank())))).backward()
        (gradient,) = (p.grad for p in model.parameters())
        assert gradient is not None
        return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient

    net = network()
    loss_over_all(net(data())).backward()
    for gradient in run_ranks(member, 2, backend=backend):
        torch.testing.assert_close(gradient, net.weight.grad)


PROGRAM = """
import gc, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(64, 64)
    if sys.argv[1] == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        model = net
    else:
        model = DistributedDataParallel(net)
    for step in range(4):
        model(torch.ones(2, 64)).sum().backward()
        if "fail" in sys.argv and step == 2 and dist.get_rank() == 1:
            raise KeyError("one bad sample")
    dist.destroy_process_group()

main()
gc.collect()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LAUNCH = ("run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_run_names_the_rank_that_failed(tmp_path: Path, kind: str) -> None:
    ended = run(tmp_path, *LAUNCH, "--recorder", "dumps", "train.py", kind, "fail")
    assert ended.returncode == 1
    told = json.loads(run(tmp_path, "explain", "dumps", "--json").stdout)["findings"][0]
    assert (told["kind"], told["ranks"]) == ("error", [1]), told


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_timeline_has_the_collectives_on_shm(tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "run.json"
    ended = run(tmp_path, *LAUNCH, "--backend", "shm", "--timeline", str(trace), "train.py", kind)
    assert ended.returncode == 0, ended.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert names & {"all_reduce", "reduce_scatter", "reduce_scatter_single"}, names
    assert names & {"rank 0", "rank 1"}  # waits for each other
    assert "forward" not in names
