"""Ranks that disagree, fail or die: an error on every rank, and the next step works."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ddp.common import (
    Trap,
    assert_average,
    assert_good_step,
    assert_same,
    assert_same_on_ranks,
    average_used,
    fail_on_rank_1,
    mlp,
    on_ranks,
    sprung,
    step,
)
from gradwire import collectives as C
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm, broadcast_coalesced
from gradwire.ddp.faults.error_channel import wait_work
from gradwire.ddp.reducer import launch
from gradwire.ddp.reducer.weights import Tally
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenGroupError,
    HookError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    ReductionError,
)
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend", "quick_polls")


# -- models that differ --------------------------------------------------------------------


def with_layout():
    return nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)


DEVIATIONS = [  # modules, or arguments, of rank 1 and of the others, and what differs
    (nn.Linear(4, 3), nn.Linear(3, 4), r"rank 1: weight: .*shape \(3, 4\)"),
    (nn.Linear(4, 3).double(), nn.Linear(4, 3), r"rank 0: weight: .*float32.*rank 1: .*float64"),
    (nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3), "requires_grad=False"),
    (nn.Linear(4, 3, bias=False), nn.Linear(4, 3), "Not on every rank: bias"),
    (with_layout(), nn.Conv2d(2, 2, 2), "weight.*strides"),
    (nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3), "running_mean"),
    ({"find_unused_parameters": True}, {}, "rank 1: find_unused_parameters: .*True"),
    ({"static_graph": True}, {}, "static_graph"),
    ({"skip_all_reduce_unused_params": True}, {}, "skip_all_reduce_unused_params"),
    ({"sync_buffers_in_eval": False}, {}, "sync_buffers_in_eval"),
]


@pytest.mark.parametrize("number", range(len(DEVIATIONS)))
@on_ranks(3)
def test_what_differs_is_named_on_every_rank(number):
    one, others, told = DEVIATIONS[number]
    given = one if dist.get_rank() == 1 else others
    module, options = (given, {}) if isinstance(given, nn.Module) else (nn.BatchNorm1d(3), given)
    module.spare = nn.Parameter(torch.ones(1))  # one requires a gradient, on each rank
    with pytest.raises(MismatchError, match=told):
        DistributedDataParallel(module, **options)
    DistributedDataParallel(nn.Linear(3, 4))  # the group is still good


@on_ranks(2)
def test_an_exception_after_a_bucket_that_was_skipped():
    class Net(nn.Module):
        on = False

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
            self.large = nn.Linear(1 << 10, 1 << 10)  # unused; on Gloo, it is reduced in place

        def forward(self, x):
            trapped = self.on and dist.get_rank() == 1
            return self.second(Trap.apply(self.first(x)) if trapped else self.first(x))

    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    net = DistributedDataParallel(Net(), bucket_cap_mb=1e-6, **options)
    assert_good_step(net)
    fail_on_rank_1(net)
    assert_good_step(net)


# -- exceptions beside other waits ---------------------------------------------------------


class Words(nn.Module):
    """Adds rows of a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8, sparse=True)

    def forward(self, x):
        return x + self.table(torch.arange(len(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Beside(nn.Module):
    """On rank 1, backward raises before that of another module, in which the others wait."""

    on = False

    def __init__(self, other):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(4, 8), other, nn.Linear(8, 2)

    def forward(self, x):
        x = self.other(self.first(x))
        return self.last(Trap.apply(x) if self.on and dist.get_rank() == 1 else x)


def waits(state, bucket):
    dist.all_reduce(bucket.buffer(), async_op=True).wait()
    dist.broadcast(bucket.buffer(), 0)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def uneven(x):
    rank, y = dist.get_rank(), x.detach()[:2]
    rows = [[0, 2], [1, 1]]  # from a rank to another
    received = [of[rank] for of in rows]
    moved = C.all_to_all(y, input_splits=rows[rank], output_splits=received)
    return C.all_reduce(x) + C.all_gather(y[rank:], sizes="find").sum() + moved.sum()


OTHERS = {
    "all_reduce": lambda: Function(C.all_reduce),
    "all_gather": lambda: Function(lambda x: C.all_gather(x, async_op=True).wait()),
    "uneven parts": lambda: Function(uneven),
    "checked": lambda: Function(lambda x: C.all_reduce(x, "avg", check=True)),
    "norm": lambda: SyncBatchNorm(8),
    "norm of another group": lambda: SyncBatchNorm(8, process_group=dist.new_group()),
    "sparse": Words,
    "hook": nn.Identity,
}


# with one bucket, nothing is in flight: a collective on shm runs in the thread that waits for it
@pytest.mark.parametrize(
    ("other", "cap"),
    [
        *((o, 1e-5) for o in OTHERS),
        ("all_reduce", None),
        ("uneven parts", None),
        ("norm of another group", None),
    ],
)
@on_ranks(2, timeout=60)
def test_an_exception_while_others_wait_beside_buckets(other, cap):
    net = DistributedDataParallel(Beside(OTHERS[other]()), bucket_cap_mb=cap)
    net.register_comm_hook(None, {"sparse": hooks.all_reduce, "hook": waits}.get(other))
    for _ in range(2):
        step(net)
        fail_on_rank_1(net)
    assert_same_on_ranks(step(net))


@on_ranks(2, timeout=60)
def test_an_exception_while_others_wait_in_what_cannot_be_joined():
    gather = Function(lambda x: x + C.all_gather(x[dist.get_rank() :], sizes="find").sum())
    net = DistributedDataParallel(Beside(gather))
    step(net)
    net.module.on = True
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else BrokenGroupError):
        step(net)
    with pytest.raises((BrokenGroupError, PeerLostError)):
        step(net)


@on_ranks(3, timeout=60)
def test_an_exception_while_others_wait_in_different_groups():
    pair, rank = dist.new_group([1, 2]), dist.get_rank()
    other = Function(
        lambda x: C.all_reduce(C.all_reduce(x), group=pair) if rank else C.all_reduce(x)
    )
    net = DistributedDataParallel(Beside(other))
    for _ in range(2):
        step(net)
        fail_on_rank_1(net)  # rank 2 waits in `pair`, rank 0 for rank 2
    step(net)


@on_ranks(2, timeout=60)
def test_a_collective_after_an_exception_does_not_meet_a_bucket():
    net = DistributedDataParallel(Beside(nn.Identity()))
    step(net)
    net.module.on = True
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else PeerFailedError):
        step(net)
    # as many numbers as the bucket that rank 0 waits in
    ones = torch.ones(sum(p.numel() for p in net.parameters()) + len(Tally._fields))
    assert torch.equal(C.all_reduce(ones), 2 * ones)


# -- hooks that fail -----------------------------------------------------------------------


def all_reduce(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def failing(how, state, bucket):
    """Average, and fail in a way on the rank that says so, at one of the buckets."""
    fails = state["fail"] and bucket.index() == state["at"]
    if fails and how == "raises before":
        raise KeyError("out of luck")
    if fails and how == "returns None":
        return None
    future = all_reduce(state, bucket)
    if fails and how == "raises after":
        raise KeyError("out of luck")
    if fails and how == "returns None after":
        return None
    return future.then(lambda f: RESULTS[how](f.value())) if fails else future


RESULTS = {
    "raises in a callback": lambda result: {}["out of luck"],
    "returns another dtype": lambda result: result.double(),
    "returns another size": lambda result: result[:1],
}


@pytest.mark.narrow({"at": 1}, {"how": ["raises before", "returns None after"]})
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises before", "KeyError: 'out of luck'"),
        ("raises after", "KeyError: 'out of luck'"),
        ("raises in a callback", "KeyError"),
        ("returns None", "returned None"),
        ("returns None after", "returned None"),
        ("returns another dtype", "float64"),
        ("returns another size", "has 1 elements"),
    ],
)
@on_ranks(3, timeout=60)
def test_a_hook_that_fails_on_one_rank(how, told, at):
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
    state = {"fail": False, "at": at}
    net.register_comm_hook(state, partial(failing, how))
    assert_good_step(net)
    assert_good_step(net)
    assert len(net.reducer.buckets) >= 3
    for _ in range(2):
        state["fail"] = dist.get_rank() == 1
        kind = HookError if dist.get_rank() == 1 else PeerFailedError
        with pytest.raises(kind, match=told) as caught:
            step(net)
        if dist.get_rank() != 1:
            assert "rank 1" in str(caught.value)
        state["fail"] = False
        assert_good_step(net)


@contextmanager
def waits_held(net):
    """Poll in each wait only once another rank has reported an error."""

    def held(work, poll, **options):
        while not net.reducer.domain.channel.error_reported():
            pass
        poll()
        return wait_work(work, poll, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "wait_work", held)
        yield


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_a_hook_that_fails_on_every_rank(late):
    """A rank that hears of the other's error before it has called its own hook raises that."""
    net = DistributedDataParallel(mlp())
    net.register_comm_hook({"fail": True, "at": 0}, partial(failing, "raises before"))
    is_late = late and dist.get_rank() == 1
    kinds = PeerFailedError if is_late else (HookError, PeerFailedError)
    with (
        waits_held(net) if is_late else nullcontext(),
        pytest.raises(kinds, match="out of luck"),
    ):
        step(net)
    net.register_comm_hook(None, all_reduce)
    assert_good_step(net)


def by_reduce_op(name):
    def hook(group, bucket):
        op = getattr(dist.ReduceOp, name)
        work = dist.all_reduce(bucket.buffer(), op, group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    return hook


def by_reduce(group, bucket):
    buffer = bucket.buffer()
    work = dist.reduce(buffer, op=dist.ReduceOp.MAX, group=group, group_dst=1, async_op=True)
    return work.get_future().then(lambda _: buffer)


def by_all_gather(group, bucket):
    buffer = bucket.buffer()
    gathered = buffer.new_empty(group.size() * buffer.numel())
    work = dist.all_gather_into_tensor(gathered, buffer, group=group, async_op=True)
    rows = gathered.view(group.size(), -1)
    return work.get_future().then(lambda _: buffer.copy_(rows.mean(0)))


def by_all_to_all(group, bucket):
    buffer = bucket.buffer()
    rows = buffer.expand(group.size(), -1).contiguous()
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return work.get_future().then(lambda _: buffer.copy_(received.mean(0)))


def by_another_group(groups, bucket):
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, dist.ReduceOp.MAX, group=groups[1], async_op=True)
    return work.get_future().then(lambda _: buffer)


HOOKS = [by_reduce_op("AVG"), by_reduce_op("MAX"), by_reduce, by_all_gather, by_all_to_all]


@pytest.mark.parametrize("hook", [*HOOKS, by_another_group])
@pytest.mark.narrow({"each_backend": "shm"})
@on_ranks(2)
def test_an_exception_while_others_wait_in_a_collective_of_a_hook(hook):
    other = dist.new_group()
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-6)
    net.register_comm_hook((dist.group.WORLD, other), on_first(hook))
    before = step(net)[0].clone()
    if dist.get_rank() == 0:
        handle = net.module[0].weight.register_hook(raise_in_backward)
    with pytest.raises((ArithmeticError, PeerFailedError)):
        step(net)
    if dist.get_rank() == 0:
        handle.remove()
    torch.testing.assert_close(step(net)[0], before)


def on_first(hook):
    """Give hooks of one group that one."""
    if hook is by_another_group:
        return hook
    return lambda groups, bucket: hook(groups[0], bucket)


def raise_in_backward(grad):
    raise ArithmeticError("in backward")


def test_a_chain_of_collectives_that_cannot_be_joined_says_so():
    """Rank 1 fails before a hook whose callback goes on to a second collective."""

    def chained(state, bucket):
        if state["fail"]:
            raise KeyError("out of luck")

        def again(future):
            return [dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    def main():
        net = DistributedDataParallel(mlp())
        net.register_comm_hook({"fail": dist.get_rank() == 1}, chained)
        with pytest.raises(BrokenGroupError, match="rank 1: HookError"):
            step(net)
        with pytest.raises(BrokenGroupError, match="new process group"):
            net(torch.zeros(2, 4))
        os._exit(0)  # the backend's threads hang in the collective: so would leaving

    assert run_ranks(main, 2, may_die=[0, 1], timeout=20) == [None, None]


# -- backwards that fail -------------------------------------------------------------------


class Wide(nn.Module):
    """A layer of this width, above one whose backward raises while `sprung`."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.tail = nn.Linear(4, width), nn.Linear(width, width)
        self.sprung = False

    def forward(self, x):
        x = self.head(x)
        return self.tail(Trap.apply(x) if self.sprung else x)


@pytest.mark.narrow({"width": 8}, {"as_views": False})
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("width", [8, 128, 1100])  # lent, copied early, reduced where it lies
@on_ranks(2)
def test_gradients_that_are_zeroed_while_they_travel(width, as_views):
    """What rank 1 sends after rank 0's exception is not written to the zeros there."""
    store = dist.distributed_c10d._get_default_store()
    options = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": as_views}
    net, twin = DistributedDataParallel(Wide(width), **options), Wide(width)
    x = torch.full((2, 4), dist.get_rank() + 1.0)
    net(x).square().mean().backward()
    net.zero_grad()
    net.module.sprung = dist.get_rank() == 0
    out = net(x).square().mean()
    if dist.get_rank() == 0:
        with pytest.raises(ArithmeticError):
            out.backward()
        net.zero_grad(set_to_none=False)
        store.set("zeroed", "")
    else:
        store.wait(["zeroed"])
        with pytest.raises(PeerFailedError):
            out.backward()
        net.zero_grad(set_to_none=False)
    net.module.sprung = False
    net(x).square().mean().backward()
    twin(x).square().mean().backward()
    assert_average(net, twin)


def evaluate(net):
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 4))
    net.train()


def accumulate(net):
    with net.no_sync():
        net(torch.ones(2, 4)).sum().backward()


def accumulate_joined(net):
    with net.join():
        accumulate(net)


def wrap(net):
    DistributedDataParallel(mlp())


@pytest.mark.narrow({"use": accumulate, "buffers": True}, {"use": accumulate_joined})
@pytest.mark.parametrize(
    "use", [evaluate, accumulate, accumulate_joined, wrap, DistributedDataParallel.refit]
)
@pytest.mark.parametrize("buffers", [True, False])
@on_ranks(2, timeout=20)
def test_other_messages_after_an_exception_on_one_rank(use, buffers):
    """Buffers and descriptions of models are sent on the group in which others wait."""
    module = sprung(2)
    if buffers:
        module.register_buffer("buffer", torch.zeros(3))
    net = DistributedDataParallel(module, bucket_cap_mb=1e-4)
    assert_good_step(net)
    fail_on_rank_1(net)
    use(net)
    assert_good_step(net)


class Halves(nn.Module):
    """Two layers, of which a forward takes those it is given; backward raises while `sprung`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.names, self.sprung = ["first", "second"], False

    def forward(self, x, *names):
        out = sum(getattr(self, name)(x) for name in names or self.names)
        return Trap.apply(out) if self.sprung else out


@pytest.mark.narrow({"failing": "net"})
@pytest.mark.parametrize("failing", ["net", "other"])
@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(2)
def test_gradients_accumulated_before_resynchronization(failing, weighted):
    """They learn of the exceptions in the forward after `no_sync`."""
    options = {"find_unused_parameters": True}
    net, twin = DistributedDataParallel(Halves(), **options), Halves()
    other = DistributedDataParallel(Halves())
    x = torch.full((2, 4), dist.get_rank() + 1.0)
    for wrapped in (net, other) * 2:  # once buckets are rebuilt, forwards wait for nobody
        wrapped(x).sum().backward()
    for _ in range(2):
        net.zero_grad()
        twin.zero_grad()
        wrapped = net if failing == "net" else other
        wrapped.module.sprung = True
        if weighted and failing == "net":
            net.weight(5)
        with pytest.raises(ArithmeticError):
            wrapped(x).sum().backward()
        wrapped.module.sprung = False
        with net.no_sync():
            if weighted:
                net.weight(3)
            net(x).sum().backward()
        if weighted:
            net.weight(1)
        net(x, "first").sum().backward()
        (twin(x).sum() * (3 if weighted else 1) + twin(x, "first").sum()).backward()
        average_used(twin)
        for p in twin.parameters():
            p.grad /= 4 if weighted else 1
        assert_same(net, twin)


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
@on_ranks(2)
def test_parameters_without_a_gradient_are_named(ranks):
    net = DistributedDataParallel(Halves(), bucket_cap_mb=1e-4)
    assert_good_step(net)
    if dist.get_rank() in ranks:
        net.module.names = ["first"]
        step(net)  # nobody can know yet that no more will come
        with pytest.raises(ReductionError, match=r"second\.weight.*second\.bias"):
            net(torch.zeros(2, 4))
    else:
        with pytest.raises(PeerFailedError, match=r"rank 1.*second\.weight"):
            step(net)
    net.module.names = ["first", "second"]
    assert_good_step(net)


@on_ranks(2)
def test_a_failure_one_step_ahead_is_raised_a_step_later():
    """Rank 1 is held in the wait that ends step 3 until rank 0 has failed in step 4."""
    net = DistributedDataParallel(sprung(2, rank=0))
    assert_good_step(net)
    assert_good_step(net)
    if dist.get_rank() == 0:
        assert_good_step(net)
        net.module.on = True
        with pytest.raises(ArithmeticError, match="trap"):
            step(net)
        net.module.on = False
        assert_good_step(net)  # rings, and meets rank 1 in its step 3
    else:
        with waits_held(net):
            assert_good_step(net)  # all took part in it
        with pytest.raises(PeerFailedError, match=r"rank 0: backward was interrupted"):
            step(net)
        assert_good_step(net)
    assert_good_step(net)


# -- ranks that die ------------------------------------------------------------------------


@pytest.mark.narrow({"each_backend": "shm"})
def test_a_hook_that_ignores_the_error_of_its_collective():
    def main():
        net = DistributedDataParallel(mlp())

        def hiding(state, bucket):
            if dist.get_rank() == 1 and dying:
                os.kill(os.getpid(), signal.SIGKILL)
            work = dist.all_reduce(bucket.buffer().div_(3), async_op=True)
            return work.get_future().then(lambda _: bucket.buffer())

        net.register_comm_hook(None, hiding)
        dying = False
        assert_good_step(net)
        dying = True
        with pytest.raises(PeerLostError):  # of whichever wait comes first
            step(net)
        return True

    assert run_ranks(main, 3, may_die=[1]) == [True, None, True]


@pytest.mark.narrow({"where": "buffers", "each_backend": "gloo"})
@pytest.mark.parametrize("where", ["buffers", "join", "models", "state"])
def test_a_rank_that_dies_between_backwards(where):
    """Others meet it in messages that are no gradients."""

    def main():
        net = DistributedDataParallel(nn.Sequential(*mlp(), nn.BatchNorm1d(2)))
        step(net)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

        def meet():
            if where == "join":
                with net.join():
                    pass
            elif where == "models":
                DistributedDataParallel(mlp())
            elif where == "state":
                broadcast_coalesced(dist.group.WORLD, list(net.state_dict().values()))
            step(net)  # a root may be done before it notices

        with pytest.raises(PeerLostError):
            meet()
        return True

    assert run_ranks(main, 3, may_die=[1]) == [True, None, True]


@pytest.mark.narrow({"each_backend": "gloo"})
def test_a_death_that_the_backend_does_not_report():
    """As Gloo's, now and then: it forgets a message under way when the connection ends."""

    def main():
        net = DistributedDataParallel(mlp())
        net.register_comm_hook(None, all_reduce)
        assert_good_step(net)

        def never_done(state, bucket):
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.futures.Future()

        net.register_comm_hook(None, never_done)
        with pytest.raises(PeerLostError, match=r"ranks \[1\] ended"):
            step(net)
        return True

    assert run_ranks(main, 3, may_die=[1], timeout=60) == [True, None, True]


# -- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"mixed_precision": object()}, NotSupportedError, "autocast.*bf16"),
        ({"param_to_hook_all_reduce": nn.Parameter()}, ArgumentError, "belong together"),
        ({"bucket_cap_mb": -1}, ArgumentError, "bucket_cap_mb is"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, ArgumentError, "both given"),
        ({"bucket_cap_mb_list": []}, ArgumentError, "bucket_cap_mb_list is"),
        ({"bucket_cap_mb_list": 5}, ArgumentTypeError, "bucket_cap_mb_list is 5: pass numbers"),
        ({"bucket_cap_mb": "25"}, ArgumentTypeError, "pass numbers of MiB"),
        ({"bucket_cap_mb": float("nan")}, ArgumentError, r"bucket_cap_mb is \[nan\]"),
        ({"device_ids": 0}, ArgumentTypeError, "device_ids is 0: pass a list"),
        ({"device_mesh": "dp"}, ArgumentTypeError, "device_mesh is a str"),
        ({"device_ids": [0]}, ArgumentError, r"device_ids=\[0\]"),
        ({"output_device": 0}, ArgumentError, "output_device=0"),
        ({"process_group": "world"}, ArgumentTypeError, "process_group is 'world'"),
        ({"module": 3}, ArgumentTypeError, "module is a int"),
        ({"module": nn.ReLU()}, ArgumentError, "no parameter that requires a gradient"),
        ({"module": nn.LazyLinear(3)}, ArgumentError, "has no shape yet"),
        ({"module": nn.Linear(3, 3, device="meta")}, ArgumentError, "weight is on the meta device"),
    ],
)
@on_ranks(1)
def test_bad_arguments(options, kind, message):
    sent = dist.group.WORLD._get_sequence_number_for_group()
    with pytest.raises(kind, match=message):
        DistributedDataParallel(**{"module": mlp(), **options})
    assert dist.group.WORLD._get_sequence_number_for_group() == sent  # no collective


@on_ranks(1)
def test_a_subclass_of_several_tensors_is_refused_by_name():
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(NotSupportedError, match="weight is a TwoTensor"):
        DistributedDataParallel(net)


def test_a_group_is_needed():
    with pytest.raises(ArgumentError, match="init_process_group first"):
        DistributedDataParallel(mlp())
