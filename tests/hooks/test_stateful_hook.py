"""Hooks that are objects with a state and read their results themselves."""

from __future__ import annotations

import copy

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from gradwire import compat, hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    HookError,
    PeerFailedError,
)
from gradwire.hooks import GradBucket, StatefulHook, bind_hook, parse_hook_result
from gradwire.testing import FakeBucket, run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Halving(StatefulHook):
    """Hook whose future holds a dict with halves, which `bad` ranks read wrongly."""

    single_collective = True

    def __init__(self, state=None, bad=(), how="raise"):
        super().__init__(state)
        self.bad, self.how = bad, how

    def run_hook(self, bucket: GradBucket):
        group = self.state if isinstance(self.state, dist.ProcessGroup) else dist.group.WORLD
        half = (bucket.buffer() / group.size()).half()
        work = dist.all_reduce(half, group=group, async_op=True)
        return work.get_future().then(lambda _: {"half": half, "dtype": bucket.buffer().dtype})

    def parse_hook_result(self, result):
        reduced = result["half"].to(result["dtype"])
        if dist.is_initialized() and dist.get_rank() in self.bad:
            if self.how == "raise":
                raise KeyError("out of luck")
            return {"shape": reduced[:-1], "dtype": reduced.double(), "None": None}[self.how]
        return reduced


def step(net):
    net.zero_grad()
    net(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return net.module.weight.grad.tolist()


def made(hook, **options):
    net = DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)
    net.register_comm_hook(None, hook)
    return net


def composed(hook):
    return hooks.wrap(hooks.compress(hook, torch.bfloat16), after=lambda r, _: r * 2)


@pytest.mark.parametrize(("wrap", "factor"), [(lambda hook: hook, 1), (composed, 2)])
def test_gradients_are_read_by_parse_hook_result(wrap, factor):
    def main():
        net = made(wrap(Halving()))
        return [step(net) for _ in range(3)]

    want = [[[1.5 * factor] * 2]] * 3
    assert run_ranks(main, 2) == [want, want]


def test_the_inner_hook_of_a_before_wrapper_reads_its_result():
    class Summing(StatefulHook):
        """Hook that acts as two ranks with the same gradients, and divides when it reads."""

        def run_hook(self, bucket):
            return bucket.buffer() * 2

        def parse_hook_result(self, result):
            reduced = super().parse_hook_result(result)
            return (reduced / 2).to(reduced.dtype)

    def before(bucket):
        bucket.buffer().add_(1)

    def result(hook):
        bucket = FakeBucket(torch.ones(3))
        future = hooks.as_future(hook.run_hook(bucket), hook)
        return parse_hook_result(future.wait(), bucket, hook).tolist()

    wrapped = hooks.wrap(Summing(None), before=before)
    assert result(wrapped) == [2.0] * 3
    assert result(hooks.wrap(wrapped, before=before)) == [3.0] * 3
    assert result(hooks.wrap(wrapped, after=lambda reduced, _: reduced + 1)) == [3.0] * 3
    counting = FakeBucket(torch.ones(3, dtype=torch.int64))
    assert (
        hooks.compress(Summing(None), torch.bfloat16).run_hook(counting).wait().tolist() == [1] * 3
    )


@pytest.mark.narrow({"how": "raise"}, {"how": ["shape", "dtype"], "bad": (1,)})
@pytest.mark.parametrize("how", ["raise", "shape", "dtype", "None"])
@pytest.mark.parametrize("bad", [(0, 1), (1,)])
def test_a_result_that_cannot_be_read_ends_the_backward_on_every_rank(bad, how):
    def main():
        hook = Halving(None, bad, how)
        net = made(hook)
        with pytest.raises(DistributedError) as caught:
            step(net)
        hook.bad = ()
        assert step(net) == [[1.5, 1.5]]  # the next step is not affected
        return type(caught.value)

    assert run_ranks(main, 2) == [HookError if r in bad else PeerFailedError for r in (0, 1)]


@on_ranks(2)
def test_the_state_is_saved_rekeyed_and_copied():
    class Remembering(Halving):
        def run_hook(self, bucket):
            self.state["memory"][bucket.index()] = bucket.buffer().clone()
            return super().run_hook(bucket)

    class State(dict):
        def state_dict(self):
            return dict(self)

    hook = Remembering(State(memory={}))
    net = made(hooks.compress(hook, torch.bfloat16))
    step(net)
    assert net.comm_hook_state_dict()["own"]["memory"].keys() == {0}
    net = made(Halving(dist.group.WORLD))
    other = copy.deepcopy(net)
    assert other.reducer.comm_hook is not net.reducer.comm_hook
    assert other.reducer.comm_hook.state is dist.group.WORLD
    assert cloudpickle.loads(cloudpickle.dumps(Halving(dist.group.WORLD))).state is dist.group.WORLD
    assert step(other) == [[1.5, 1.5]]


@on_ranks(2)
def test_the_states_group_is_replaced():
    hook = Halving(dist.group.WORLD)
    net = made(composed(hook))
    net.process_group = again = dist.new_group([0, 1])
    assert hook.state is again
    assert step(net) == [[3.0, 3.0]]


HOOKS = ["bf16", "int8", "power", "wrapped", "function"]


def register_without_group(net, hook):
    if hook == "power":
        net.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)
    elif hook == "wrapped":
        net.register_comm_hook(None, hooks.compress(hooks.BlockQuantization(8), torch.bfloat16))
    elif hook == "function":
        net.register_comm_hook(None, hooks.compress(hooks.all_reduce, torch.bfloat16))
    else:
        net.register_comm_hook(None, hook)


@pytest.mark.narrow({"hook": "int8"}, {"hook": "function", "first": "half"})
@pytest.mark.parametrize("first", ["half", "whole"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_without_a_group_runs_in_the_modules_group(hook, first):
    """In the first group, and in the one that replaces it, also of a copy."""

    def main():
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups = [halves[dist.get_rank() // 2], dist.new_group([0, 1, 2, 3])]
        if first == "whole":
            groups = [None, groups[0]]
        net = DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=groups[0])
        register_without_group(net, hook)
        found = step(net)
        net.process_group = groups[1]
        torch.testing.assert_close(step(copy.deepcopy(net)), again := step(net))
        return found, again

    apart, together = [[[1.5, 1.5]]] * 2 + [[[3.5, 3.5]]] * 2, [[[2.5, 2.5]]] * 4
    wanted = (
        zip(apart, together, strict=True) if first == "half" else zip(together, apart, strict=True)
    )
    for got, want in zip(run_ranks(main, 4), wanted, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-2, atol=0)


def test_errors_under_compat():
    def main():
        with compat.installed():
            net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
            hook = Halving(None, (0, 1))
            net.register_comm_hook(None, hook)
            with pytest.raises(KeyError, match="out of luck") as caught:
                step(net)
            assert isinstance(caught.value, HookError)
            hook.bad = ()
            return step(net)

    assert run_ranks(main, 2) == [[[1.5, 1.5]]] * 2


@on_ranks(2)
def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="its own state"):
        bind_hook(3, Halving(4))
    with pytest.raises(ArgumentTypeError, match="an instance"):
        bind_hook(None, Halving)
    with pytest.raises(TypeError, match="abstract"):
        StatefulHook(None)
    net = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with pytest.raises(ArgumentError, match="its own state"):
        net.register_comm_hook(3, Halving(4))
    assert step(net) == [[1.5, 1.5]]


@pytest.mark.narrow({"failing": (1,)})
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_an_error_after_backward_does_not_affect_the_next_one(failing):
    """The next backward pass raised, because the parameters already had gradients."""

    class Raises(StatefulHook):
        committed_steps = 0

        def run_hook(self, bucket):
            indices.append(bucket.index())
            return hooks.all_reduce(self.state, bucket)

        def committed(self):
            self.committed_steps += 1
            if self.committed_steps == 2 and dist.get_rank() in failing:
                raise KeyError("mine")

    def main():
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        net = DistributedDataParallel(module, bucket_cap_mb=1e-5)
        net.register_comm_hook(None, Raises(dist.group.WORLD))
        for step in range(4):
            net.zero_grad()
            indices.clear()
            loss = net(torch.full((1, 4), float(dist.get_rank()))).sum()
            if step == 1 and dist.get_rank() in failing:
                with pytest.raises(KeyError, match="mine"):
                    loss.backward()
            else:
                loss.backward()
            assert module[0].bias.grad is not None
            assert indices == list(range(len(indices)))
            assert module[1].bias.grad.tolist() == [1.0]

    indices = []
    run_ranks(main, 2)


@pytest.mark.narrow({"error": KeyError})
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@on_ranks(2)
def test_a_rank_that_fails_after_backward_sends_no_more(error):
    """Its next step met later collectives of the others, which aborted processes on Gloo."""

    class Sends(StatefulHook):
        def run_hook(self, bucket):
            return hooks.all_reduce(self.state, bucket)

        def committed(self):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1:
                raise error("mine")

    net = DistributedDataParallel(torch.nn.Linear(4, 1))
    net.register_comm_hook(None, Sends(dist.group.WORLD))
    if dist.get_rank() == 1:
        with pytest.raises(error, match="mine"):
            net(torch.ones(1, 4)).sum().backward()
    else:
        net(torch.ones(1, 4)).sum().backward()
    assert net.module.bias.grad.tolist() == [1.0]
    with pytest.raises(DistributedError, match=f"hook raised {error.__name__}"):
        net(torch.ones(1, 4)).sum().backward()
