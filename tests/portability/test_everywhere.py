"""What runs on Linux, macOS and Windows: on Gloo, and without what only Linux has.

The release workflow runs this file on macOS and Windows. On Linux, `test_hidden.py` also runs it
with what those lack hidden.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import (
    DataParallel,
    DistributedDataParallel,
    collectives,
    devices,
    elastic,
    hooks,
    shm,
)
from gradwire.errors import (
    CollectiveTimeoutError,
    NotSupportedError,
    PeerLostError,
    ReductionError,
)
from gradwire.local_sgd import LocalSGD, diloco
from gradwire.optim import ShardedOptimizer
from gradwire.testing import RankError, run_ranks

SYSTEM = os.environ.get("SEEN_SYSTEM", sys.platform)
elsewhere = pytest.mark.skipif(SYSTEM == "linux", reason="Linux has it")
pytestmark = [pytest.mark.timeout(200), *([pytest.mark.wide] if SYSTEM == "linux" else [])]
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from gradwire import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    if step == 2 and rank == 1 and "fail" in sys.argv:
        raise KeyError("here")
    x = torch.randn(4 + 4 * rank, 4)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
del model
dist.destroy_process_group()
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(wrap, steps=3):  # type: ignore[no-untyped-def]
    """Train on this rank; return the parameters."""
    model, optimizer = wrap(network())
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def in_one_process(steps: int = 3) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def command(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | options,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return str(file)


def test_all_modules_are_imported() -> None:
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert shm.is_available() == (SYSTEM == "linux")


@pytest.mark.parametrize("hook", [None, hooks.all_reduce, hooks.bf16])
def test_training_equals_one_process(hook) -> None:  # type: ignore[no-untyped-def]
    def wrap(model):  # type: ignore[no-untyped-def]
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped, torch.optim.SGD(wrapped.parameters(), 0.1)

    first, second = run_ranks(trained, 2, backend="gloo", args=(wrap,))
    exact = {} if hook is not hooks.bf16 else {"rtol": 0.02, "atol": 0.02}
    for a, b, expected in zip(first, second, in_one_process(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected, **exact)


def test_stateful_hooks_local_sgd_and_the_sharded_optimizer() -> None:
    def sgd(model):  # type: ignore[no-untyped-def]
        return torch.optim.SGD(model.parameters(), 0.1)

    def quantized(model):  # type: ignore[no-untyped-def]
        wrapped = DistributedDataParallel(model)
        hook = hooks.BlockQuantization(8)
        wrapped.register_comm_hook(None, hooks.across_hosts(hook, hooks.host_groups()))
        return wrapped, sgd(wrapped)

    def local(model):  # type: ignore[no-untyped-def]
        return model, LocalSGD(sgd(model), model, every=1)

    def outer(model):  # type: ignore[no-untyped-def]
        return model, diloco(sgd(model), model, every=3)

    def sharded(model):  # type: ignore[no-untyped-def]
        wrapped = DistributedDataParallel(model)
        return wrapped, ShardedOptimizer(wrapped, torch.optim.SGD, lr=0.1)

    for wrap, tolerance in ((quantized, 0.01), (local, 1e-5), (outer, 0.0), (sharded, 1e-5)):
        first, second = run_ranks(trained, 2, backend="gloo", args=(wrap,))
        for a, b, expected in zip(first, second, in_one_process(), strict=True):
            torch.testing.assert_close(a, b)
            assert torch.allclose(a, expected, atol=tolerance) == (tolerance > 0), wrap


def test_collectives_have_their_adjoints() -> None:
    def adjoints():  # type: ignore[no-untyped-def]
        rank = dist.get_rank()
        x = torch.tensor([1.0 + rank, 3.0], requires_grad=True)
        y = collectives.all_reduce(x)
        z = collectives.all_gather(x)
        (y * (rank + 1)).sum().backward()
        return y.tolist(), z.tolist(), x.grad.tolist()

    expected = ([3.0, 6.0], [1.0, 3.0, 2.0, 3.0], [3.0, 3.0])
    assert run_ranks(adjoints, 2, backend="gloo") == [expected, expected]


def test_devices_of_one_process() -> None:
    model = network()
    x = batch(0, 0).requires_grad_()
    replicated = DataParallel(model, ["cpu"] * 2)
    torch.testing.assert_close(replicated(x), model(x))
    assert torch.equal(devices.gather(devices.scatter(x, ["cpu"] * 2)), x)


def test_errors_reach_all_ranks() -> None:
    def unused() -> str:
        net = nn.Linear(1, 1)
        net.extra = nn.Linear(1, 1)
        model = DistributedDataParallel(net)
        try:
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
        except ReductionError as error:
            return type(error).__name__
        return "no error"

    def leave() -> str:
        if dist.get_rank() == 1:
            os._exit(3)
        try:
            collectives.all_reduce(torch.ones(1))
        except (PeerLostError, CollectiveTimeoutError) as error:
            return type(error).__name__
        return "no error"

    assert run_ranks(leave, 2, backend="gloo", may_die=[1]) == ["PeerLostError", None]
    assert run_ranks(unused, 2, backend="gloo") == ["ReductionError"] * 2
    with pytest.raises(RankError, match="rank 1 of 2: ZeroDivisionError"):
        run_ranks(lambda: 1 / (1 - dist.get_rank()), 2, backend="gloo")


def test_check_finds_a_mistake(program: str) -> None:
    ended = command("check", "--json", program)
    assert ended.returncode == 1, ended
    told = json.loads(ended.stdout)
    assert [finding["check"] for finding in told["findings"]] == ["mean-of-means"]
    assert told["findings"][0]["ranks"] == [0, 1]
    assert told["notes"][0].endswith("checks of 2 ranks, 4 steps")


@pytest.mark.wide
def test_a_failed_run_has_a_verdict(program: str, tmp_path: Path) -> None:
    dumps = str(tmp_path / "dumps")
    arguments = ("--standalone", "--nproc-per-node", "2", program, "fail")
    failed = command("run", "--recorder", "0", *arguments, GRADWIRE_RECORDER=dumps)
    assert failed.returncode == 1
    shown = command("explain", dumps).stdout
    assert "Who    rank 1" in shown, (shown, failed)
    assert "KeyError" in shown


@pytest.mark.wide
def test_the_demo_trains_on_gloo() -> None:
    options = ("--backend", "gloo") if SYSTEM == "linux" else ()
    shown = command("demo", "--epochs", "1", *options)
    assert shown.returncode == 0, shown
    assert "in 2 processes on gloo" in shown.stdout
    assert "equal, bit for bit" in shown.stdout


@elsewhere
def test_what_needs_linux_says_so(program: str) -> None:
    def group() -> tuple[str, list[float]]:
        import warnings

        x = torch.ones(1)
        with warnings.catch_warnings(record=True) as caught:
            dist.all_reduce(x, group=dist.new_group(backend="shm"))
        return " ".join(str(w.message) for w in caught), x.tolist()

    (warning, total), (_, other) = run_ranks(group, 2, backend="gloo")
    assert total == other == [2.0]
    assert "this group runs on Gloo, not on shm: a rank's system is not supported" in warning
    with pytest.raises(NotSupportedError, match=f"elastic.join needs Linux, but this is {SYSTEM}"):
        elastic.join()
    with pytest.raises(NotSupportedError, match="supervise needs Linux"):
        elastic.supervise(["python"], nproc=1)
    for arguments in (("explain", "--live", "all"), ("run", "--elastic", program)):
        said = command(*arguments)
        assert said.returncode == 2
        assert f"needs Linux, but this is {SYSTEM}" in said.stderr.splitlines()[-1]
