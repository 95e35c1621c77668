"""LocalSGD as a torch optimizer: schedulers, GradScaler, hooks, pickles."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from gradwire.errors import ArgumentError
from gradwire.local_sgd import LocalSGD
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")
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
