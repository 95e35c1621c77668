"""One fault domain per group: copies, votes, several reducers, groups and threads."""

from __future__ import annotations

import copy
import gc
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp.common import (
    assert_good_step,
    assert_gradients,
    fail_on_rank_1,
    in_one_process,
    inputs,
    mlp,
    on_ranks,
    sprung,
    step,
)
from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.faults import collective_log
from gradwire.ddp.faults.error_channel import ErrorChannel
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend", "quick_polls")


def mean(state, bucket):
    group = state or dist.group.WORLD
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


# -- construction and copies -----------------------------------------------------------------


def test_a_copy_of_the_module_on_one_rank():
    """EMA on rank 0 alone: what is wrapped next still hears of errors, and its hook still runs."""

    def main():
        net = DistributedDataParallel(mlp())
        assert_good_step(net)
        averaged = copy.deepcopy(net) if dist.get_rank() == 0 else None
        after = DistributedDataParallel(sprung(2), bucket_cap_mb=1e-4)
        after.register_comm_hook(None, mean)
        for _ in range(2):
            assert_good_step(after)
            fail_on_rank_1(after)
        assert_good_step(after)
        assert_good_step(net)
        return averaged is None

    assert run_ranks(main, 2, timeout=60) == [False, True]


@on_ranks(2, timeout=60)
def test_reducers_made_without_a_message():
    """init_sync=False: the group's name is agreed on in the first backward, failed or not."""
    net = DistributedDataParallel(sprung(5), init_sync=False)
    if dist.get_rank():
        copy.deepcopy(net)
    fail_on_rank_1(net)
    assert_good_step(net)


# -- votes ---------------------------------------------------------------------------------


@pytest.mark.narrow({"each_backend": "gloo"})
def test_an_unreported_death_during_resynchronization():
    def main():
        net = DistributedDataParallel(sprung(2, rank=2))
        assert_good_step(net)

        def join(self, statements):
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self._in_flight.append(torch.futures.Future())

        net.module.on = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collective_log.ResynchronizationRound, "_join", join)
            if dist.get_rank() == 2:
                with pytest.raises(ArithmeticError):
                    step(net)
            with pytest.raises(PeerLostError, match=r"ranks \[1\] ended while resynchronizing"):
                step(net)
        return True

    assert run_ranks(main, 3, may_die=[1], timeout=60) == [True, None, True]


@on_ranks(2)
def test_a_step_without_errors_does_not_use_the_store():
    net = DistributedDataParallel(mlp())
    net.register_comm_hook(None, mean)
    assert_good_step(net)
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(ErrorChannel, "_ask", lambda self, *request: asked.append(request))
        patch.setattr("gradwire.ddp.faults.error_channel.POLL_SECONDS", 60.0)
        for _ in range(3):
            assert_good_step(net)
        assert not asked


# -- several reducers, forwards and groups ---------------------------------------------------


@on_ranks(2, timeout=60)
def test_another_backward_after_one_that_failed():
    """Without a forward between them: the ranks meet before anything of it is sent."""
    first = DistributedDataParallel(sprung(2), bucket_cap_mb=1e-4)
    second = DistributedDataParallel(mlp(1), bucket_cap_mb=1e-4)
    assert_good_step(first, second)
    first.module.on = True
    for net in (first, second):
        net.zero_grad()
    x = inputs(dist.get_rank())
    one, two = first(x).sum(), second(x).sum()
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else PeerFailedError):
        one.backward()
    two.backward()

    def alone(plain, rank, _):
        plain(inputs(rank)).sum().backward()

    assert_gradients(second, in_one_process(alone, second.module, 0, 2))
    first.module.on = False
    assert_good_step(first, second)


@on_ranks(2, timeout=60)
def test_an_error_before_buckets_are_rebuilt():
    """Rank 0 fails in a second backward of the first step; rank 1 is in the next step already."""

    def fail(gradient):
        raise ArithmeticError("trap")

    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
    out = net(inputs(dist.get_rank()))
    out.square().mean().backward(retain_graph=True)
    if dist.get_rank() == 0:
        handle = net.module[4].bias.register_hook(fail)
        with pytest.raises(ArithmeticError):
            out.sum().backward()
        handle.remove()
    else:
        with pytest.raises(PeerFailedError):
            net(inputs(1)).sum().backward()
    for _ in range(3):
        assert_good_step(net)


@on_ranks(3, timeout=60)
def test_a_wrapper_on_a_subgroup_beside_one_on_all_ranks():
    """Rank 1 is in both: its exception ends the backwards in both, on all their ranks."""
    pair = dist.new_group([0, 1])
    whole = DistributedDataParallel(sprung(2), bucket_cap_mb=1e-4)
    nets = [whole]
    if dist.get_rank() < 2:
        nets.append(DistributedDataParallel(mlp(1), process_group=pair, bucket_cap_mb=1e-4))
    for _ in range(2):
        assert_good_step(*nets)
        fail_on_rank_1(*nets)
    for _ in range(3):
        assert_good_step(*nets)


# -- hooks ---------------------------------------------------------------------------------


def test_a_rank_that_does_not_answer_in_time():
    """It is busy elsewhere: the others do not wait for it for good."""

    def main():
        net = DistributedDataParallel(sprung(2))
        for _ in range(2):
            assert_good_step(net)
        store = dist.distributed_c10d._get_default_store()
        net.module.on = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collective_log, "RESYNC_TIMEOUT_SECONDS", 1.0)
            if dist.get_rank() == 2:
                store.wait(["gone"])
                with pytest.raises(DistributedError):
                    step(net)
            elif dist.get_rank() == 1:
                with pytest.raises(ArithmeticError):
                    step(net)
                # PeerLostError if rank 0 notices first
                expected = (CollectiveTimeoutError, PeerLostError)
                with pytest.raises(expected, match=r"ranks \[2\] did not answer"):
                    step(net)
                store.set("gone", "")
            else:
                with pytest.raises(DistributedError, match=r"ranks \[2\] did not answer"):
                    step(net)
            with pytest.raises(BrokenGroupError):
                net(inputs(0))
        os._exit(0)  # collectives are under way that nobody will join: leaving would wait for them

    assert run_ranks(main, 3, may_die=[0, 1, 2], timeout=60) == [None] * 3


# -- threads -------------------------------------------------------------------------------


@pytest.mark.wide
@on_ranks(2)
def test_a_first_message_that_is_late_is_a_timeout():
    group = dist.new_group(timeout=timedelta(seconds=1))
    net = DistributedDataParallel(mlp(), process_group=group, init_sync=False)
    if dist.get_rank() == 0:  # the root of the first message
        dist.barrier()
        return
    with pytest.raises(CollectiveTimeoutError, match="the first message"):
        step(net)
    dist.barrier()


@pytest.mark.parametrize("kept", [False, True])
@on_ranks(2, timeout=60)
def test_recovery_ignores_groups_that_are_gone(kept):
    group = dist.new_group([0, 1])
    dist.barrier(group)  # Gloo may still connect on the other rank
    domain = FaultDomain.of(group)
    held = [DistributedDataParallel(mlp(), process_group=group)] if kept else []
    domain.note_interrupted()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    net = DistributedDataParallel(mlp())
    assert_good_step(net)
    assert (domain._group() is None) != bool(held)
