"""Local steps and outer steps, beside what the fuzzer draws (`fuzz/local_sgd.py`)."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from ddp.common import assert_same_on_ranks, mlp, on_ranks
from torch import nn

from gradwire import DistributedDataParallel, hooks
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    HookError,
    MismatchError,
    PeerLostError,
)
from gradwire.hooks.hosts import _make
from gradwire.local_sgd import LocalSGD, diloco
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def backward(model, step, rank=None):
    generator = torch.Generator().manual_seed(
        100 * step + (dist.get_rank() if rank is None else rank)
    )
    model.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()


def across_hosts():
    """Return a hook for ranks on one host."""
    return hooks.across_hosts(hooks.all_reduce, hooks.host_groups())


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_diloco_takes_nesterov_steps():
    """The fuzzer compares them with a naive run of the algorithm."""

    def main():
        weight = nn.Parameter(torch.zeros(1))
        sgd, found = torch.optim.SGD([weight], lr=1.0), []
        optimizer = diloco(sgd, [("weight", weight)], every=1)
        for _ in range(2):  # each a mean of 1.5 away
            optimizer.zero_grad()
            (weight * (1.0 + dist.get_rank())).sum().backward()
            optimizer.step()
            found.append(weight.item())
        return found

    first = 0.7 * (1 + 0.9) * -1.5
    for found in run_ranks(main, 2):
        assert found == pytest.approx([first, first + 0.7 * (1 + 0.9 * (1 + 0.9)) * -1.5])


@pytest.mark.parametrize("teams", [[[0, 1], [2, 3]], [[0], [1, 2]]], ids=["2 + 2", "1 + 2"])
def test_hosts_agree_after_an_exchange(teams):
    """Gradients are averaged in every step within a host, parameters between hosts."""

    def main():
        model = mlp(dist.get_rank())
        groups = _make(dist.group.WORLD, teams, None, None)
        int4 = hooks.BlockQuantization(4, block=8, stochastic=True)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        hook = hooks.across_hosts(int4, groups)
        optimizer = LocalSGD(adam, model.named_parameters(), every=2, hook=hook)
        wrapped, history = DistributedDataParallel(model, process_group=groups.inside), []
        for step in range(4):
            backward(wrapped, step)
            optimizer.step()
            history.append([p.tolist() for p in parameters(model)])
        assert bool(int4.state.errors.state_dict()) == (groups.between is not None)
        return history

    histories = run_ranks(main, sum(map(len, teams)))
    for step in range(4):
        first, second = ([histories[rank][step] for rank in team] for team in teams)
        for host in (first, second):
            assert all(each == host[0] for each in host), step
        assert (first[0] == second[0]) == (step % 2 == 1), step


@on_ranks(2)
def test_ranks_that_disagree_and_hooks_that_fail():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="every"):
        LocalSGD(sgd, model.named_parameters(), every=1 + dist.get_rank())

    def failing(state, bucket):
        raise KeyError("out of luck")

    optimizer = LocalSGD(sgd, model.named_parameters(), every=1, hook=failing)
    backward(model, 0)
    with pytest.raises(HookError, match="failing, bucket 0: KeyError"):
        optimizer.step()


@pytest.mark.narrow({"hook": None, "each_backend": "gloo"})
@pytest.mark.parametrize("hook", [None, "bf16", "int4", "int8", "across_hosts"])
def test_a_rank_that_dies_ends_the_exchange_on_the_others(hook):
    def main():
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = across_hosts() if hook == "across_hosts" else hook
        optimizer = LocalSGD(sgd, model.named_parameters(), every=1, hook=chosen)
        backward(model, 0)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            optimizer.step()
        return True

    assert run_ranks(main, 2, may_die=[1]) == [True, None]


@pytest.mark.narrow({"hook": "int8"})
@pytest.mark.parametrize("hook", [None, "bf16", "int8"])
def test_ranks_of_a_group_exchange_with_each_other_only(hook):
    def main():
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        weight = nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([weight], lr=1.0)
        group = halves[rank // 2]
        optimizer = LocalSGD(sgd, [("weight", weight)], every=1, group=group, hook=hook)
        (weight * -float(rank)).sum().backward()
        optimizer.step()
        return weight.item()

    assert run_ranks(main, 4) == pytest.approx([0.5, 0.5, 2.5, 2.5], rel=1e-2)


@on_ranks(1)
def test_buckets_are_numbered_over_all_fragments():
    """PyTorch's PowerSGD keeps errors by number: they were added to another fragment."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    seen = []

    def noting(state, bucket):
        seen.append((bucket.names(), bucket.index(), bucket.is_last()))
        return bucket.buffer()

    named = [(str(i), w) for i, w in enumerate(weights)]
    sgd = torch.optim.SGD(weights, lr=1.0)
    optimizer = LocalSGD(sgd, named, every=2, fragments=2, hook=noting)
    for _ in range(4):
        optimizer.step()
    assert seen == [(["0"], 0, True), (["1"], 1, True)] * 2


@on_ranks(1)
def test_a_failed_exchange_does_not_affect_a_later_one():
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float32)
    weights = [nn.Parameter(torch.zeros(1, dtype=d)) for d in dtypes]

    def failing(state, bucket):
        if bucket.index() == 1:  # of the first fragment, which has two dtypes
            raise KeyError("out of luck")
        return bucket.buffer()

    named = [(str(i), w) for i, w in enumerate(weights)]
    sgd = torch.optim.SGD(weights, lr=1.0)
    optimizer = LocalSGD(sgd, named, every=2, fragments=2, hook=failing)
    for weight in weights:
        weight.grad = -torch.ones_like(weight)
    with pytest.raises(HookError):
        optimizer.step()
    optimizer.step()
    assert [a.item() for a in optimizer.state_dict()["anchors"].values()] == [0, 0, 2, 2]


@on_ranks(1)
def test_invalid_arguments():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for bad in ({"every": 0}, {"every": 2, "fragments": 3}, {"every": 9, "fragments": 9}):
        with pytest.raises(ArgumentError, match="fragments"):
            LocalSGD(sgd, named, **bad)
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        LocalSGD(sgd, [], every=1)
    with pytest.raises(TypeError, match="optimizer is 3"):
        LocalSGD(3, named, every=1)
    optimizer = LocalSGD(sgd, named, every=1)
    saved = optimizer.state_dict()
    saved["anchors"]["other"] = saved["anchors"].pop("0.bias")
    with pytest.raises(ArgumentError, match=r"'0\.bias', 'other'"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ArgumentError, match=r"lacks .*anchors"):
        optimizer.load_state_dict(sgd.state_dict())


# -- exchanges that are applied some steps after they were sent (Streaming DiLoCo)


def apply_late(given):
    weight = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = LocalSGD(sgd, [("weight", weight), *given(weight)], every=2, delay=1, alpha=0.25)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        (weight * -(1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        seen.append(weight.item())
    return seen


@pytest.mark.parametrize(
    "given",
    [
        lambda weight: [],
        lambda weight: [("tied", weight)],
        lambda weight: [("of the same memory", nn.Parameter(weight.data))],
    ],
)
def test_an_exchange_is_mixed_in_once_after_the_delay(given):
    # sent after step 2: 2 and 4, so that the anchor is 3; mixed after step 3: 0.25 w + 0.75 * 3
    assert run_ranks(apply_late, 2, args=(given,)) == [[1, 2, 3, 4], [2, 4, 3.75, 5.75]]


def refuse():
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for options, message in (
        ({"delay": 2}, "delay is 2 and alpha 0.0, with every 2"),
        ({"delay": -1}, "delay is -1"),
        ({"alpha": 1.0}, "alpha 1.0"),
        ({"delay": 1, "hook": "int8"}, "hook BlockQuantization, which sends several messages"),
        ({"delay": 1, "hook": lambda state, bucket: bucket.buffer()}, "which sends several"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LocalSGD(sgd, net, every=2, **options)
    diloco(sgd, net, every=2, delay=1, alpha=0.5, hook="bf16")


def test_arguments_that_a_delay_excludes_are_refused():
    run_ranks(refuse, world_size=1)


# -- parameters that are thawed, replaced or added after construction


@on_ranks(2)
def test_a_parameter_thawed_on_one_rank_is_named_on_all():
    net = mlp(dist.get_rank())
    net[0].requires_grad_(False)
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
    net[0].bias.requires_grad_(dist.get_rank() == 1)
    backward(net, 0)
    with pytest.raises(MismatchError, match=r"0\.bias.*thaw"):
        optimizer.step()


@pytest.mark.parametrize("given", ["module", "generator"])
@pytest.mark.narrow({"given": "generator"})
@pytest.mark.parametrize("on", [(0, 1), (1,)])
@on_ranks(2)
def test_replaced_and_added_parameters_are_an_error_on_all_ranks(given, on):
    def replace(net, sgd):
        net[2].bias = nn.Parameter(torch.randn(8))

    def add(net, sgd):
        net.append(nn.Linear(2, 2))

    def only_step(net, sgd):
        sgd.add_param_group({"params": [nn.Parameter(torch.randn(5))]})

    for change, name in (
        (replace, "2.bias"),
        (add, "5.weight"),
        (only_step, "param_groups.1."),
    ):
        net = mlp(dist.get_rank())
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        source = net if given == "module" else net.named_parameters()
        optimizer = LocalSGD(sgd, source, every=1)
        if dist.get_rank() in on:
            change(net, sgd)
        backward(net, 0)
        with pytest.raises(ArgumentError if len(on) == 2 else MismatchError, match=name):
            optimizer.step()


@on_ranks(2)
def test_parameters_that_only_the_optimizer_has_are_refused():
    net = mlp(dist.get_rank())
    named = list(net.named_parameters())
    sgd = torch.optim.SGD(named, lr=0.1)
    with pytest.raises(ArgumentError, match=r"'0\.weight' is not exchanged"):
        LocalSGD(sgd, named[1:], every=1)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        LocalSGD(sgd, named[dist.get_rank() :], every=1)
    optimizer = LocalSGD(sgd, named, every=1)
    with pytest.raises(ArgumentError, match="'extra' is not exchanged"):
        optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.zeros(1)))]})
    assert len(sgd.param_groups) == 1


def test_different_numbers_of_steps_are_an_error_on_all_ranks():
    def main():
        net = mlp(dist.get_rank())
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=2)
        backward(net, 0)
        optimizer.step()
        if dist.get_rank() == 0:
            optimizer.step()  # the exchange of step 2
        else:
            with pytest.raises(MismatchError, match=r"step 2; rank 1: exchange.*synchronize\(\)"):
                optimizer.synchronize()
            return
        pytest.fail("the exchange was matched with another")

    def checked():
        try:
            main()
        except MismatchError:
            assert dist.get_rank() == 0

    run_ranks(checked, 2)


@on_ranks(2)
def test_states_of_different_runs_are_an_error_on_all_ranks():
    net = mlp(dist.get_rank())
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        saved["anchors"]["2.bias"] += 1
    optimizer.load_state_dict(saved)
    backward(net, 0)
    with pytest.raises(MismatchError, match=r"2\.bias: value before"):
        optimizer.step()


@pytest.mark.narrow({"each_backend": "gloo"})
@on_ranks(1)
def test_invalid_names_and_entries():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    both = [*one.named_parameters(), *other.named_parameters()]
    sgd = torch.optim.SGD([p for _, p in both], lr=0.1)
    with pytest.raises(ArgumentError, match="two parameters 'weight'"):
        LocalSGD(sgd, both, every=1)
    for bad in (one.parameters(), 3, "weight", one.weight):
        with pytest.raises(ArgumentTypeError, match="named_parameters"):
            LocalSGD(sgd, bad, every=1)


# -- as a torch optimizer: schedulers, GradScaler, hooks


def made(**options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, LocalSGD(sgd, net, **({"every": 2} | options))


def loss(net, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return net(torch.randn(4, 3, generator=generator)).square().sum()


@on_ranks(2)
def test_hooks_and_closures_run():
    net, optimizer = made(every=1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append((o.steps, net.weight.tolist())))
    optimizer.register_state_dict_post_hook(lambda o, saved: saved | {"more": 3})
    optimizer.register_load_state_dict_pre_hook(lambda o, saved: seen.append(saved["more"]))

    def closure():
        optimizer.zero_grad()
        result = loss(net, 0, dist.get_rank())
        result.backward()
        return result

    assert optimizer.step(closure) > 0
    saved = optimizer.state_dict()
    optimizer.load_state_dict({k: v for k, v in saved.items() if k != "none"})
    assert seen == [("pre", True), (1, net.weight.tolist()), 3]  # after the exchange
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "LocalSGD" in repr(optimizer)
    assert optimizer.state is optimizer.optimizer.state
    assert_same_on_ranks(net.parameters())


@on_ranks(2)
def test_a_group_is_added_to_the_wrapped_optimizer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    sgd = torch.optim.SGD(net[1].parameters(), lr=0.1)
    optimizer = LocalSGD(sgd, net, every=2)
    for step in range(4):
        if step == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
        optimizer.zero_grad()
        loss(net, step, dist.get_rank()).backward()
        optimizer.step()
    assert optimizer.param_groups[1]["lr"] == 0.01
    assert_same_on_ranks(net.parameters())
