"""ShardedOptimizer: its parameters and state are those of the plain optimizer."""

from __future__ import annotations

import copy
import os
import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    HookError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    ReductionError,
)
from gradwire.optim import ShardedOptimizer
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

KINDS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {"lr": 0.02}),
]


class Drawn(nn.Module):
    """A drawn network with odd sizes, memory formats and, with unused parameters, two ways."""

    def __init__(self, seed, *, matrices=False, unused=False, dtype=torch.float32):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        widths = [5, *(draw.randint(1, 90) for _ in range(draw.randint(1, 4))), 3]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=not matrices) for a, b in pairwise(widths))
        self.unused = unused
        if not matrices:
            self.conv = nn.Conv2d(2, 5, 2).to(memory_format=torch.channels_last)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.never = nn.Linear(2, 7)
            self.never.requires_grad_(draw.random() < 0.5 and unused)
        self.to(dtype)

    def forward(self, x, way=0):
        for layer in self.layers:
            x = layer(x).tanh()
        if hasattr(self, "conv") and (way == 0 or not self.unused):
            x = x + self.conv(x[:, :1, None, None].expand(-1, 2, 2, 2)).mean() * self.scale
        return x.square().mean()


def plain_and_sharded(net, kind, options, *, reduce_scatter, **arguments):
    """Two wrappers of equal modules, with the plain optimizer and with the sharded one."""
    twin = copy.deepcopy(net)
    own = DistributedDataParallel(net, **arguments)
    other = DistributedDataParallel(twin, gradient_as_bucket_view=reduce_scatter, **arguments)
    plain = kind([p for p in own.parameters() if p.requires_grad], **copy.deepcopy(options))
    return (
        own,
        plain,
        other,
        ShardedOptimizer(other, kind, reduce_scatter=reduce_scatter, **options),
    )


def assert_same(net, twin, *, bits=True):
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        if bits:
            assert torch.equal(p, q), (name, (p - q).abs().max())
        else:
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=name)


def assert_equal_on_all_ranks(net):
    flat = torch.cat([p.detach().flatten().double() for p in net.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


def train_beside_the_plain_optimizer(number, seed, steps, reduce_scatter, backend):
    kind, options = KINDS[number]
    draw = random.Random(seed)
    unused = draw.random() < 0.3
    exact = backend == "shm" or not reduce_scatter or dist.get_world_size() == 2
    weighted, clips = draw.random() < 0.3, draw.random() < 0.3
    # the norm of pieces, a sum over ranks in another order, and weights before it round differently
    exact = exact and not (reduce_scatter and (clips or weighted))
    dtype = torch.float32 if exact else torch.float64
    net = Drawn(seed, matrices=kind is torch.optim.Muon, unused=unused, dtype=dtype)
    own, plain, other, sharded = plain_and_sharded(
        net, kind, options, reduce_scatter=reduce_scatter, find_unused_parameters=unused
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in (plain, sharded)]
    samples = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        micro_steps = draw.randint(1, 3)
        for micro in range(micro_steps):
            n = draw.randint(1, 9) + dist.get_rank()
            x = torch.randn(n, 5, generator=samples, dtype=dtype)
            for model in (own, other):
                with model.no_sync() if micro < micro_steps - 1 else torch.enable_grad():
                    if weighted:
                        model.weight(n)
                    model(x, way=step % 2).backward()
        if clips:
            norm = clip_grad_norm_(own.parameters(), 0.1)
            torch.testing.assert_close(sharded.clip_grad_norm_(0.1), norm)
        for optimizer, scheduler in zip((plain, sharded), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same(own, other, bits=exact)
    assert_equal_on_all_ranks(other)
    sharded.consolidate()
    if exact:
        assert_same_state(sharded.state_dict(), plain.state_dict())


def assert_same_state(own, expected):
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert own["state"][number].keys() == state.keys()
        for key, value in state.items():
            held = own["state"][number][key]
            same = torch.equal(held, value) if isinstance(value, torch.Tensor) else held == value
            assert same, (number, key)


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_parameters_and_state_are_those_of_the_plain_optimizer(
    number, reduce_scatter, each_backend
):
    arguments = number, number, 12, reduce_scatter, each_backend
    run_ranks(train_beside_the_plain_optimizer, 2 + number % 2, args=arguments)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_drawn_models(seed, each_backend):
    draw = random.Random(seed)
    number, reduce_scatter = draw.randrange(len(KINDS)), draw.random() < 0.5
    arguments = number, seed, 200, reduce_scatter, each_backend
    run_ranks(train_beside_the_plain_optimizer, draw.randint(2, 4), args=arguments)


def muon_and_adamw(net):
    layers = [p for n, p in net.named_parameters() if "layers" in n]
    rest = [p for n, p in net.named_parameters() if "conv" in n or "scale" in n]
    groups = [{"params": rest[:2], "weight_decay": 0.0}, {"params": rest[2:], "lr": 0.05}]
    return [
        (torch.optim.Muon, [p for p in layers if p.dim() == 2], {"lr": 0.02}),
        (torch.optim.SGD, [p for p in layers if p.dim() == 1], {"lr": 0.1}),
        (torch.optim.AdamW, groups, {"lr": 0.01}),
    ]


@pytest.mark.parametrize("reduce_scatter", [False, True])
def test_several_optimizers_are_as_in_one_process(reduce_scatter):
    def main():
        net = Drawn(3, dtype=torch.float64)
        net.never.requires_grad_(False)
        alone = copy.deepcopy(net)
        wrapped = DistributedDataParallel(net)
        optimizers = muon_and_adamw(wrapped)
        sharded = ShardedOptimizer(wrapped, optimizers, reduce_scatter=reduce_scatter)
        plains = [kind(params, **options) for kind, params, options in muon_and_adamw(alone)]
        samples = torch.Generator().manual_seed(0)
        for _ in range(8):
            for micro in range(2):  # Muon steps once, with the sum of the micro-batches
                x = torch.randn(2, 4, 5, generator=samples, dtype=torch.float64)
                with wrapped.no_sync() if micro == 0 else torch.enable_grad():
                    wrapped(x[dist.get_rank()]).backward()
                for part in x:
                    (alone(part) / 2).backward()
            for optimizer in (sharded, *plains):
                optimizer.step()
                optimizer.zero_grad()
        assert_same(wrapped, alone, bits=False)
        assert_equal_on_all_ranks(wrapped)

    run_ranks(main)


def test_state_moves_between_numbers_of_ranks_and_to_the_plain_optimizer(tmp_path):
    def steps(net, optimizer, first, count):
        for step in range(first, first + count):
            samples = torch.Generator().manual_seed(step)
            net(torch.randn(4, 5, generator=samples)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(path, to):
        net = DistributedDataParallel(Drawn(5))
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, lr=0.02)
        steps(net, optimizer, 0, 3)
        optimizer.consolidate(to)
        if dist.get_rank() == 1:
            torch.save((net.module.state_dict(), optimizer.state_dict()), path)
        elif to == 1:
            with pytest.raises(ReductionError, match="consolidate"):
                optimizer.state_dict()
        steps(net, optimizer, 3, 3)
        with pytest.raises(ReductionError, match="consolidate"):
            optimizer.state_dict()  # of an earlier step
        return net.module.state_dict()

    def load(path, reduce_scatter):
        net = DistributedDataParallel(Drawn(5), gradient_as_bucket_view=reduce_scatter)
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reduce_scatter=reduce_scatter)
        module, state = torch.load(path)
        net.module.load_state_dict(module)
        optimizer.load_state_dict(state)
        steps(net, optimizer, 3, 3)
        return net.module.state_dict()

    path = str(tmp_path / "saved")
    expected = run_ranks(save, 3, args=(path, 1))[0]
    plain = Drawn(5)
    module, state = torch.load(path)
    plain.load_state_dict(module)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad])
    optimizer.load_state_dict(state)
    steps(plain, optimizer, 3, 3)
    loaded = [run_ranks(load, n, args=(path, rs))[0] for n, rs in ((2, False), (4, True))]
    for state in (plain.state_dict(), *loaded):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, msg=name)


def test_grad_scaler_skips_the_step_on_all_ranks():
    def main():
        net = Drawn(7)
        own, plain, other, sharded = plain_and_sharded(
            net, torch.optim.SGD, {"lr": 0.1}, reduce_scatter=False
        )
        for step in range(4):
            x = torch.ones(2, 5) * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)
            for model, optimizer in ((own, plain), (other, sharded)):
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert_same(own, other)

    run_ranks(main)


def test_gradients_are_whole_or_none():
    def main(reduce_scatter):
        net = DistributedDataParallel(Drawn(8))
        optimizer = ShardedOptimizer(net, torch.optim.SGD, lr=0.1, reduce_scatter=reduce_scatter)
        net(torch.ones(2, 5) + dist.get_rank()).backward()
        grads = [p.grad for p in net.parameters() if p.requires_grad]
        assert all((g is None) is reduce_scatter for g in grads)
        if reduce_scatter:
            net.zero_grad()  # leaves the shards
            net(torch.ones(2, 5))
            with pytest.raises((ReductionError, HookError), match="two reduced backwards"):
                net(torch.ones(2, 5)).backward()
            optimizer.zero_grad()
            net(torch.ones(2, 5)).backward()
        before = [p.clone() for p in net.parameters()]
        optimizer.clip_grad_value_(0.0)
        optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))

    for reduce_scatter in (False, True):
        run_ranks(main, args=(reduce_scatter,))


def test_a_group_is_added():
    def main():
        net = Drawn(9)
        twin = copy.deepcopy(net)
        own, other = DistributedDataParallel(net), DistributedDataParallel(twin)
        chosen = [list(n.module.layers.parameters()) for n in (own, other)]
        rest = [[*n.module.conv.parameters(), n.module.scale] for n in (own, other)]
        plain = torch.optim.AdamW(chosen[0], lr=0.01)
        sharded = ShardedOptimizer(other, [(torch.optim.AdamW, chosen[1], {"lr": 0.01})])
        for step in range(6):
            for model, optimizer, more in ((own, plain, rest[0]), (other, sharded, rest[1])):
                if step == 2:
                    optimizer.add_param_group({"params": more, "lr": 0.1})
                model(torch.ones(2, 5) * (1 + dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(own, other)
        sharded.consolidate()
        assert_same_state(sharded.state_dict(), plain.state_dict())

    run_ranks(main)


class Failing(torch.optim.SGD):
    """Raises in its step, or ends the process, on rank 1 from the third step on."""

    how = "raise"
    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 1:
            if self.how == "die":
                os._exit(1)
            raise ArithmeticError("in step")


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_rank_that_fails_in_step_changes_no_parameter(how, reduce_scatter):
    def main():
        Failing.how = how
        net = DistributedDataParallel(Drawn(10))
        optimizer = ShardedOptimizer(net, Failing, lr=0.1, reduce_scatter=reduce_scatter)
        for _ in range(2):
            net(torch.ones(2, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = [p.clone() for p in net.parameters()]
        net(torch.ones(2, 5)).backward()
        kind = ArithmeticError if dist.get_rank() == 1 else PeerFailedError
        with pytest.raises(PeerLostError if how == "die" else kind):
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
        if how == "raise":
            optimizer.zero_grad()
            net(torch.ones(2, 5)).backward()
            with pytest.raises(ReductionError, match="an earlier step"):
                optimizer.step()

    run_ranks(main, 3, may_die=[1] if how == "die" else [])


def test_a_rank_has_a_share_of_the_state():
    def main():
        net = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = ShardedOptimizer(net, torch.optim.Adam)
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return sum(s["exp_avg"].numel() for s in optimizer.own_state().values())

    held = run_ranks(main, 4)
    assert sum(held) == 64 * 64 + 64
    assert max(held) <= (64 * 64 + 64) / 4 + 64


def test_wrong_arguments():
    def main():
        plain = nn.Linear(2, 2)
        net = DistributedDataParallel(nn.Linear(2, 2))
        sgd = torch.optim.SGD
        cases = [
            ((plain, sgd), ArgumentTypeError, "model is a Linear"),
            ((net, [("SGD", [*net.parameters()], {})]), ArgumentTypeError, "optimizer is 'SGD'"),
            ((net, [(sgd, plain.parameters(), {})]), ArgumentError, "wrapper reduces"),
            ((net, [(sgd, [*net.parameters()], {})] * 2), ArgumentError, "two optimizers"),
            ((net, torch.optim.LBFGS), NotSupportedError, "LBFGS"),
            ((net, torch.optim.SparseAdam), NotSupportedError, "SparseAdam"),
        ]
        for arguments, error, text in cases:
            with pytest.raises(error, match=text):
                ShardedOptimizer(*arguments)
        with pytest.raises(ArgumentError, match="give each optimizer its own"):
            ShardedOptimizer(net, [(sgd, net.parameters(), {})], lr=0.1)
        optimizer = ShardedOptimizer(net, sgd)
        with pytest.raises(NotSupportedError, match="closure"):
            optimizer.step(lambda: 0.0)
        with net.join():
            net(torch.ones(1, 2)).sum().backward()
            with pytest.raises(NotSupportedError, match="join"):
                optimizer.step()
        sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
        with pytest.raises(NotSupportedError, match="sparse"):
            ShardedOptimizer(sparse, sgd)
        net.register_comm_hook(None, "fp16")
        with pytest.raises(NotSupportedError, match="communication hook"):
            ShardedOptimizer(net, sgd, reduce_scatter=True)

    run_ranks(main)


@pytest.mark.parametrize("what", ["class", "options", "order", "reduce_scatter"])
def test_ranks_that_differ(what):
    def main():
        net, second = DistributedDataParallel(nn.Linear(2, 2)), dist.get_rank() == 1
        differs = what if second else ""
        kind = torch.optim.Adam if differs == "class" else torch.optim.SGD
        params = [*net.parameters()][:: -1 if differs == "order" else 1]
        options = {"lr": 0.2 if differs == "options" else 0.1}
        with pytest.raises(MismatchError, match="optimizers differ"):
            ShardedOptimizer(
                net, [(kind, params, options)], reduce_scatter=differs == "reduce_scatter"
            )

    run_ranks(main)


def test_a_refitted_wrapper_needs_a_new_optimizer():
    def main():
        net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
        optimizer = ShardedOptimizer(net, torch.optim.SGD)
        net.module.append(nn.Linear(2, 2))
        net.refit()
        net(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ReductionError, match="refitted"):
            optimizer.step()

    run_ranks(main)
