"""Parameters that are thawed, replaced or added after LocalSGD was constructed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import ArgumentError, ArgumentTypeError, MismatchError
from gradwire.local_sgd import LocalSGD
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def model():
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def backward(net, step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    net.zero_grad()
    net(torch.randn(4, 2, generator=generator)).square().sum().backward()


def test_a_parameter_thawed_on_one_rank_is_named_on_all():
    def main():
        net = model()
        net[0].requires_grad_(False)
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
        net[0].bias.requires_grad_(dist.get_rank() == 1)
        backward(net)
        with pytest.raises(MismatchError, match=r"0\.bias.*thaw"):
            optimizer.step()

    run_ranks(main, 2)


@pytest.mark.parametrize("given", ["module", "generator"])
@pytest.mark.narrow({"given": "generator"})
@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_replaced_and_added_parameters_are_an_error_on_all_ranks(given, on):
    def main():
        def replace(net, sgd):
            net[2].bias = nn.Parameter(torch.randn(2))

        def add(net, sgd):
            net.append(nn.Linear(2, 2))

        def only_step(net, sgd):
            sgd.add_param_group({"params": [nn.Parameter(torch.randn(5))]})

        for change, name in (
            (replace, "2.bias"),
            (add, "3.weight"),
            (only_step, "param_groups.1."),
        ):
            net = model()
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            source = net if given == "module" else net.named_parameters()
            optimizer = LocalSGD(sgd, source, every=1)
            if dist.get_rank() in on:
                change(net, sgd)
            backward(net)
            with pytest.raises(ArgumentError if len(on) == 2 else MismatchError, match=name):
                optimizer.step()

    run_ranks(main, 2)


def test_parameters_that_only_the_optimizer_has_are_refused():
    def main():
        net = model()
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
        net = model()
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=2)
        backward(net)
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
        net = model()
        optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net, every=1)
        saved = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == 1:
            saved["anchors"]["2.bias"] += 1
        optimizer.load_state_dict(saved)
        backward(net)
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
