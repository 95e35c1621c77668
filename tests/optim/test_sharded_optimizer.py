"""ShardedOptimizer: its parameters and state are those of the plain optimizer."""

from __future__ import annotations

import copy
import os
import random
from contextlib import contextmanager, nullcontext
from itertools import pairwise

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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

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


def train_beside_the_plain_optimizer(number, seed, steps, reduce_scatter, backend):
    kind, options = KINDS[number]
    draw = random.Random(seed)
    unused = draw.random() < 0.3
    exact = backend == "shm" or not reduce_scatter or dist.get_world_size() == 2
    weighted, clips = draw.random() < 0.3, draw.random() < 0.3
    # the norm of pieces, a sum over ranks in another order, and weights before it round differently
    exact = exact and not (reduce_scatter and (clips or weighted))
    dtype = torch.float32 if exact else torch.float64
    steps = steps if exact else min(steps, 8)  # rounding grows a thousandfold in a few steps
    wrapper = {"find_unused_parameters": unused, "bucket_cap_mb": draw.choice([None, 0, 0.01])}
    if not unused:
        wrapper["static_graph"] = draw.random() < 0.3
    net = Drawn(seed, matrices=kind is torch.optim.Muon, unused=unused, dtype=dtype)
    own, plain, other, sharded = plain_and_sharded(
        net, kind, options, reduce_scatter=reduce_scatter, **wrapper
    )
    scheduler = draw.choice(SCHEDULERS)
    schedulers = [scheduler(o) for o in (plain, sharded)]
    averages = [AveragedModel(own), AveragedModel(other)]
    samples = torch.Generator().manual_seed(dist.get_rank())
    differs = draw.random() < 0.5  # which parameters the ranks use
    for step in range(steps):
        micro_steps, skips = draw.randint(1, 3), draw.random() < 0.05
        for micro in range(micro_steps):
            n = draw.randint(1, 9) + dist.get_rank()
            x = torch.randn(n, 5, generator=samples, dtype=dtype)
            way = step + (dist.get_rank() if differs else 0)
            for model in (own, other):
                with model.no_sync() if micro < micro_steps - 1 else torch.enable_grad():
                    if weighted:
                        model.weight(n)
                    loss = model(x, way=way % 2)
                    if skips and micro == micro_steps - 1:
                        assert model.skip_if_any(dist.get_rank() == 1)
                    else:
                        loss.backward()
        if clips:
            norm = clip_grad_norm_(own.parameters(), 0.1)
            torch.testing.assert_close(sharded.clip_grad_norm_(0.1), norm, check_dtype=False)
        for optimizer, scheduler in zip((plain, sharded), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for average, model in zip(averages, (own, other), strict=True):
            average.update_parameters(model)
    assert_same(own, other, bits=exact)
    assert_same(*averages, bits=exact)
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
            assert repr(held) == repr(value), (number, key)
            if isinstance(value, torch.Tensor):
                assert torch.equal(held, value), (number, key)


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_parameters_and_state_are_those_of_the_plain_optimizer(
    number, reduce_scatter, each_backend
):
    arguments = number, number, 12, reduce_scatter, each_backend
    run_ranks(train_beside_the_plain_optimizer, 2 + number % 2, args=arguments)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(100, 160))
@pytest.mark.timeout(300)
def test_many_drawn_models(seed, each_backend):
    draw = random.Random(seed)
    number, reduce_scatter = draw.randrange(len(KINDS)), draw.random() < 0.5
    arguments = number, seed, 200, reduce_scatter, each_backend
    run_ranks(train_beside_the_plain_optimizer, draw.randint(2, 4), args=arguments, timeout=250)


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


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        wide = nn.Linear(width, 4 * width, bias=False)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x):
        parts = self.attention(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(y)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Character model whose embedding is also its last layer, as in nanoGPT."""

    def __init__(self, characters, width=32, length=16, layers=2, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("muon", [False, True])
def test_a_small_gpt_has_the_losses_of_the_plain_optimizers(muon, reduce_scatter):
    text = "to be or not to be, that is the question: whether 'tis nobler in the mind to suffer "

    def losses(sharded):
        torch.manual_seed(0)
        data = torch.tensor([sorted({*text}).index(c) for c in text * 4])
        net = DistributedDataParallel(GPT(len({*text})))
        matrices = [p for p in net.module.blocks.parameters() if p.dim() == 2]
        rest = [p for p in net.parameters() if not any(p is m for m in matrices)]
        if muon:
            specified = [(torch.optim.Muon, matrices, {"lr": 0.02})]
        else:
            rest, specified = [*matrices, *rest], []
        decayed, others = ([p for p in rest if (p.dim() > 1) is d] for d in (True, False))
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        specified.append((torch.optim.AdamW, groups, {"lr": 0.01, "betas": (0.9, 0.95)}))
        if sharded:
            optimizers = [ShardedOptimizer(net, specified, reduce_scatter=reduce_scatter)]
        else:
            optimizers = [kind(params, **options) for kind, params, options in specified]
        schedules = [lr_scheduler.CosineAnnealingLR(o, 60) for o in optimizers]
        samples, found = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(60):
            for micro in range(2):
                starts = torch.randint(len(data) - 17, (4,), generator=samples)
                batch = torch.stack([data[i : i + 17] for i in starts])
                with net.no_sync() if micro == 0 else nullcontext():
                    loss = net(batch[:, :-1], batch[:, 1:]) / 2
                    loss.backward()
            found.append(loss.item())
            if sharded and reduce_scatter:
                optimizers[0].clip_grad_norm_(1.0)
            else:
                clip_grad_norm_(net.parameters(), 1.0)
            for each in (*optimizers, *schedules):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        return found

    def main():
        expected, found = losses(sharded=False), losses(sharded=True)
        assert expected[-1] < 0.5 * expected[0]
        # with reduce_scatter, the norm is that of the shards
        torch.testing.assert_close(found, expected, rtol=1e-3 if reduce_scatter else 0, atol=0)

    run_ranks(main)


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
    (another_format, SGD, BOTH, NotSupportedError, "memory format"),
    (after_a_failed_step, SGD, BOTH, ReductionError, "load_state_dict"),
    (lambda net, optimizer: optimizer.step(), PerRank, BOTH, MismatchError, "'lr'"),
    (lambda net, optimizer: copy.deepcopy(optimizer), SGD, BOTH, NotSupportedError, "state_dict"),
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
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))

    run_ranks(main)


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
                if step in (2, 4):
                    optimizer.add_param_group({"params": more[step - 2 : step], "lr": 0.1})
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
            with pytest.raises(ReductionError, match="that failed"):
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
            ((net, [(sgd, [nn.Parameter(torch.ones(2), False)], {})]), ArgumentError, "require"),
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
