"""Training steps on the device, against the mean of the ranks' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp.common import OneProcess, in_one_process
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpu.common import (
    DEVICE,
    EXACT,
    HAS_MIXED_GROUPS,
    ON_GPU,
    ONE,
    WORLDS,
    assert_same_bits,
    batch,
    network,
    on_each,
    plain,
    run,
    train,
)  # fmt: skip
from gradwire import elastic, hooks
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm

OPTIONS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 0.01},
    "one bucket each": {"bucket_cap_mb": 0},
    "list of caps": {"bucket_cap_mb_list": [0.001, 0.1]},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy view": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 1000},
    "own buffers": {"broadcast_buffers": False},
    "replicas": {"check_replicas": 1},
    "device_ids": {"device_ids": [0] if ON_GPU else None},
}  # fmt: skip


def train_with(options):
    net = DistributedDataParallel(network(), **options)
    train(net)


@on_each(WORLDS, timeout=90)
def test_gradients_with_each_option():
    for name, options in OPTIONS.items():
        try:
            train_with(options)
        except Exception as error:
            raise AssertionError(f"with option {name}: {error}") from error


def left_out(net, rank, number):
    net(batch(number, rank), whole=False).square().mean().backward()


@on_each(WORLDS)
def test_a_part_that_is_left_out():
    for options in ({}, {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.01}):
        net = DistributedDataParallel(network(), find_unused_parameters=True, **options)
        train(net, left_out)
    net = DistributedDataParallel(network(), static_graph=True)
    train(net, left_out)


@pytest.mark.skipif(ON_GPU and not HAS_MIXED_GROUPS, reason="needs PyTorch 2.14")
@pytest.mark.parametrize(("ranks", "backend"), [(1, "cpu:shm,cuda:nccl"), (2, "cpu:shm,cuda:gloo")])
def test_groups_with_shm_for_the_cpu(ranks, backend):
    """Messages of the reducer go through shared memory, gradients over the other backend."""
    run(train_with, ranks, backend, args=({},))


# -- hooks ---------------------------------------------------------------------------------

STOCK = {
    "all_reduce": (EXACT, hooks.all_reduce),
    "bf16": (2e-2, hooks.bf16),
    "fp16": (2e-3, hooks.fp16),
    "torch's allreduce": (EXACT, default_hooks.allreduce_hook),
    "int8": (None, "int8"),
    "int4": (None, "int4"),
}
TORCHS = {
    "fp16": (2e-3, None, default_hooks.fp16_compress_hook),
    "bf16": (2e-2, None, default_hooks.bf16_compress_hook),
    "PowerSGD": (None, {"matrix_approximation_rank": 4}, power.powerSGD_hook),
}


@on_each(WORLDS, timeout=90)
def test_stock_hooks():
    for name, (tolerance, hook) in STOCK.items():
        net = DistributedDataParallel(network())
        net.register_comm_hook(None, hook)
        if tolerance is None:
            check_lossy(net, name)
            continue
        try:
            train(net, tolerance=tolerance)
        except AssertionError as error:
            raise AssertionError(f"hook {name}: {error}") from error


def check_lossy(net, name, program=plain, *, start=0, least=0.3):
    """A compressed mean points to where the mean does, and is the same on all ranks."""
    for number in range(start + 3):
        expected = in_one_process(program, net.module, number, dist.get_world_size())
        net.zero_grad()
        program(net, dist.get_rank(), number)
    got = torch.cat([p.grad.flatten() for p in net.parameters()])
    want = torch.cat([g.flatten() for g in expected])
    likeness = torch.cosine_similarity(got, want, dim=0).item()
    assert likeness > least, f"{name}: {likeness}"
    assert_same_bits(got, name)


@on_each([(1, ONE)])
def test_torchs_hooks():
    """On one rank: over Gloo they read results too early, in PyTorch's class too."""
    for name, (tolerance, state, hook) in TORCHS.items():
        net = DistributedDataParallel(network())
        given = state and power.PowerSGDState(None, start_powerSGD_iter=2, **state)
        net.register_comm_hook(given, hook)
        if tolerance:
            train(net, tolerance=tolerance)
        else:
            check_lossy(net, name, start=3)


# -- programs ------------------------------------------------------------------------------


@on_each(WORLDS[:2])
def test_autocast():
    net = DistributedDataParallel(network())
    with torch.autocast(DEVICE, torch.bfloat16):  # the twin runs in it as well
        check_lossy(net, "autocast", least=0.98)


def accumulate(net, rank, number):
    with net.no_sync():
        plain(net, rank, 3 * number)
    plain(net, rank, 3 * number + 1)


def forward_twice(net, rank, number):
    (net(batch(number, rank)).square().mean() + net(batch(9, rank)).mean()).backward()


def finalize_by_hand(net, rank, number):
    net.require_manual_backward_finalization = True
    plain(net, rank, number)
    net.finalize_backward()
    net.require_manual_backward_finalization = False


def weigh(net, rank, number):
    ranks, loss_weight = dist.get_world_size(), 1.0
    if isinstance(net, OneProcess):
        loss_weight = (rank + 1.0) * ranks / sum(range(1, ranks + 1))
    else:
        net.weight(rank + 1.0)
    (loss_weight * net(batch(number, rank)).square().mean()).backward()


PROGRAMS = [accumulate, forward_twice, finalize_by_hand, weigh]


@on_each(WORLDS, timeout=90)
def test_programs():
    for program in PROGRAMS:
        # buffers stay with their rank, as in one process
        train(DistributedDataParallel(network(), broadcast_buffers=False), program, steps=3)


@on_each(WORLDS)
def test_kept_gradients_do_not_change():
    net, kept = DistributedDataParallel(network(), broadcast_buffers=False), []
    for _ in range(3):
        train(net, steps=1)
        kept += [(p.grad, p.grad.clone()) for p in net.parameters()]
    assert all(torch.equal(g, was) for g, was in kept)


@on_each(WORLDS)
def test_clipped_gradients_and_an_optimizer():
    """They read gradients on the stream of the backward."""
    net = DistributedDataParallel(network(), broadcast_buffers=False)
    twin = copy.deepcopy(net.module)
    sides = [(m, torch.optim.AdamW(m.parameters(), foreach=True)) for m in (net, twin)]
    for number in range(4):
        expected = in_one_process(plain, twin, number, dist.get_world_size())
        for p, mean in zip(twin.parameters(), expected, strict=True):
            p.grad = mean
        net.zero_grad()
        plain(net, dist.get_rank(), number)
        for module, optimizer in sides:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            x = x.clone().requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def main():
        net = DistributedDataParallel(Checkpointed(), broadcast_buffers=False)
        train(net)

    run(main, 2)


def test_sparse_gradients():
    def program(net, rank, number):
        rows = (torch.arange(6, device=DEVICE) * (rank + 1) + number) % 50
        net(rows).square().sum().backward()

    def main():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)).to(DEVICE)
        net = DistributedDataParallel(module)
        train(net, program, steps=3)
        assert net.module[0].weight.grad.is_sparse

    for ranks, backend in WORLDS[:2]:
        run(main, ranks, backend)


@on_each([(2, "gloo")])
def test_ranks_run_out_of_input():
    net = DistributedDataParallel(network(), broadcast_buffers=False)
    with net.join():
        for number in range(2 + dist.get_rank()):
            net.zero_grad()
            net(batch(number)).square().mean().backward()
    assert_same_bits(torch.cat([p.detach().flatten() for p in net.parameters()]))


@on_each(WORLDS)
def test_buffers_are_rank_0s():
    net = DistributedDataParallel(network())
    net.module.norm.running_mean += dist.get_rank()
    net(batch()).sum().backward()
    net.eval()
    with torch.no_grad():
        net(batch())
    assert_same_bits(net.module.norm.running_mean)
    assert_same_bits(net.module.norm.num_batches_tracked)


@on_each(WORLDS[:2])
def test_sync_batch_norm():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = torch.randn(4 * ranks, 3, 5).to(DEVICE).requires_grad_()
    own = whole.detach().chunk(ranks)[rank].clone().requires_grad_()
    layer = SyncBatchNorm(3).to(DEVICE)
    twin = nn.BatchNorm1d(3).to(DEVICE)
    weights = torch.randn(4 * ranks, 3, 5).to(DEVICE)
    (layer(own) * weights.chunk(ranks)[rank]).sum().backward()
    (twin(whole) * weights).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad.chunk(ranks)[rank], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var, twin.running_var, rtol=1e-4, atol=1e-5)


def peak_of(wrap):
    """Return the device's peak memory in steps of a wrapper, above that before it."""
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to(DEVICE)
    x = torch.randn(8, 512).to(DEVICE)
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    net = wrap(module)
    for _ in range(4):
        net.zero_grad()
        net(x).sum().backward()
    return torch.cuda.max_memory_allocated() - before if ON_GPU else 0


def test_memory_is_not_above_that_of_torchs_class():
    def main():
        found = {}
        for name, options in (("plain", {}), ("view", {"gradient_as_bucket_view": True})):
            wraps = DistributedDataParallel, TorchDistributedDataParallel
            found[name] = [peak_of(lambda m, w=w, o=options: w(m, **o)) for w in wraps]
        return found

    for name, (ours, theirs) in run(main, 1, ONE)[0].items():
        assert ours <= 1.02 * theirs, f"{name}: {ours / 1e6:.1f} MB beside {theirs / 1e6:.1f}"


def test_members_of_an_elastic_run():
    """The sum over shards, on whichever member, is that of the whole batch."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def steps_of(model):
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def main():
        torch.manual_seed(0)
        model, optimizer = steps_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(DEVICE))
        twin, alone = steps_of(copy.deepcopy(model))
        store = dist.PrefixStore("elastic", dist.distributed_c10d._get_default_store())
        member = elastic.join(store, members=2, shards=4)
        member.keep(model=model, optimizer=optimizer)
        for step in member.steps(4, samples=len(x), batch=16):
            with step:
                for shard in step.shards:
                    step.backward(model(x[step.sample_ids(shard)].to(DEVICE)).square().mean())
                step.commit(optimizer)
        samples = elastic.Samples(len(x), batch=16, shards=4)
        for number in range(4):
            alone.zero_grad()
            whole = x[samples.ids(number, elastic.Shard(0, 4))].to(DEVICE)
            twin(whole).square().mean().backward()
            alone.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
            assert_same_bits(p)

    run(main, 2)
