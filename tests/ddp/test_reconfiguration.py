"""Changes after wrapping: parameters, the group, the hook and the bucket layout."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from ddp import naive
from ddp.common import assert_good_step, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.buckets.assignment import BucketSet
from gradwire.errors import ArgumentError, MismatchError, PeerFailedError

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-4}])
@on_ranks(2)
def test_frozen_and_unfrozen_parameters(options):
    net = DistributedDataParallel(mlp(), **options)
    assert_good_step(net)
    net.module[2].requires_grad_(False)
    assert_good_step(net)
    assert_good_step(net)
    net.module[2].requires_grad_(True)
    assert_good_step(net)
    net.module[2].requires_grad_(False)
    net.refit()
    assert "2.weight" not in str(net.reducer.buckets)
    assert_good_step(net)
    net.module[2].requires_grad_(True)
    with pytest.raises(ArgumentError, match=r"\['2\.weight', '2\.bias'\] were frozen when"):
        net(torch.zeros(1, 4))
    net.refit()
    assert_good_step(net)


@on_ranks(2)
def test_parameters_that_are_added_or_replaced_are_refused_by_name():
    net = DistributedDataParallel(mlp())
    assert_good_step(net)
    nn.Linear(2, 2)  # somebody else's
    net.module.append(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"\['4\.weight', '4\.bias'\] were added"):
        net(torch.zeros(1, 4))
    with pytest.raises(ArgumentError, match="refit"):  # again
        net(torch.zeros(1, 4))
    with torch.no_grad():
        net(torch.zeros(1, 4))
    net.refit()
    assert_good_step(net)
    net.module[0].weight = nn.Parameter(torch.randn(8, 4))
    with pytest.raises(ArgumentError, match=r"0\.weight"):
        net(torch.zeros(1, 4))
    net.refit()  # takes rank 0's
    assert_good_step(net)


def in_a_sequential(net):
    net.module[0] = nn.Sequential(net.module[0], nn.Tanh())
    net.module[3] = nn.Sequential(net.module[3])


def pruned(net):
    prune.l1_unstructured(net.module[2], "weight", amount=3)
    prune.random_unstructured(net.module[3], "bias", amount=1)


def pruned_for_good(net):
    pruned(net)
    prune.remove(net.module[2], "weight")


@pytest.mark.parametrize("rename", [in_a_sequential, pruned, pruned_for_good])
@on_ranks(2)
def test_parameters_and_buffers_that_are_renamed(rename):
    """They are known by identity: those that the wrapper ignores stay local."""
    rank, module = dist.get_rank(), mlp()
    module[3].register_buffer("local", torch.tensor(rank))
    module[3].bias.data.fill_(rank)
    module._ddp_params_and_buffers_to_ignore = ["3.local", "3.bias"]
    net = DistributedDataParallel(module)
    for renamed in (False, True):
        if renamed:
            torch.manual_seed(0)
            rename(net)
        for step in range(2):
            x, reduced = torch.full((1, 4), 1.0 + step + rank), []
            for local in (False, True):
                net.zero_grad()
                with net.no_sync(enabled=local):
                    net(x).square().sum().backward()
                own = [p for p in net.parameters() if p.shape != (2,)]
                if local:
                    naive.average_gradients(net.process_group, own)
                reduced.append([p.grad.clone() for p in own])
            torch.testing.assert_close(*reduced)
            net.zero_grad()
        assert [b.item() for b in net.buffers() if not b.dim()] == [rank]


@on_ranks(2)
def test_refit_compares_the_models():
    net = DistributedDataParallel(mlp())
    net.module[2].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(MismatchError, match=r"2\.weight.*requires_grad"):
        net.refit()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
@on_ranks(2)
def test_a_rebuild_of_buckets_that_is_interrupted(options):
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4, **options)
    assert_good_step(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketSet, "_new_buckets", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(2, 4))
    net.weight(1)
    for _ in range(2):
        assert_good_step(net)
    assert net.logging_data().rebuilt


@pytest.mark.parametrize("hook", [None, "all_reduce"])
@on_ranks(3)
def test_a_group_that_is_replaced(hook):
    """Also under a hook, whose state is the group: PyTorch's goes on with the old one."""
    rank = dist.get_rank()
    pair, everyone = dist.new_group([0, 1]), dist.group.WORLD
    if rank < 2:
        small = DistributedDataParallel(mlp(), process_group=pair)
        small.register_comm_hook(pair if hook else None, hook)
        assert_good_step(small)
        assert_good_step(small)
    net = DistributedDataParallel(mlp())
    net.register_comm_hook(everyone if hook else None, hook)
    assert_good_step(net)
    assert_good_step(net)
    if rank < 2:
        net.process_group = pair
        assert_good_step(net)
        assert_good_step(net)
    dist.barrier()
    with pytest.raises(ArgumentError, match="does not contain this rank"):
        net.process_group = pair if rank == 2 else dist.GroupMember.NON_GROUP_MEMBER
    net.process_group = everyone
    assert_good_step(net)


@on_ranks(2)
def test_hooks_by_name_and_composed():
    net = DistributedDataParallel(mlp())
    seen = []
    clip = hooks.wrap(hooks.all_reduce, before=lambda b: seen.append(b.index()))
    for hook in ("all_reduce", clip, None, hooks.wrap(clip, after=lambda t, _: t)):
        net.register_comm_hook(None, hook)
        assert_good_step(net)
    assert seen == [0, 0]
    net.register_comm_hook(None, "fp16")
    net(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    assert net.logging_data().hook == "fp16"
    with pytest.raises(ArgumentError, match="all_reduce, bf16, fp16, int8, int4"):
        net.register_comm_hook(None, "fp8")


@on_ranks(2)
def test_logging_data():
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-6)
    assert not net.logging_data().rebuilt
    assert_good_step(net)
    assert_good_step(net)
    log = net.logging_data()
    assert [b.parameters for b in log.buckets] == [tuple(b) for b in net.reducer.buckets]
    assert sum(b.bytes for b in log.buckets) == sum(p.nbytes for p in net.parameters())
    assert log.rebuilt
    assert log.unused is None
    assert log.unused_here == ()
    assert min(log.forward_seconds, log.backward_seconds, log.exposed_seconds) > 0
    assert all(bucket.wait_seconds > 0 for bucket in log.buckets)


@pytest.mark.narrow(
    {"part": slice(None), "options": {}},
    {"part": slice(3, 4), "options": {"find_unused_parameters": True}},
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
)
@pytest.mark.parametrize("part", [slice(None), slice(3, 4)])
@on_ranks(2)
def test_parameters_that_are_converted_are_refused_by_name(part, options):
    """They get new nodes in autograd, of which the reducer hears nothing."""
    net = DistributedDataParallel(mlp(), **options)
    converted = net.module[part]
    ids = {id(p) for p in converted.parameters()}
    names = [n for n, p in net.module.named_parameters() if id(p) in ids]
    for _ in range(2):  # before the first backward, and after others
        if dist.get_rank() == 0 or part.start is None:
            converted.half().float()
        with pytest.raises((ArgumentError, PeerFailedError)) as caught:
            net(torch.ones(2, 4)).sum().backward()
        assert f"parameters {names} were converted" in str(caught.value)
        net.refit()
        for _ in range(2):
            assert_good_step(net)


@pytest.mark.narrow(
    {"options": {}, "hook": None}, {"options": {"lazy_bucket_allocation": True}, "hook": "bf16"}
)
@pytest.mark.parametrize(
    "options", [{}, {"lazy_bucket_allocation": True}, {"gradient_as_bucket_view": True}]
)
@pytest.mark.parametrize("hook", [None, "bf16"])
def test_another_memory_format_on_one_rank(options, hook, same_as_one_process):
    """Gradients lie in their bucket as the parameters did when ranks compared them."""
    kept = []

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 4))

    def program(net, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        net(torch.randn(2, 2, 3, 3, generator=generator)).square().sum().backward()

    def check(net):
        for p in net.parameters():
            assert p.grad.stride() == p.stride()  # fused optimizers look at neither
            if dist.get_rank() == 0 and not net.gradient_as_bucket_view:
                kept.append(p.grad)  # this rank's bucket takes new memory
        if dist.get_rank() == 0:
            net.to(memory_format=torch.channels_last)

    near = {} if hook is None else {"rtol": 0.05, "atol": 0.2}
    same_as_one_process(program, 2, options, hook, model=model, steps=4, check=check, **near)
