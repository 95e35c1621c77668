"""Training on two hosts (network namespaces): shared memory within each, or Gloo alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.hosts import INTERFACE, Hosts, why_no_hosts

TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=2", "--master-port=29500"]
PROGRAM = """
import torch
import torch.distributed as dist
from gradwire import DistributedDataParallel

dist.init_process_group("shm")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
print("trained", model.module.weight.tolist())
dist.destroy_process_group()
"""


@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts can be made: {why_no_hosts()}")
@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "backend"), [(1, "gloo"), (2, "shm")])
def test_ranks_on_two_hosts_train(tmp_path: Path, ranks: int, backend: str) -> None:
    logs, program = [tmp_path / "first", tmp_path / "second"], tmp_path / "train.py"
    program.write_text(PROGRAM)
    with Hosts([ranks, ranks]) as hosts:
        common = [f"--nproc-per-node={ranks}", f"--master-addr={hosts.address(0)}"]
        nodes = []
        for host, log in enumerate(logs):
            there = [*hosts.command(host), "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
            command = [*TORCHRUN, *common, f"--node-rank={host}", str(program)]
            with log.open("w") as out:
                nodes.append(
                    subprocess.Popen([*there, sys.executable, *command], stdout=out, stderr=out)
                )
        try:
            codes = [node.wait(110) for node in nodes]
        finally:
            for node in nodes:
                node.terminate()  # not killed: torchrun ends its ranks
                node.wait()
    text = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    assert text.count("this group runs on Gloo, not on shm") == (backend == "gloo")
    trained = [line for line in text.splitlines() if line.startswith("trained")]
    assert len(trained) == 2 * ranks
    assert len(set(trained)) == 1
