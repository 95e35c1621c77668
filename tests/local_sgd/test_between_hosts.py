"""Gradients are averaged in every step within a host, parameters every few steps between hosts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import DistributedDataParallel, hooks
from gradwire.hooks.hosts import _make
from gradwire.local_sgd import LocalSGD
from gradwire.testing import run_ranks

EVERY = 4
TEAMS = {"2 + 2": [[0, 1], [2, 3]], "1 + 2": [[0], [1, 2]]}


def backward(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()


@pytest.mark.wide
@pytest.mark.parametrize("layout", TEAMS)
def test_hosts_agree_after_an_exchange_and_can_resume(layout):
    teams = TEAMS[layout]

    def made(model):
        groups = _make(dist.group.WORLD, teams, None, None)
        wrapped = DistributedDataParallel(model, process_group=groups.inside)
        int4 = hooks.BlockQuantization(4, block=8, stochastic=True)
        optimizer = LocalSGD(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model.named_parameters(),
            every=EVERY,
            hook=hooks.across_hosts(int4, groups),
        )
        return wrapped, optimizer, int4, groups.between is not None

    def network(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def main():
        model = network(dist.get_rank())
        wrapped, optimizer, int4, is_between = made(model)
        history, saved = [], None
        for step in range(3 * EVERY):
            backward(wrapped, step)
            optimizer.step()
            history.append([p.tolist() for p in model.parameters()])
            if step == EVERY + 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert int4.state.step == 3
        assert bool(int4.state.errors.state_dict()) == is_between
        model = network(9)
        wrapped, optimizer, *_ = made(model)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(EVERY + 2, 3 * EVERY):
            backward(wrapped, step)
            optimizer.step()
            assert [p.tolist() for p in model.parameters()] == history[step], step
        return history

    histories = run_ranks(main, sum(map(len, teams)))
    for step in range(3 * EVERY):
        of_hosts = [[histories[rank][step] for rank in team] for team in teams]
        for host in of_hosts:
            assert all(each == host[0] for each in host), step
        first, second = (host[0] for host in of_hosts)
        assert (first == second) == (step % EVERY == EVERY - 1), step
