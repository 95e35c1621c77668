"""Local steps and outer steps, beside what the fuzzer draws (`fuzz/local_sgd.py`)."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler, swa_utils

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


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


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


def close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


def mean_of(model):
    """Average each parameter over ranks with one all_reduce."""
    found = []
    for p in parameters(model):
        dist.all_reduce(p)
        found.append(p / dist.get_world_size())
    return found


def naive_diloco(model, optimizer, step, anchors, velocity, lr=0.7, momentum=0.9):
    """Outer step of the paper's algorithm 1, with Nesterov momentum."""
    with torch.no_grad():
        for i, (p, mean) in enumerate(zip(model.parameters(), mean_of(model), strict=True)):
            gradient = anchors[i] - mean
            velocity[i] = gradient if step == 0 else momentum * velocity[i] + gradient
            anchors[i] = anchors[i] - lr * (gradient + momentum * velocity[i])
            p.copy_(anchors[i])


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.narrow({"inner": torch.optim.AdamW})
def test_diloco_follows_the_papers_algorithm(inner):
    def main():
        model, twin = mlp(), mlp()
        optimizer = diloco(inner(model.parameters(), lr=0.01), model.named_parameters(), every=3)
        plain = inner(twin.parameters(), lr=0.01)
        anchors, velocity = parameters(twin), parameters(twin)
        for step in range(9):
            for each, steps in ((model, optimizer), (twin, plain)):
                backward(each, step)
                steps.step()
            if step % 3 == 2:
                naive_diloco(twin, plain, step // 3, anchors, velocity)
            close(parameters(model), parameters(twin))
        return [p.tolist() for p in parameters(model)]

    first, second = run_ranks(main, 2)
    assert first == second


def train_and_resume(made, *, steps=12, save_at=5):
    """Return the parameters after each step; those after a state is loaded are the same."""
    model = mlp(dist.get_rank())
    trained, optimizer = made(model)
    history, saved = [], None
    for step in range(steps):
        backward(trained, step)
        optimizer.step()
        history.append([p.tolist() for p in parameters(model)])
        if step == save_at:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = mlp()
    trained, resumed = made(again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for step in range(save_at + 1, steps):
        backward(trained, step)
        resumed.step()
        assert [p.tolist() for p in parameters(again)] == history[step], step
    optimizer.synchronize()
    return history, [p.tolist() for p in parameters(model)]


@pytest.mark.wide
def test_compressed_outer_gradients_lose_nothing():
    """With an outer rate of 1, anchors plus the mean error are the plain average."""

    def main():
        model, twin = mlp(), mlp()
        hook = hooks.BlockQuantization(4, block=8)
        optimizer = LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            every=1,
            hook=hook,
        )
        drift = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(4):
            backward(model, step)
            optimizer.step()
            for total, p in zip(drift, model.parameters(), strict=True):
                gradient = p.grad.clone()
                dist.all_reduce(gradient)
                total -= 0.1 * gradient / dist.get_world_size()
        for (name, p), start, total in zip(
            model.named_parameters(), twin.parameters(), drift, strict=True
        ):
            error = hook.state.errors.state_dict()[name].view(p.shape)
            dist.all_reduce(error)
            torch.testing.assert_close(p - error / dist.get_world_size(), start + total)

    run_ranks(main, 2)


def test_ranks_that_disagree_and_hooks_that_fail():
    def main():
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

    run_ranks(main, 2)


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


def test_buckets_are_numbered_over_all_fragments():
    """PyTorch's PowerSGD keeps errors by number: they were added to another fragment."""

    def main():
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

    run_ranks(main, 1)


def test_a_failed_exchange_does_not_affect_a_later_one():
    def main():
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

    run_ranks(main, 1)


def test_invalid_arguments():
    def main():
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

    run_ranks(main, 1)


@pytest.mark.wide
@pytest.mark.parametrize("teams", [[[0, 1], [2, 3]], [[0], [1, 2]]], ids=["2 + 2", "1 + 2"])
def test_hosts_agree_after_an_exchange_and_can_resume(teams):
    """Gradients are averaged in every step within a host, parameters between hosts."""

    def main():
        made_hooks = []

        def made(model):
            groups = _make(dist.group.WORLD, teams, None, None)
            int4 = hooks.BlockQuantization(4, block=8, stochastic=True)
            made_hooks.append((int4, groups.between is not None))
            optimizer = LocalSGD(
                torch.optim.AdamW(model.parameters(), lr=0.01),
                model.named_parameters(),
                every=4,
                hook=hooks.across_hosts(int4, groups),
            )
            return DistributedDataParallel(model, process_group=groups.inside), optimizer

        history, _ = train_and_resume(made)
        int4, is_between = made_hooks[0]
        assert int4.state.step == 4  # three exchanges, and that of synchronize()
        assert bool(int4.state.errors.state_dict()) == is_between
        return history

    histories = run_ranks(main, sum(map(len, teams)))
    for step in range(12):
        of_hosts = [[histories[rank][step] for rank in team] for team in teams]
        for host in of_hosts:
            assert all(each == host[0] for each in host), step
        first, second = (host[0] for host in of_hosts)
        assert (first == second) == (step % 4 == 3), step


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


def test_a_parameter_thawed_on_one_rank_is_named_on_all():
    def main():
        net = mlp(dist.get_rank())
        net[0].requires_grad_(False)
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
        net[0].bias.requires_grad_(dist.get_rank() == 1)
        backward(net, 0)
        with pytest.raises(MismatchError, match=r"0\.bias.*thaw"):
            optimizer.step()

    run_ranks(main, 2)


@pytest.mark.parametrize("given", ["module", "generator"])
@pytest.mark.narrow({"given": "generator"})
@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_replaced_and_added_parameters_are_an_error_on_all_ranks(given, on):
    def main():
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

    run_ranks(main, 2)


def test_parameters_that_only_the_optimizer_has_are_refused():
    def main():
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

    run_ranks(main, 2)


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


def test_states_of_different_runs_are_an_error_on_all_ranks():
    def main():
        net = mlp(dist.get_rank())
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
        saved = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == 1:
            saved["anchors"]["2.bias"] += 1
        optimizer.load_state_dict(saved)
        backward(net, 0)
        with pytest.raises(MismatchError, match=r"2\.bias: value before"):
            optimizer.step()

    run_ranks(main, 2)


@pytest.mark.narrow({"each_backend": "gloo"})
def test_invalid_names_and_entries():
    def main():
        one, other = nn.Linear(1, 1), nn.Linear(1, 1)
        both = [*one.named_parameters(), *other.named_parameters()]
        sgd = torch.optim.SGD([p for _, p in both], lr=0.1)
        with pytest.raises(ArgumentError, match="two parameters 'weight'"):
            LocalSGD(sgd, both, every=1)
        for bad in (one.parameters(), 3, "weight", one.weight):
            with pytest.raises(ArgumentTypeError, match="named_parameters"):
                LocalSGD(sgd, bad, every=1)

    run_ranks(main, 1)


# -- as a torch optimizer: schedulers, GradScaler, hooks


INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def made(inner="sgd", **options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = INNER[inner](net.parameters())
    return net, LocalSGD(optimizer, net, **({"every": 2} | options))


def loss(net, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return net(torch.randn(4, 3, generator=generator)).square().sum()


def test_schedulers():
    def main():
        net, optimizer = made()
        _, plain = made()
        for scheduled, scheduler in (
            (optimizer, lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)),
            (plain.optimizer, lr_scheduler.OneCycleLR(plain.optimizer, 0.5, total_steps=9)),
        ):
            for step in range(3):
                optimizer.zero_grad()
                loss(net, step, dist.get_rank()).backward()
                scheduled.step()
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        swa_utils.SWALR(optimizer, 0.05)
        saved = optimizer.state_dict()  # whose param_groups have the scheduler's entries
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["initial_lr"] == plain.param_groups[0]["initial_lr"]

    run_ranks(main, 2)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.narrow({"inner": "adamw", "unscaled": False}, {"inner": "fused", "unscaled": True})
def test_a_step_that_one_rank_skips_counts(inner, unscaled):
    """Compared with steps by hand; the gradient overflows on rank 1 in the second step."""

    def main():
        net, optimizer = made(inner)
        twin, by_hand = made(inner)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        rank, scales = dist.get_rank(), []
        for step in range(5):
            overflows = rank == 1 and step == 1
            for each, steps in ((net, optimizer), (twin, by_hand)):
                steps.zero_grad()
                result = loss(each, step, rank) * (float("inf") if overflows else 1.0)
                (scaler.scale(result) if each is net else result).backward()
            if unscaled:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            by_hand.skip() if overflows else by_hand.step()
            scales.append(scaler.get_scale())
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p, q)
        assert scales[-1] == (512.0 if rank == 1 else 1024.0)
        assert optimizer.steps == 5
        optimizer.synchronize()
        return [p.tolist() for p in net.parameters()]

    first, second = run_ranks(main, 2)
    assert first == second


def test_hooks_and_closures_run():
    def main():
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
        return net.weight.tolist()

    first, second = run_ranks(main, 2)
    assert first == second


def test_states_of_other_optimizers_are_refused():
    def main():
        _, optimizer = made()
        with pytest.raises(
            ArgumentError, match=r"lacks \['anchors', 'hook', 'outer', 'pending', 'steps'\]"
        ):
            optimizer.load_state_dict(state_dict=optimizer.optimizer.state_dict())

    run_ranks(main, 1)


def test_construction_in_inference_mode():
    def main():
        net = nn.Linear(3, 2)
        with torch.inference_mode():
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer = LocalSGD(sgd, net, every=1)
        loss(net, 0, dist.get_rank()).backward()
        optimizer.step()
        return net.weight.tolist()

    first, second = run_ranks(main, 2)
    assert first == second


def test_a_group_is_added_to_the_wrapped_optimizer():
    def main():
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
        return [p.tolist() for p in net.parameters()]

    first, second = run_ranks(main, 2)
    assert first == second
