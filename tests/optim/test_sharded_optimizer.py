"""ShardedOptimizer: its parameters and state are those of the plain optimizer."""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
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
    (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.RAdam, {"foreach": True}),
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
        # 64 and 128 divide into shards without padding
        widths = [draw.choice([draw.randint(1, 90), 64, 128]) for _ in range(draw.randint(1, 4))]
        widths = [5, *widths, 3]
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
        return x.square().mean() + (self.tied.mean() if hasattr(self, "tied") else 0)


def plain_and_sharded(net, kind, options, *, reduce_scatter, context=nullcontext, **arguments):
    """Two wrappers of equal modules, with the plain optimizer and with the sharded one."""
    twin = copy.deepcopy(net)
    own = DistributedDataParallel(net, **arguments)
    other = DistributedDataParallel(twin, gradient_as_bucket_view=reduce_scatter, **arguments)
    plain = kind([p for p in own.parameters() if p.requires_grad], **copy.deepcopy(options))
    with context():
        sharded = ShardedOptimizer(
            other, kind, reduce_scatter=reduce_scatter, **copy.deepcopy(options)
        )
    return own, plain, other, sharded


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


SCHEDULERS = [
    lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
]


def drawn_specifications(way, kind, options, net):
    """One optimizer, one with groups, one to which parameters are added later, or two."""
    params = [p for p in net.parameters() if p.requires_grad]
    if way == "groups":
        groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}]
        return [(kind, groups, options)]
    if way == "two":
        return [(kind, params[::2], options), (torch.optim.SGD, params[1::2], {"lr": 0.05})]
    return [(kind, params[:-1] if way == "added" else params, options)]


def train_beside_the_plain_optimizer(number, seed, steps, reduce_scatter, backend):
    kind, options = KINDS[number]
    draw = random.Random(seed)
    unused, weighted, clips, frozen, freezes, scales, twice = (
        draw.random() < 0.3 for _ in range(7)
    )
    way = draw.choice(["one", "groups", "two", *["added"] * (not reduce_scatter)])
    exact = backend == "shm" or not reduce_scatter or dist.get_world_size() == 2
    # the norm of pieces, a sum over ranks in another order, and weights before it round differently
    exact = exact and not (reduce_scatter and (clips or weighted))
    # PyTorch's fused SGD in bfloat16 computes a wrong momentum, which depends on sizes
    dtypes = [torch.float32, torch.float32 if "fused" in options else torch.bfloat16]
    dtype = draw.choice(dtypes) if exact else torch.float64
    weighted = weighted and dtype != torch.bfloat16
    steps = steps if exact else min(steps, 8)  # rounding grows a thousandfold in a few steps
    wrapper = {"find_unused_parameters": unused, "bucket_cap_mb": draw.choice([None, 0, 0.01])}
    if not unused:
        wrapper["static_graph"] = draw.random() < 0.3
    net = Drawn(seed, matrices=kind is torch.optim.Muon, unused=unused, dtype=dtype)
    net.layers[0].requires_grad_(not frozen)
    net.tied = net.layers[-1].weight
    twin = copy.deepcopy(net)
    own = DistributedDataParallel(net, **wrapper)
    view = draw.random() < 0.5
    other = DistributedDataParallel(twin, gradient_as_bucket_view=view, **wrapper)
    hook = draw.choice([None, None, "fp16", "bf16"])
    if hook and not reduce_scatter and not (weighted or scales):
        own.register_comm_hook(None, hook)
        other.register_comm_hook(None, hook)
    way = "one" if sum(p.requires_grad for p in net.parameters()) == 1 else way
    last = [[p for p in model.parameters() if p.requires_grad][-1] for model in (own, other)]
    specified = [
        drawn_specifications(way, kind, copy.deepcopy(options), model) for model in (own, other)
    ]
    plains = [each(params, **given) for each, params, given in specified[0]]
    if way == "one":
        given = copy.deepcopy(options)
        sharded = ShardedOptimizer(other, kind, reduce_scatter=reduce_scatter, **given)
    else:
        sharded = ShardedOptimizer(other, specified[1], reduce_scatter=reduce_scatter)
    scheduler = draw.choice(SCHEDULERS[: 1 if way == "added" else 3])  # others have fixed groups
    schedulers = [scheduler(o) for o in (*plains, sharded)]
    scales = scales and not reduce_scatter and way != "two" and dtype == torch.float32
    scalers = [torch.amp.GradScaler("cpu", 8.0, enabled=scales) for _ in range(2)]
    both = (own, plains, scalers[0]), (other, [sharded], scalers[1])
    averages = [AveragedModel(own), AveragedModel(other)]
    samples = torch.Generator().manual_seed(dist.get_rank())
    differs = draw.random() < 0.5  # which parameters the ranks use
    for step in range(steps):
        if step == 3 and freezes and not (frozen or wrapper.get("static_graph")):
            for model in (own, other):
                model.module.layers[1].requires_grad_(False)
        if step == 4 and way == "added":
            for (_, (optimizer, *_), _), parameter in zip(both, last, strict=True):
                optimizer.defaults["weight_decay"] = 0.1
                optimizer.add_param_group({"params": [parameter]})
        if step == 5 and way != "two":
            sharded.consolidate()
            saved = copy.deepcopy(sharded.state_dict())
            sharded.load_state_dict(copy.deepcopy(plains[0].state_dict()))
            plains[0].load_state_dict(saved)
        micro_steps, skips = draw.randint(1, 3), draw.random() < 0.05 and not scales
        local = 0 if twice and not (weighted or reduce_scatter) else micro_steps - 1
        overflows = scales and draw.random() < 0.2
        for micro in range(micro_steps):
            n = draw.randint(1, 9) + dist.get_rank()
            x = torch.randn(n, 5, generator=samples, dtype=torch.float64).to(dtype)
            if overflows and dist.get_rank() == 1:
                x = x * float("inf")
            way_through = step + (dist.get_rank() if differs else 0)
            for model, _, scaler in both:
                with model.no_sync() if micro < local else torch.enable_grad():
                    if weighted:
                        model.weight(n)
                    loss = model(x, way=way_through % 2)
                    if skips and micro == micro_steps - 1:
                        assert model.skip_if_any(dist.get_rank() == 1)
                    else:
                        scaler.scale(loss).backward()
        for _, optimizers, scaler in both:
            if clips and scales:
                scaler.unscale_(optimizers[0])
        if clips:
            groups = [group for optimizer in plains for group in optimizer.param_groups]
            norm = clip_grad_norm_([p for group in groups for p in group["params"]], 0.1)
            torch.testing.assert_close(
                sharded.clip_grad_norm_(0.1), norm, check_dtype=False, equal_nan=True
            )
        for model, optimizers, scaler in both:
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            model.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        for average, (model, *_) in zip(averages, both, strict=True):
            average.update_parameters(model)
    assert_same(own, other, bits=exact)
    assert_same(*averages, bits=exact)
    assert_equal_on_all_ranks(other)
    sharded.consolidate()
    if exact and way != "two":
        assert_same_state(sharded.state_dict(), plains[0].state_dict())


def assert_same_state(own, expected):
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert own["state"][number].keys() == state.keys()
        for key, value in state.items():
            held = own["state"][number][key]
            assert type(held) is type(value), (number, key)
            if isinstance(value, torch.Tensor):  # a zero may have another sign: -0 + -0 from 0 is 0
                assert held.dtype == value.dtype, (number, key)
                assert torch.equal(held, value), (number, key)
            else:
                assert repr(held) == repr(value), (number, key)  # such as lists of tensors


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train(number, seed, *arguments):
    with default_dtype() if seed % 4 == 0 else nullcontext():
        train_beside_the_plain_optimizer(number, seed, *arguments)


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_parameters_and_state_are_those_of_the_plain_optimizer(
    number, reduce_scatter, each_backend
):
    arguments = number, number, 12, reduce_scatter, each_backend
    run_ranks(train, 2 + number % 2, args=arguments)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(100, 160))
@pytest.mark.timeout(300)
def test_many_drawn_models(seed, each_backend):
    draw = random.Random(seed)
    number, reduce_scatter = draw.randrange(len(KINDS)), draw.random() < 0.5
    arguments = number, seed, 200, reduce_scatter, each_backend
    run_ranks(train, draw.randint(2, 4), args=arguments, timeout=250)


class Dtypes(nn.Module):
    """Parameters in three dtypes, a complex one, one that is used twice, and empty ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 70).bfloat16()
        self.second = nn.Linear(70, 70)
        self.third = nn.Linear(70, 9).double()
        self.complex = nn.Parameter(torch.randn(5, 70, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.alone = nn.Parameter(torch.empty(0, dtype=torch.float16))
        self.tied = self.second.weight

    def forward(self, x):
        y = self.first(x.bfloat16()).float() + (x.to(torch.complex64) @ self.complex).abs()
        y = self.second(y.tanh()) + y @ self.tied
        return self.third(y.double()).square().mean() + self.empty.sum() + self.alone.sum().float()


class OddState(torch.optim.Optimizer):
    """Has numbers, lists, dicts and None in its state, and counts its steps in its groups."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        sums = [torch.zeros_like(p), 3]
                        state.update(n=0, none=None, sums=sums, more={"a": torch.ones(2)})
                    state["n"] += 1
                    state["sums"][0].add_(p.grad)
                    p.sub_(state["sums"][0], alpha=group["lr"] / group["count"])


SGD, ADAMW, MOMENTUM = torch.optim.SGD, torch.optim.AdamW, {"lr": 0.1, "momentum": 0.9}
SPECIAL = {
    "bfloat16": (lambda: Drawn(1, dtype=torch.bfloat16), ADAMW, {}, nullcontext),
    "float16": (lambda: Drawn(1, dtype=torch.float16), SGD, MOMENTUM, nullcontext),
    "dtypes": (Dtypes, ADAMW, {}, nullcontext),
    "dtypes, whole": (Dtypes, OddState, {}, nullcontext),
    "autocast": (lambda: Drawn(1), ADAMW, {}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "inference": (lambda: Drawn(1), ADAMW, {}, torch.inference_mode),
    "default dtype": (lambda: Drawn(1), ADAMW, {}, default_dtype),
    "default device": (lambda: Drawn(1), ADAMW, {}, lambda: torch.device("meta")),
    "one large": (
        lambda: nn.Sequential(nn.Linear(5, 999), nn.Linear(999, 1)),
        OddState,
        {},
        nullcontext,
    ),
}


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_models_optimizers_and_contexts(name, reduce_scatter):
    def main():
        torch.manual_seed(0)
        make, kind, options, context = SPECIAL[name]
        net = make()
        own, plain, other, sharded = plain_and_sharded(
            net, kind, options, reduce_scatter=reduce_scatter, context=context
        )
        samples = torch.Generator().manual_seed(dist.get_rank())
        for step in range(8):
            x = torch.randn(4, 5, generator=samples)
            x = x.to(next(net.parameters()).dtype) if "float" in name else x
            for model in (own, other):
                model(x).mean().backward()
            with context():
                wide = {"rtol": 0.01, "atol": 0} if "dtypes" in name else {}
                norms = sharded.clip_grad_norm_(1e9), clip_grad_norm_(own.parameters(), 1e9)
                torch.testing.assert_close(*norms, **wide)
                sharded.step()
                sharded.zero_grad()
                if step % 3 == 0:
                    sharded.consolidate()
                    sharded.load_state_dict(sharded.state_dict())
            with nullcontext() if context is torch.inference_mode else context():
                plain.step()
                plain.zero_grad()
                if step % 3 == 0:
                    plain.load_state_dict(plain.state_dict())
        assert_same(own, other)
        assert_equal_on_all_ranks(other)
        sharded.consolidate()
        assert_same_state(sharded.state_dict(), plain.state_dict())

    run_ranks(main)


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


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
def test_distributed_checkpoints_move_between_numbers_of_ranks(kind, reduce_scatter, tmp_path):
    def steps(net, optimizer, numbers):
        for number in numbers:
            samples = torch.Generator().manual_seed(number)
            net(torch.randn(4, 5, generator=samples)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save():
        net = DistributedDataParallel(Drawn(5))
        optimizer = ShardedOptimizer(net, kind, reduce_scatter=reduce_scatter)
        steps(net, optimizer, range(3))
        if kind is torch.optim.AdamW:
            with pytest.raises(ReductionError, match="consolidate"):
                get_optimizer_state_dict(net, optimizer)
        optimizer.register_state_dict_pre_hook(ShardedOptimizer.consolidate)
        model, state = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=tmp_path)

    def load(sharded):
        net = DistributedDataParallel(Drawn(5))
        if sharded:
            optimizer = ShardedOptimizer(net, kind, reduce_scatter=reduce_scatter)
            optimizer.register_state_dict_pre_hook(ShardedOptimizer.consolidate)
        else:
            optimizer = kind([p for p in net.parameters() if p.requires_grad])
        model, state = get_state_dict(net, optimizer)
        saved = {"model": model, "optimizer": state}
        dcp.load(saved, checkpoint_id=tmp_path)
        set_state_dict(
            net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        steps(net, optimizer, range(3, 6))
        return [p.detach() for p in net.parameters()], optimizer.state_dict()

    run_ranks(save, 4)
    parameters, state = run_ranks(load, 1, args=(False,))[0]
    for ranks in (2, 1):
        for own, own_state in run_ranks(load, ranks, args=(True,)):
            assert all(map(torch.equal, own, parameters))
            assert_same_state(own_state, state)


class PerRank(torch.optim.SGD):
    """Changes an option by what only this rank knows, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 1 + dist.get_rank()


def backward(net, rank_scale=0.0):
    net(torch.ones(2, 5) * (1 + rank_scale * dist.get_rank())).backward()


def another_rate(net, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    optimizer.step()


def loaded_on_one_rank(net, optimizer):
    optimizer.consolidate()
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        optimizer.load_state_dict(state)
    optimizer.step()


def not_reduced(net, optimizer):
    optimizer.zero_grad()
    with net.no_sync():
        backward(net, 1.0)
    optimizer.step()


def another_format(net, optimizer):
    net.module.conv.to(memory_format=torch.contiguous_format)
    optimizer.step()


def scaled(net, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(2, 5))).backward()
    scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    finally:
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def another_hook(net, optimizer):
    net.register_comm_hook(None, None)
    optimizer.clip_grad_value_(1.0)


def unfinished(net, optimizer):
    net.require_manual_backward_finalization = True
    optimizer.zero_grad()
    backward(net)
    try:
        optimizer.step()
    finally:
        net.finalize_backward()


def within_backward(net, optimizer):
    optimizer.zero_grad()
    net.module.scale.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    backward(net)


def left_out(net, optimizer):
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()


def put_in(net, optimizer):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    optimizer.step()


def cleared_state(net, optimizer):
    optimizer.step()
    optimizer.state = defaultdict(dict)
    optimizer.step()


def written_state(net, optimizer):
    optimizer.state[net.module.scale]["momentum_buffer"] = torch.zeros(())
    optimizer.step()


def doubles(net, optimizer):
    net.double()
    optimizer.step()


def another_shape(net, optimizer):
    net.module.scale.data = torch.ones(2)
    optimizer.step()


def one_without_gradient(net, optimizer):
    if dist.get_rank() == 1:
        net.module.conv.weight.grad = None
    optimizer.step()


def numpys_rate(net, optimizer):
    optimizer.param_groups[0]["lr"] = numpy.float32(0.25 * (1 + dist.get_rank()))
    optimizer.step()


def after_a_failed_step(net, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1 if dist.get_rank() else 0.2)
    with pytest.raises(MismatchError, match=r"0\.2"):
        optimizer.step()
    optimizer.consolidate()


BOTH = [False, True]
REFUSED = [
    (another_rate, SGD, BOTH, MismatchError, r"'lr': '0.1'.*'lr': '0.2'"),
    (loaded_on_one_rank, SGD, BOTH, MismatchError, "loaded state: none"),
    (not_reduced, SGD, BOTH, ReductionError, "outside of no_sync"),
    (unfinished, SGD, BOTH, ReductionError, "to its end"),
    (within_backward, SGD, BOTH, (ReductionError, HookError), "to its end"),
    (left_out, SGD, BOTH, NotSupportedError, "param_groups"),
    (put_in, SGD, BOTH, NotSupportedError, "param_groups"),
    (cleared_state, SGD, BOTH, NotSupportedError, "state was changed"),
    (written_state, SGD, BOTH, NotSupportedError, "state was changed"),
    (doubles, SGD, BOTH, NotSupportedError, "another dtype"),
    (another_shape, SGD, BOTH, NotSupportedError, "another dtype, shape"),
    (one_without_gradient, SGD, [False], MismatchError, "without a gradient.*conv.weight"),
    (numpys_rate, SGD, BOTH, MismatchError, r"'lr': '0.25'.*'lr': '0.5'"),
    (another_format, SGD, BOTH, NotSupportedError, "memory format"),
    (after_a_failed_step, SGD, BOTH, ReductionError, "load_state_dict"),
    (lambda net, optimizer: optimizer.step(), PerRank, BOTH, MismatchError, "'lr'"),
    (lambda net, optimizer: copy.deepcopy(optimizer), SGD, BOTH, NotSupportedError, "state_dict"),
    (lambda net, optimizer: pickle.dumps(optimizer), SGD, BOTH, NotSupportedError, "state_dict"),
    (scaled, SGD, [True], NotSupportedError, "GradScaler"),
    (another_hook, SGD, [True], ReductionError, "another communication hook"),
    (lambda net, optimizer: optimizer.zero_grad(False), SGD, [True], NotSupportedError, "set_to"),
    (lambda net, optimizer: optimizer.clip_grad_norm_(1, 0), SGD, [True], ArgumentError, "norm"),
]


@pytest.mark.parametrize(
    ("number", "reduce_scatter"), [(i, m) for i, r in enumerate(REFUSED) for m in r[2]]
)
def test_refused_on_all_ranks(number, reduce_scatter):
    def main():
        attempt, kind, _, error, match = REFUSED[number]
        torch.manual_seed(0)
        net = DistributedDataParallel(Drawn(12))
        options = {"lr": 0.1, "momentum": 0.9, "reduce_scatter": reduce_scatter}
        optimizer = ShardedOptimizer(net, kind, **options)
        backward(net)
        before = [p.clone() for p in net.parameters()]
        with pytest.raises(error, match=match):
            attempt(net, optimizer)
        if attempt not in (cleared_state, another_shape):
            assert all(p.eq(q).all() for p, q in zip(net.parameters(), before, strict=True))

    run_ranks(main)


def scaled_by(factor):
    def scale(optimizer, *_):
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(factor)

    return scale


class WithHook(torch.optim.SGD):
    """Has a hook of its own."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.register_step_post_hook(scaled_by(0.99))


def with_hooks(model, optimizer, step):
    handles = [
        optimizer.register_step_post_hook(scaled_by(0.9)),
        optimizer.register_step_pre_hook(scaled_by(1.1)),
        register_optimizer_step_post_hook(scaled_by(0.8)),
    ]
    backward(model)
    optimizer.step()
    for handle in handles:
        handle.remove()


def with_options(model, optimizer, step):
    lr = [0.1, numpy.float32(0.25), torch.tensor(0.5)][step % 3]
    optimizer.param_groups[0].update(name="all", lr=lr, momentum=0.5 + 0.1 * step)
    backward(model)
    optimizer.step()


def with_an_average(model, optimizer, step):
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    backward(model)
    optimizer.step()
    average.update_parameters(model.module)
    model.module.load_state_dict(average.module.state_dict())


def by_hand(model, optimizer, step):
    backward(model, 1.0)
    optimizer.step()
    for parameter in model.parameters():
        parameter.data = parameter.detach().clamp(-0.5, 0.5)


def without_backward(model, optimizer, step):
    if step != 2:
        backward(model, 1.0)
    optimizer.step()


def resumed(model, optimizer, step):
    backward(model, 1.0)
    optimizer.step()
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.consolidate(1)  # the others have no state to pass on
        states = [optimizer.state_dict() if dist.get_rank() == 1 else None]
        dist.broadcast_object_list(states, 1)
        optimizer.load_state_dict(states[0])


def frozen(model, optimizer, step):
    if step == 2:
        model.module.conv.weight.requires_grad_(False)
    backward(model, 1.0)
    optimizer.step()


def frozen_on_a_rank(model, optimizer, step):
    model.module.conv.weight.requires_grad_(step != 2 or dist.get_rank() == 0)
    backward(model, 1.0)
    optimizer.step()


def scaled_gradients(model, optimizer, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.ones(2, 5) * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()


def compiled(model, optimizer, step):
    torch.compile(model, backend="eager")(torch.ones(2, 5)).backward()
    torch.compile(optimizer.step, backend="eager")()


def twice(model, optimizer, step):
    backward(model, 1.0)
    backward(model, -1.0)
    optimizer.step()
    model.zero_grad(set_to_none=step % 2 == 0)


def gradients_by_hand(model, optimizer, step):
    backward(model, 1.0)
    model.module.conv.weight.grad = None
    model.module.scale.grad = torch.ones(())
    model.module.layers[0].weight.grad.mul_(2.0)
    optimizer.step()


def never_zeroed(model, optimizer, step):
    backward(model, 1.0)
    optimizer.step()


WAYS = [
    *((way, BOTH) for way in (with_hooks, with_options, with_an_average, by_hand)),
    *((way, BOTH) for way in (without_backward, resumed, frozen, frozen_on_a_rank, compiled)),
    *((way, [False]) for way in (twice, gradients_by_hand, never_zeroed, scaled_gradients)),
]


@pytest.mark.parametrize(
    ("number", "reduce_scatter"), [(i, m) for i, w in enumerate(WAYS) for m in w[1]]
)
def test_a_step_is_as_that_of_the_plain_optimizer(number, reduce_scatter):
    def main():
        way, _ = WAYS[number]
        kind = WithHook if way is by_hand else SGD
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        own, plain, other, sharded = plain_and_sharded(
            Drawn(12), kind, options, reduce_scatter=reduce_scatter
        )
        for step in range(6):
            for model, optimizer in ((own, plain), (other, sharded)):
                way(model, optimizer, step)
                if way not in (twice, never_zeroed):
                    optimizer.zero_grad()
        assert_same(own, other)
        assert_equal_on_all_ranks(other)
        sharded.consolidate()
        assert_same_state(sharded.state_dict(), plain.state_dict())

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


class Failing(torch.optim.SGD):
    """Calls a function in its step."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0].get("function", int)()


def end_process():
    os._exit(1)


def fail():
    raise ArithmeticError


def next_step(net, optimizer):
    optimizer.zero_grad()
    backward(net)
    optimizer.step()


def before_the_agreement(*_, **__):
    end_process()


def after_the_agreement(*args, **kwargs):
    all_reduce(*args, **kwargs).wait()
    time.sleep(2)
    end_process()


all_reduce = dist.all_reduce
FAILURES = {
    "raises before step": lambda options: fail(),
    "raises in step": lambda options: options.update(function=fail),
    "ends before step": lambda options: end_process(),
    "ends in step": lambda options: options.update(function=end_process),
    "ends before the agreement": lambda _: setattr(dist, "all_reduce", before_the_agreement),
    "ends after the agreement": lambda _: setattr(dist, "all_reduce", after_the_agreement),
}


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("where", FAILURES)
def test_a_rank_that_fails_leaves_all_before_the_step_or_all_after_it(where, reduce_scatter):
    def main():
        # where Gloo waits for what rank 1 does not send
        group = (
            dist.new_group(timeout=timedelta(seconds=8)) if where == "raises before step" else None
        )
        net = DistributedDataParallel(Drawn(10), process_group=group)
        optimizer = ShardedOptimizer(net, Failing, lr=0.1, reduce_scatter=reduce_scatter)
        for _ in range(2):
            next_step(net, optimizer)
        before = [p.clone() for p in net.parameters()]
        optimizer.zero_grad()
        backward(net)
        raised, failed = None, dist.get_rank() == 1
        try:
            if failed:
                FAILURES[where](optimizer.param_groups[0])
            optimizer.step()
        except Exception as error:
            raised = error
        changed = not all(map(torch.equal, net.parameters(), before))
        assert changed is (where == "ends after the agreement")
        if changed:
            with pytest.raises(PeerLostError):
                backward(net)
        elif failed:
            assert isinstance(raised, ArithmeticError)
        else:
            kind = {"raises in step": PeerFailedError, "raises before step": DistributedError}
            assert isinstance(raised, kind.get(where, PeerLostError)), raised
        if where.startswith("raises"):
            with pytest.raises(DistributedError):
                next_step(net, optimizer)

    run_ranks(main, 3, may_die=[1] if where.startswith("ends") else [])


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
            ((net, [(sgd, [nn.Parameter(torch.ones(2), False)], {})]), ArgumentError, "require"),
            ((net, torch.optim.LBFGS), NotSupportedError, "LBFGS"),
            ((net, sgd(net.parameters())), ArgumentTypeError, "optimizer is a SGD"),
            ((net, [sgd]), ArgumentTypeError, "list of tuples"),
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
        net.register_comm_hook(None, None)
        ShardedOptimizer(net, sgd, reduce_scatter=True)
        twin = copy.deepcopy(net)  # without the optimizer: its gradients are whole
        twin(torch.ones(1, 2)).sum().backward()
        assert twin.module.weight.grad.eq(1).all()

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
