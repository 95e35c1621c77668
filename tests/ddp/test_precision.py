"""Mixed precision: what is cast, what is not, with hooks and checkpoints."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, MixedPrecision
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.second.weight.data = self.second.weight.data.clone()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))
        self.seen = []
        self.reentrant = reentrant

    def forward(self, x, scale):
        self.seen.append((x.dtype, self.first.weight.dtype, self.shift.dtype))
        x = self.first(x)
        if self.reentrant is not None:
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        else:
            x = nn.functional.linear(x, self.second.weight, self.second.bias)
        return self.norm(x + self.shift.to(x.dtype)) * scale["scale"]


def step(net, *, seed):
    torch.manual_seed(seed)
    x = torch.randn(6, 4)
    net.zero_grad()
    net(x, {"scale": torch.ones(8)}).float().square().mean().backward()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(
    "hook", [None, hooks.all_reduce, hooks.compress(hooks.all_reduce, torch.half)]
)
def test_forward_in_bfloat16_gradients_in_float32(hook, reentrant):
    """PyTorch's mixed precision takes the place of a hook, here it is around it."""

    def main():
        wire = []

        def spy(state, bucket):
            wire.append(bucket.buffer().dtype)
            return (hook or hooks.all_reduce)(state, bucket)

        config = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float16)
        net = DistributedDataParallel(Net(reentrant), mixed_precision=config)
        net.register_comm_hook(None, spy if hook else None)
        twin = copy.deepcopy(net.module)
        for seed in range(3):
            step(net, seed=10 * seed + dist.get_rank())
            for p in net.parameters():
                assert p.dtype == p.grad.dtype == torch.float32
                assert isinstance(p, nn.Parameter)
            step(twin, seed=10 * seed + dist.get_rank())
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                dist.all_reduce(q.grad.div_(dist.get_world_size()))
                torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.05)
        assert set(net.module.seen) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
        assert set(wire) == ({torch.float16} if hook else set())
        assert net.state_dict()["module.first.weight"].dtype == torch.float32

    run_ranks(main, 2)


def test_buffers_and_reduction_alone():
    def main():
        config = MixedPrecision(reduce_dtype=torch.bfloat16, buffer_dtype=torch.float64)
        net = DistributedDataParallel(Net(), mixed_precision=config)
        step(net, seed=dist.get_rank())
        assert net.module.seen == [(torch.float32, torch.float32, torch.float64)]
        assert net.module.calls.dtype == torch.int64
        bits = net.module.first.weight.grad
        assert torch.equal(bits, bits.bfloat16().float())

    run_ranks(main, 2)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: dict[str, torch.Tensor]
    name: str


class OfBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch):
        assert batch.more["rows"].dtype == torch.int64
        return Batch(self.layer(batch.x), batch.more, batch.name)


def test_dataclasses_are_cast_as_other_inputs_are():
    def main():
        config = MixedPrecision(param_dtype=torch.bfloat16)
        net = DistributedDataParallel(OfBatches(), mixed_precision=config)
        batch = Batch(torch.randn(3, 4), {"rows": torch.arange(3)}, "first")
        out = net(batch)
        assert out.x.dtype == torch.bfloat16
        assert batch.x.dtype == torch.float32
        assert out.name == "first"
        out.x.float().square().mean().backward()
        assert net.module.layer.weight.grad.dtype == torch.float32

    run_ranks(main, 2)


class InContainers(nn.Module):
    """Uses its parameters by way of a list, a tuple and a dict."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.listed, self.named = [(self.inner.weight,)], {"bias": self.inner.bias}
        self.unregistered = [nn.Parameter(torch.eye(4))]

    def forward(self, x):
        y = nn.functional.linear(x, self.listed[0][0], self.named["bias"])
        return y @ self.unregistered[0]


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x.unsqueeze(0))[0].squeeze(0)


class Sparse(nn.Embedding):
    def forward(self, x):
        return super().forward(x.sum(1).long() % 5)


SPECIAL = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "containers": InContainers,
    "lstm": lambda: Recurrent(4, 4, batch_first=True),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "sparse": lambda: Sparse(5, 4, sparse=True),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
def test_modules_with_buffers_hooks_and_containers():
    """They compute in the smaller dtype, or where they cannot, their results are cast."""

    def train(name, precision):
        torch.manual_seed(0)
        net = DistributedDataParallel(
            nn.Sequential(SPECIAL[name](), nn.Linear(4, 4)), mixed_precision=precision
        )
        before = {n: type(v) for n, v in vars(net.module[0]).items()}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 16).view(4, 4) * (1 + dist.get_rank())
            out = net(x)
            out.float().square().mean().backward()
            optimizer.step()
        assert {n: type(v) for n, v in vars(net.module[0]).items()} == before
        return out, [p.detach() for p in net.parameters()]

    def main():
        for name in SPECIAL:
            out, parameters = train(name, MixedPrecision(param_dtype=torch.bfloat16))
            expected, others = train(name, None)
            assert out.dtype == torch.bfloat16, name
            torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
            torch.testing.assert_close(parameters, others, rtol=0.1, atol=0.1)

    run_ranks(main, 2)
