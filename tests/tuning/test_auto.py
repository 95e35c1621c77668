"""Auto: predictions match messages, all ranks make the same choice, and runs can be resumed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError, PeerFailedError
from gradwire.hooks.hosts import _make
from gradwire.hooks.registry import COMPRESSING
from gradwire.testing import FakeBucket, run_ranks
from gradwire.testing.hosts import Hosts, why_no_hosts
from gradwire.tuning import hook as auto_module
from gradwire.tuning.candidates import Computing, candidate, interpolated
from gradwire.tuning.cost_model import Cluster, Cost, Curve, Link, Message, choose
from gradwire.tuning.measure import SIZES, sizes_of
from gradwire.tuning.trial import STEPS, TRY_GAIN, Trial, contenders

pytestmark = pytest.mark.usefixtures("each_backend")

SLOW, FAST = Cluster(2, Link(1e-4, 1e5)), Cluster(2, Link(1e-9, 1e15))


def wrapped(hook):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(4)]
    net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.005)
    net.register_comm_hook(None, hook)
    return net


def train(net, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        net(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in net.module.parameters()]


class MeasuredAs:
    """Context in which measurements return this link, and a millisecond of computing per hook."""

    def __init__(self, link, seconds=1e-3):
        self._link, self._seconds = link, seconds

    def __enter__(self):
        names = ("measure_cluster", "measured", "contenders")
        self._real = {name: getattr(auto_module, name) for name in names}
        auto_module.measure_cluster = lambda group, given, *, thorough: self._link
        auto_module.measured = self._measured
        # without a trial, which would depend on time
        auto_module.contenders = lambda choice, *others: [choice.names]

    def __exit__(self, *raised):
        for name, value in self._real.items():
            setattr(auto_module, name, value)

    def _measured(self, candidates, buckets, world):
        own = Computing(self._seconds, 0.0)
        return {c.name: [own for _ in buckets] for c in candidates}


@pytest.mark.narrow({"world": 2})
@pytest.mark.parametrize("world", [2, 3])
def test_a_slow_link_gets_the_fewest_bytes_and_a_fast_one_no_hook(world):
    def main():
        with MeasuredAs(SLOW):
            hook = hooks.auto(["bf16", "int8", "int4"])
            net = wrapped(hook)
            train(net, range(2))
            assert hook.state.choice is None
            found = train(net, range(2, 7))
        assert set(hook.state.choice.names) == {"int4"}
        assert hook.state.choice.seconds < hook.state.choice.plain_seconds
        assert hook.state.hooks["int4"].traffic.collectives > 0
        assert hook.state.hooks["int8"].traffic.collectives == 0
        assert net.reducer.has_hook
        with MeasuredAs(FAST):
            hook = hooks.auto(["int8"])  # which costs computing only
            net = wrapped(hook)
            plain = wrapped(None)
            assert train(net, range(6)) == train(plain, range(6)) or world > 2
        assert hook.withdrawn
        assert not net.reducer.has_hook
        assert net.comm_hook_state_dict() == {}
        return found

    first, *others = run_ranks(main, world)
    assert all(other == first for other in others)


def told(monkeyed, seconds):
    """Return a trial's `add` with given times for each kind of step."""

    def add(trial, _):
        monkeyed(trial, seconds[trial.current[0]] if dist.get_rank() == 0 else 0.1)

    return add


@pytest.mark.wide
@pytest.mark.parametrize("fastest", ["all_reduce", "int8", "int4"])
def test_the_fastest_contender_is_chosen_and_no_error_is_lost(fastest):
    kinds = ["int4", "int8", "all_reduce"]

    def main():
        real, monkey = Trial.add, pytest.MonkeyPatch()
        seconds = dict.fromkeys(kinds, 1.0) | {fastest: 0.5}
        with MeasuredAs(SLOW), monkey.context() as patch:
            patch.setattr(Trial, "add", told(real, seconds))
            alike = [(kind,) * 4 for kind in kinds]
            auto_module.contenders = lambda choice, *others: alike
            hook = hooks.auto(["int8", "int4"])
            net = wrapped(hook)
            owned = {name: hook._candidates[name].hook for name in ("int8", "int4")}
            seen = []
            for step in range(3 + 3 * STEPS + 2):
                before = {name: h.traffic.collectives for name, h in owned.items()}
                train(net, [step])
                used = [name for name, h in owned.items() if h.traffic.collectives > before[name]]
                seen.append(used[0] if used else "all_reduce")
        assert seen[:3] == ["all_reduce"] * 3
        assert seen[3:-2] == kinds * STEPS
        assert seen[-2:] == [fastest] * 2
        assert net.reducer.has_hook == (fastest != "all_reduce")
        for name, h in owned.items():
            assert (h.state.errors.nbytes > 0) == (name == fastest)

    run_ranks(main, 2)


def test_released_errors_are_added_once():
    def main():
        hook = hooks.BlockQuantization(4)
        gradient = torch.randn(300) * (1 + dist.get_rank())
        first, second = FakeBucket(gradient.clone()), FakeBucket(torch.zeros(300))
        hook.run_hook(first).wait()
        for _ in range(2):
            hook.release(second)
        hooks.all_reduce(None, second).wait()
        want = gradient / 2
        dist.all_reduce(want)
        torch.testing.assert_close(first.buffer() + second.buffer(), want)

    run_ranks(main, 2)


def cluster_of(**seconds):
    """Return a link on which plain, bf16 and int8 take these times, and their messages."""
    curves = {"all_reduce": Curve(((1, seconds["bf16"]), (2, seconds["plain"])))}
    curves["all_to_all"] = Curve(((1, seconds["int8"]), (2, seconds["int8"])))
    costs = {
        "all_reduce": [Cost(0, (Message("all_reduce", 2),), single=True)],
        "bf16": [Cost(0, (Message("all_reduce", 1),), single=True)],
        "int8": [Cost(0, (Message("all_to_all", 1),))],
    }
    return Cluster(2, SLOW.link, curves), costs


@pytest.mark.parametrize(
    ("seconds", "able"),
    [
        ({"plain": 1.0, "bf16": 0.99, "int8": 2.0}, ["all_reduce"]),  # a gain, but too small
        ({"plain": 1.0, "bf16": 0.8, "int8": 0.9}, ["bf16", "int8", "all_reduce"]),
        ({"plain": 1.0, "bf16": 0.9, "int8": 1.9}, ["bf16", "all_reduce"]),
        ({"plain": 9.0, "bf16": 4.5, "int8": 1.0}, ["int8"]),  # too slow to be tried
    ],
)
def test_contenders_are_close_to_the_fastest(seconds, able):
    cluster, costs = cluster_of(**seconds)
    step = seconds["plain"]  # without forward and update
    choice = choose([0.0], costs, cluster, min_gain=TRY_GAIN * step)
    assert contenders(choice, [0.0], costs, cluster, 0.0) == [(name,) for name in able]
    # the common part of steps reduces the ratio
    assert len(contenders(choice, [0.0], costs, cluster, 99.0)) in (1, 3)


def test_ranks_that_measure_differently_choose_alike():
    def main():
        with MeasuredAs(SLOW):
            usual = auto_module.measured

            def biased(candidates, buckets, world):
                found = usual(candidates, buckets, world)
                if dist.get_rank() == 0:
                    found["int4"] = [Computing(9.0, c.after) for c in found["int4"]]
                return found

            auto_module.measured = biased
            hook = hooks.auto(["int8", "int4"])
            train(wrapped(hook), range(5))
        return hook.state.choice.names

    first, second = run_ranks(main, 2)
    assert first == second
    assert "int4" not in first


def test_a_failed_rank_has_made_the_same_choice():
    """The others measured at the next step's first bucket, and waited there for this rank."""

    def main():
        with MeasuredAs(SLOW):
            hook = hooks.auto(["bf16"])
            net = wrapped(hook)
            train(net, range(3))
            output = net(torch.ones(1, 32))
            if dist.get_rank() == 1:
                output.register_hook(lambda gradient: 1 / 0)
            with pytest.raises((ZeroDivisionError, PeerFailedError)):
                output.sum().backward()
            found = train(net, range(4, 10))
        assert set(hook.state.choice.names) == {"bf16"}
        return found

    first, second = run_ranks(main, 2)
    assert first == second


def test_a_resumed_run_keeps_the_choice():
    def main():
        with MeasuredAs(SLOW):
            net = wrapped(hooks.auto([hooks.BlockQuantization(4, stochastic=True)]))
            train(net, range(6))
        model, saved = copy.deepcopy(net.state_dict()), net.comm_hook_state_dict()
        want = train(net, range(6, 9))
        with MeasuredAs(None):  # without measuring
            again = wrapped(hooks.auto([hooks.BlockQuantization(4, stochastic=True)]))
            again.load_state_dict(model)
            again.load_comm_hook_state_dict(saved)
            assert train(again, range(6, 9)) == want
        with pytest.raises(ArgumentError, match="allow the same hooks"):
            wrapped(hooks.auto(["int8"])).load_comm_hook_state_dict(saved)
        copied = copy.deepcopy(net)
        assert copied._comm_hook.hook.state.choices == net._comm_hook.hook.state.choices

    run_ranks(main, 2)


def test_a_run_resumed_from_a_trial_loses_no_error():
    def main():
        with MeasuredAs(SLOW):
            auto_module.contenders = lambda choice, *others: [("int8",) * 4, ("int4",) * 4]
            net = wrapped(hooks.auto(["int8", "int4"]))
            train(net, range(5))  # the last two are part of a trial
        again = hooks.auto(["int8", "int4"])
        loaded = wrapped(again)
        loaded.load_comm_hook_state_dict(net.comm_hook_state_dict())
        assert set(again.state.choices.values()) == {"int4"}
        for now in (again, copy.deepcopy(net)._comm_hook.hook):
            assert now.state.hooks["int8"].state.errors.nbytes > 0
            assert now.state.settling
        train(loaded, [5])
        assert again.state.hooks["int8"].state.errors.nbytes == 0
        assert again.state.hooks["int4"].state.errors.nbytes > 0
        assert not again.state.settling

    run_ranks(main, 2)


def test_across_hosts_only_ranks_that_run_the_hook_measure():
    """Ranks that run no hook must not take part in the measurement."""

    def main():
        groups = _make(dist.group.WORLD, [[0, 1], [2]], None, None)
        hook = hooks.auto(["bf16"])
        with MeasuredAs(SLOW):
            found = train(wrapped(hooks.across_hosts(hook, groups)), range(5))
        chosen = hook.state.choice and set(hook.state.choice.names)
        assert chosen == (None if groups.between is None else {"bf16"})
        return found

    first, *others = run_ranks(main, 3)
    assert all(other == first for other in others)


@pytest.mark.narrow({"name": ["int8", "top_k"]})
@pytest.mark.parametrize("name", ["all_reduce", "bf16", *COMPRESSING])
def test_a_bucket_without_elements_is_not_computed(name):
    bucket = [torch.zeros(0, 4)]
    assert candidate(name).measure(bucket, 2) == Computing(0.0, 0.0)


@pytest.mark.wide
def test_new_buckets_are_measured_again():
    def main():
        with MeasuredAs(SLOW):
            net = wrapped(hooks.auto(["int8"]))
            train(net, range(5))
            before = dict(net._comm_hook.hook.state.choices)
            net.module[0].weight.requires_grad_(False)
            net.refit()
            train(net, range(5))
            assert net._comm_hook.hook.state.choices
            assert net._comm_hook.hook.state.choices.keys() != before.keys()

    run_ranks(main, 2)


SHAPES = ((60, 40), (30,), (), (3, 4, 5))
BY_NAME = ["bf16", "int8", "int4", "low_rank", "sign", "top_k"]


@pytest.mark.narrow({"world": 2, "name": ["bf16", "int8", "low_rank"]})
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [*BY_NAME, "all_reduce"])
def test_predicted_bytes_are_the_bytes_sent(name, world):
    def main():
        chosen = candidate(hooks.TopK(0.1) if name == "top_k" else name)
        parameters = [torch.zeros(s) for s in SHAPES]
        messages = chosen.messages(parameters, world)
        if not isinstance(chosen.hook, hooks.Compressor):
            return [m.nbytes for m in messages] == [sum(p.nbytes for p in parameters) * chosen_part]
        torch.manual_seed(dist.get_rank())
        bucket = FakeBucket(*[torch.randn(s) for s in SHAPES])
        chosen.hook.run_hook(bucket).wait()
        assert len(messages) == chosen.hook.traffic.collectives
        return sum(m.nbytes for m in messages), chosen.hook.traffic.given_bytes

    chosen_part = {"bf16": 0.5}.get(name, 1)
    for found in run_ranks(main, world):
        if name == "top_k":
            assert 0.4 < found[0] / found[1] <= 1.6
        else:
            assert found is True or found[0] == found[1]


def test_interpolated_times():
    points = [(10, Computing(1.0, 0.0)), (20, Computing(2.0, 4.0))]
    assert interpolated(points, 15) == Computing(1.5, 2.0)
    assert interpolated(points, 30) == Computing(3.0, 8.0)
    assert interpolated(points, 5) == Computing(0.5, 0.0)
    assert interpolated(points[:1], 99) == points[0][1]


@pytest.mark.parametrize("allowed", [[], ["int8", "int8"], ["none_such"], [3]])
def test_invalid_arguments(allowed):
    with pytest.raises(ArgumentError, match="allowed"):
        hooks.auto(allowed)


COLLECTIVES = ["all_reduce", "all_gather", "all_to_all"]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_measured_sizes_are_distinct(collective):
    for world in (2, 3, 90, 100, 4096, 8191):
        for largest in (1, 1023, 300_000, 10**9, math.inf):
            sizes = sizes_of(collective, world, largest)
            assert len(sizes) >= 2
            assert sizes == sorted(set(sizes))
            assert not any(size % 4 for size in sizes)
            assert collective != "all_to_all" or not any(size % (4 * world) for size in sizes)


@given(st.sampled_from(COLLECTIVES), st.integers(2, 64), st.integers(1, 2 * SIZES[-1]))
def test_measured_sizes_are_not_larger_than_messages(name, world, largest):
    every, chosen = sizes_of(name, world), sizes_of(name, world, largest)
    assert chosen[:-1] == [size for size in every if size < chosen[-1]]
    assert chosen[-1] >= every[1]  # not too near to the smallest
    if every[1] <= largest <= every[-1]:
        assert largest <= chosen[-1] < largest + 4 * world  # to whole elements for each rank


SLOW_LINK = 4e6
"""Bits per second."""


@pytest.mark.wide
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize("thorough", [False, True])
def test_messages_beyond_a_burst_take_as_long_as_their_bytes(each_backend, thorough):
    if each_backend != "shm":
        pytest.skip("ranks of several hosts are on shm")

    def main():
        given = {"all_reduce": 4 << 20, "all_gather": 2 << 20}
        return hooks.measure_cluster(dist.group.WORLD, given, thorough=thorough)

    with Hosts([2, 1], rate=f"{SLOW_LINK:.0f}bit") as hosts:
        first, *others = run_ranks(main, 3, hosts=hosts)
    assert all(other == first for other in others)
    assert first.burst is not None
    for name, nbytes in (("all_reduce", 4 << 20), ("all_gather", 2 << 20)):
        alone = nbytes / (SLOW_LINK / 8)
        # each host sends so many; only what is saved up may go faster, and it is measured
        assert first.measured[name].seconds(nbytes) > alone - 1.5 * first.burst.credit
        assert first.burst.busy[name] * nbytes > 0.9 * alone
