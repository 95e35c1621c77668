"""Two hosts, as network and mount namespaces with a cable between them: shm gives way to Gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACES = ["unshare", "--user", "--net", "--mount", "--map-root-user"]

SCRIPT = """
set -eu
python=$1; folder=$2; ranks=$3
unshare --net --mount sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
there() { nsenter --target $other --net --mount --preserve-credentials "$@"; }
ip link set lo up
ip link add left type veth peer name right netns $other
ip addr add 10.83.0.1/24 dev left
ip link set left up
there ip link set lo up
there ip addr add 10.83.0.2/24 dev right
there ip link set right up
run="-m torch.distributed.run --nnodes 2 --nproc-per-node $ranks"
run="$run --master-addr 10.83.0.1 --master-port 29500"
demo="-m gradwire demo --epochs 1"
GLOO_SOCKET_IFNAME=left $python $run --node-rank 0 $demo > $folder/left 2>&1 & first=$!
GLOO_SOCKET_IFNAME=right there $python $run --node-rank 1 $demo > $folder/right 2>&1 & second=$!
wait $first
wait $second
"""


def has_namespaces() -> bool:
    try:
        probe = [*NAMESPACES, "ip", "link", "add", "left", "type", "veth", "peer", "name", "right"]
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@pytest.mark.skipif(not has_namespaces(), reason="this system allows no namespaces of one's own")
@pytest.mark.wide
@pytest.mark.parametrize("ranks", ["1", "2"])  # on each host
def test_ranks_on_two_hosts_train_on_gloo_and_say_so_once(tmp_path: Path, ranks: str) -> None:
    command = [*NAMESPACES, "bash", "-c", SCRIPT, "two-hosts", sys.executable, str(tmp_path), ranks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    left, right = (tmp_path / "left").read_text(), (tmp_path / "right").read_text()
    assert done.returncode == 0, done.stderr + left + right
    assert (left + right).count("this group runs on Gloo, not on shm") == 1
    assert "backend  gloo" in left
    row = next(line for line in left.splitlines() if line.startswith("parameters in all processes"))
    assert row.split()[4] == "equal"
