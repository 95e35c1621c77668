"""Runs as seen by the training loop, without losses of members."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import elastic
from gradwire.ddp import DistributedDataParallel
from gradwire.elastic import protocol, shards
from gradwire.elastic.steps import MemberSteps
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    ReductionError,
    RunOverError,
)
from gradwire.local_sgd import LocalSGD

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net(seed: int = 0) -> nn.Module:
    # members that are threads share torch's generator: one may seed it while another draws
    own = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=own)
    return model


def join(store: dist.Store, **options: Any) -> elastic.Run:
    return elastic.join(store, timeout=timedelta(seconds=20), **options)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train(
    run: elastic.Run,
    model: nn.Module,
    steps: int = 4,
    *,
    before: Callable[[elastic.Step], object] = lambda step: None,
    at: Callable[[elastic.Step], object] = lambda step: None,
    after: Callable[[elastic.Step], object] = lambda step: None,
    **kept: Any,
) -> list[torch.Tensor]:
    """Train; call `before` and `after` around each step's block, and `at` where it begins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.keep(model=model, optimizer=optimizer, **kept)
    for step in run.steps(steps, samples=len(X), batch=16):
        before(step)
        with step:
            at(step)
            for shard in step.shards:
                step.backward(model(X[step.sample_ids(shard)]).square().mean())
            step.commit(optimizer)
        after(step)
    return weights(model)


def take(step: elastic.Step, model: nn.Module, *stepped: Any) -> None:
    """Take a step."""
    with step:
        for shard in step.shards:
            step.backward(model(X[step.sample_ids(shard)]).square().mean())
        step.commit(*stepped)


def together(*members: Callable[[], Any]) -> list[Any]:
    """Run members in threads of this process; their results, or what they raised."""
    results: list[Any] = [None] * len(members)

    def one(index: int) -> None:
        try:
            results[index] = members[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_gradients_are_those_of_the_whole_batch(store: dist.Store) -> None:
    found = train(join(store, shards=4), net())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = elastic.Samples(len(X), batch=16, shards=4)
    for step in range(4):
        optimizer.zero_grad()
        model(X[samples.ids(step, elastic.Shard(0, 4))]).square().mean().backward()
        optimizer.step()
    for mine, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach())


@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("reproducible", [True, False])
def test_sparse_gradients_need_ddp_and_are_guarded(
    store: dist.Store, reproducible: bool, factor: float
) -> None:
    run = join(store, nan_guard=True, reproducible=reproducible)
    model: nn.Module = nn.Embedding(4, 2, sparse=True)
    if not reproducible:
        model = DistributedDataParallel(model, process_group=run.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)

    def both(step: elastic.Step) -> None:
        for _ in step.shards:
            step.backward(model(torch.tensor([1, 1])).sum() * factor)
        step.commit(optimizer)

    expected: Any = nullcontext()
    if factor > 1:
        expected = pytest.raises(ReductionError, match="not finite")
    elif reproducible:
        expected = pytest.raises(NotSupportedError, match="sparse gradient")
    step = next(_steps := run.steps(1))  # ends the run when it is collected
    with expected, step:
        both(step)


def test_gradients_are_means_over_samples() -> None:
    """Weights count samples, a shard of no samples counts nothing, unused parameters get none."""
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    for factors, given, expected in (
        ([8.0, 0.0], [1, 3], 2.0),
        ([1.0, math.nan], [1, 0], 1.0),
        ([1.0, 3.0], [None, None], 2.0),
    ):
        run = join(dist.HashStore(), shards=2)
        run.keep(model=module)
        for step in run.steps(1):
            with step:
                for shard in step.shards:
                    loss = module[0](torch.ones(1, 1)).sum() * factors[shard.first]
                    step.backward(loss, weight=given[shard.first])
                step.reduce()
                assert module[0].weight.grad is not None
                assert module[0].weight.grad.tolist() == [[expected]]
                assert module[1].weight.grad is None
                step.commit()


@pytest.mark.narrow({"reproducible": True})
@pytest.mark.parametrize("reproducible", [True, False])
def test_a_process_that_comes_later_gets_the_state(store: dist.Store, reproducible: bool) -> None:
    came, sizes = threading.Event(), set()

    def first() -> list[torch.Tensor]:
        run = join(store, reproducible=reproducible)

        def after(step: elastic.Step) -> None:
            if step.number == 3:
                came.set()
            if run.size == 1 and step.number > 3:
                threading.Event().wait(0.05)

        model = DistributedDataParallel(net(), process_group=run.group)
        return train(run, model, 40, at=lambda step: sizes.add(run.size), after=after)

    def second() -> list[torch.Tensor]:
        assert came.wait(30)
        run = join(store, reproducible=reproducible)
        model = DistributedDataParallel(net(seed=7), process_group=run.group)
        return train(run, model, steps=40)

    one, two = together(first, second)
    assert equal(one, two), (one, two)
    assert sizes == {1, 2}


@pytest.mark.wide
def test_a_checkpoint_is_resumed_by_more_members(store: dist.Store, tmp_path: Path) -> None:
    def member(own: dist.Store, steps: int, members: int) -> list[torch.Tensor]:
        run = join(own, members=members, name=f"{steps}")
        model = net(seed=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.keep(model=model, optimizer=optimizer)
        assert run.load(tmp_path) == (steps > 2)
        numbers = []
        for step in run.steps(steps, samples=len(X), batch=16):
            numbers.append(step.number)
            take(step, model, optimizer)
        assert numbers == list(range(0 if steps == 2 else 2, steps))
        run.save(tmp_path)
        return weights(model)

    whole = train(join(store, name="whole"), net(seed=2), steps=4)
    member(store, 2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]
    for found in together(*[lambda: member(store, 4, 2)] * 2):
        assert equal(found, whole), found


@pytest.mark.parametrize(
    ("argument", "value"), [("samples", 32), ("batch", 8), ("shuffle", False), ("seed", 1)]
)
def test_a_checkpoint_is_resumed_with_the_same_order_of_samples(
    tmp_path: Path, argument: str, value: int
) -> None:
    """Other steps would skip samples, and repeat others."""
    runs: list[elastic.Run] = []

    def train(steps: int, **changed: int) -> None:
        given = {"samples": 64, "batch": 16, "shuffle": True, "seed": 0, **changed}
        run, model = join(dist.HashStore(), seed=given.pop("seed")), net()
        run.keep(model=model)
        run.load(tmp_path)
        runs.append(run)
        for step in run.steps(steps, **given):
            take(step, model)
        run.save(tmp_path)

    train(2)
    with pytest.raises(ArgumentError, match=f"{argument} is {value}, but .* in the loaded"):
        train(4, **{argument: value})
    runs[-1]._runtime.stop()
    train(4)


@pytest.mark.parametrize("savers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("breaks", [False, True])
def test_the_last_save_needs_any_member(
    store: dist.Store, tmp_path: Path, savers: tuple[int, ...], *, breaks: bool
) -> None:
    """It was lost with the first member, if that died after the last step."""

    def member() -> list[torch.Tensor]:
        run, model = join(store, members=2), net()
        run.keep(model=model)
        for step in run.steps(100 if breaks else 2, samples=len(X), batch=16):
            if step.number == 2:
                break
            take(step, model)
        del step
        if run.rank in savers:
            assert run.save(tmp_path, keep=1).is_dir()
        return weights(model)

    found = together(member, member)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]
    again = join(dist.HashStore())
    again.keep(model=(loaded := net(seed=3)))
    assert again.load(tmp_path)
    again._runtime.stop()
    assert equal(weights(loaded), found[0])


@pytest.mark.wide
def test_a_gradient_that_is_not_finite_is_named_on_all_members(store: dist.Store) -> None:
    def member() -> None:
        run = join(store, members=2, nan_guard=True, backend="gloo")
        model = net()
        run.keep(model=model)
        for step in run.steps(3, samples=len(X), batch=16):
            with step:
                for shard in step.shards:
                    bad = step.number == 1 and shard.first == 7
                    step.backward(model(X[step.sample_ids(shard)]).mean() * (1e400 if bad else 1))
                step.commit()

    raised = sorted(together(member, member), key=lambda error: type(error).__name__)
    assert [type(error) for error in raised] == [PeerFailedError, ReductionError]
    for error in raised:
        assert "rank 1 (member" in str(error)
        assert "step 1: the gradient of 'model.2.bias' is not finite" in str(error)


@pytest.mark.parametrize("how", ["tree", "DDP", "local", "local, by .data"])
def test_a_parameter_that_a_shard_writes_to_is_named_on_all_members(
    store: dist.Store, how: str
) -> None:
    """Each member's forward would write what its own samples ask for."""

    def member() -> None:
        run = join(store, members=2, reproducible=how != "DDP")
        table, layer = nn.Embedding(8, 2, max_norm=1.0), nn.Linear(1, 1)
        table.weight.detach().fill_(9.0)
        model: nn.Module = nn.ModuleDict({"table": table, "layer": layer})
        model.forward = lambda x: layer(x).sum()
        if how == "DDP":
            model = DistributedDataParallel(
                model, process_group=run.group, find_unused_parameters=True
            )
        table.weight.requires_grad_("local" not in how)
        run.keep(model=model)

        def write() -> None:
            if ".data" in how:
                table.weight.data.mul_(0.5)  # as the mean of a teacher
            else:
                table(torch.tensor([0]))

        for step in run.steps(3):
            with step:
                for shard in step.shards:
                    writes = step.number == 1 and shard.stop == 8
                    if "local" in how:
                        with step.local(partial(torch.optim.SGD, lr=0.1)) as inner:
                            model(torch.ones(1, 1)).backward()
                            inner.step()
                            if writes:
                                write()
                    else:
                        if writes:
                            write()
                        step.backward(model(torch.ones(1, 1)))
                step.commit()

    raised = sorted(together(member, member), key=lambda error: type(error).__name__)
    assert [type(error) for error in raised] == [NotSupportedError, PeerFailedError], raised
    for error in raised:
        assert "table.weight' was written to within step 1" in str(error)


CHANGES = {  # value of the weight after one shard, its weight, and the error
    "infinity": (math.inf, None, r"rank \d \(member \d\), step 1: .* not"),
    "NaN": (math.nan, None, r"rank \d \(member \d\), step 1: .* it was not sent"),
    "NaN that counts nothing": (math.nan, 0.0, ""),
    "a sum that is too large": (3e38, None, "^step 1: .* their sum is too large"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_local_steps_that_are_not_finite_are_guarded(how: str) -> None:
    value, weight, message = CHANGES[how]
    run = join(dist.HashStore(), shards=2, nan_guard=True)
    model = nn.Linear(1, 1, bias=False)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.keep(model=model, outer=outer)
    expected = pytest.raises(ReductionError, match=message) if message else nullcontext()
    with expected:
        for step in run.steps(2):
            with step:
                for shard in step.shards:
                    bad = step.number == 1 and (shard.first == 0 or "sum" in how)
                    with step.local(partial(torch.optim.SGD, lr=0.1), weight=weight if bad else 1):
                        if bad:
                            model.weight.detach().fill_(value)
                step.commit(outer)
    assert model.weight.isfinite().all()


def test_a_step_is_begun_once_and_while_the_run_lasts(store: dist.Store) -> None:
    """A run that was dropped went on alone, in a group of its own."""
    run, model = join(store), net()
    run.keep(model=model)
    step = next(steps := run.steps(2))
    with step:
        for _ in step.shards:
            step.backward(model(X).mean())
        step.commit()
    with pytest.raises(ReductionError, match="step 0 is not the current one"), step:
        pass
    last = next(steps)
    del steps
    with pytest.raises(ReductionError, match=r"keep what run\.steps returned"), last:
        pass


@pytest.mark.wide
def test_a_newcomer_with_another_model_leaves_the_run_to_the_others(store: dist.Store) -> None:
    came = threading.Event()

    def other() -> None:
        assert came.wait(30)
        train(join(store), nn.Linear(4, 1).double())

    def after(step: elastic.Step) -> None:
        came.set()
        threading.Event().wait(0.02)

    found, raised = together(lambda: train(join(store), net(), 40, after=after), other)
    assert isinstance(raised, MismatchError)
    assert equal(found, train(join(store, name="alone"), net(), steps=40)), found


def test_a_buffer_that_forward_replaces_is_averaged(store: dist.Store) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + x.detach().sum()
            return super().forward(x)

    def member(name: str, members: int) -> float:
        model = Counting()
        train(join(store, members=members, shards=4, name=name), model, steps=3)
        return float(model.seen)

    samples = elastic.Samples(len(X), batch=16, shards=4)
    ids = [i for step in range(3) for i in samples.ids(step, elastic.Shard(0, 4))]
    alone = member("alone", 1)
    assert alone == pytest.approx(float(X[ids].sum()) / 4)  # the mean over shards
    assert together(*[lambda: member("both", 2)] * 2) == [alone] * 2


@pytest.mark.parametrize(
    ("argument", "value"),
    [("steps", 5), ("samples", 32), ("batch", 8), ("shuffle", False), ("seed", 1), ("shards", 4)],
)
def test_arguments_that_differ_are_named_on_all_members(
    store: dist.Store, argument: str, value: int
) -> None:
    """They trained on with other samples, and other weights."""
    usual = {"steps": 4, "samples": 64, "batch": 16, "shuffle": True, "seed": 0, "shards": 8}

    def member(mine: dict[str, Any]) -> None:
        given = {**usual, **mine}
        run = join(store, members=2, **{n: given.pop(n) for n in ("seed", "shards")})
        run.keep(model=nn.Linear(1, 1))
        next(run.steps(**given))

    raised = together(lambda: member({}), lambda: member({argument: value}))
    assert [type(error) for error in raised] == [MismatchError] * 2
    for error in raised:
        values = {repr(value), repr(usual[argument])}
        assert str(error).startswith(f"{argument} is ")
        assert all(text in str(error) for text in values)
    run = join(store, name="begun")
    run.keep(model=nn.Linear(1, 1))
    step = next(steps := run.steps(2))
    newcomer = join(store, name="begun")
    newcomer.keep(model=nn.Linear(1, 1))
    with pytest.raises(MismatchError, match="steps is 3 on member 2 and 2 on the first"):
        next(newcomer.steps(3))
    assert not run._runtime.membership.get("refused")
    del step, steps


def losing(run: elastic.Run, *, at: int) -> Callable[[], bool]:
    """A barrier that fails at the commit of a step, once, as if a member had died in it."""
    passes, left = run._runtime._pass_barrier, [at]

    def fail() -> bool:
        if left and run.committed_steps == left[0]:
            left.pop()
            raise PeerLostError("a member is gone")
        return passes()

    return fail


def test_the_group_between_two_steps(store: dist.Store) -> None:
    """It was an AssertionError without a word."""
    run = join(store)
    assert run.group.size() == 1
    run._runtime._pass_barrier = losing(run, at=1)  # type: ignore[method-assign]

    def at(step: elastic.Step) -> None:
        assert run.group.size() == 1
        if step.number == 1 and run.generation == 2:
            run._runtime.monitor.wanted = True

    def after(step: elastic.Step) -> None:
        if not step.committed or run._runtime.member.phase is protocol.Phase.ARRIVED:
            with pytest.raises(NotSupportedError, match=r"run.group is unavailable"):
                run.group  # noqa: B018
        else:
            assert run.group.size() == 1

    train(run, net(), 3, at=at, after=after)
    assert run.group.size() == 1
    assert run.committed_steps == 3


def test_local_sgd_refuses_the_group_of_a_generation(store: dist.Store) -> None:
    """It went on alone with it, and averaged nothing."""
    run, model = join(store), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotSupportedError, match="group is the group of an elastic run"):
        LocalSGD(optimizer, model.named_parameters(), every=2, group=run.group)
    run._runtime.stop()


def test_one_member_stops_all(store: dist.Store) -> None:
    def member() -> int:
        run = join(store, members=2)
        train(run, net(), 50, after=lambda s: s.number == 1 and run.rank == 1 and run.stop())
        return run.committed_steps

    assert together(member, member) == [3, 3]


@pytest.mark.wide
def test_an_error_of_the_loop_leaves_the_run_to_the_others(store: dist.Store) -> None:
    def fail(step: elastic.Step) -> None:
        raise KeyError("mine")

    raised, found = together(
        lambda: train(join(store, members=2), net(), at=fail),
        lambda: train(join(store, members=2), net()),
    )
    assert isinstance(raised, KeyError)
    assert equal(found, train(join(store, name="alone"), net())), found


def test_another_version_of_torch_is_refused(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = join(store), torch.__version__
    join(store)._runtime.stop()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.raises(NotSupportedError) as raised:
        join(store)
    run._runtime.stop()
    assert f"torch {here} and" in str(raised.value)
    assert "torch 9.9.0 and" in str(raised.value)


@pytest.mark.parametrize(
    ("launch", "message"), [("a", "does not have the state"), ("", "serve a new store")]
)
def test_a_process_that_comes_when_the_run_is_done(
    store: dist.Store, launch: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    train(join(store), net())
    with pytest.raises(RunOverError, match=message) as raised:
        train(join(store), net())
    assert raised.value.code == (0 if launch else 1)


def test_mistakes_are_named(store: dist.Store) -> None:
    with pytest.raises(ArgumentError, match="GRADWIRE_ELASTIC_STORE is not set"):
        elastic.join()
    with pytest.raises(ArgumentError, match="backend is 'mpi'"):
        join(store, backend="mpi")
    with pytest.raises(ArgumentTypeError, match="silence is 3"):
        join(store, silence=3)
    with pytest.raises(ArgumentTypeError, match=r"seed is 1\.0"):
        join(store, seed=1.0)
    with pytest.raises(ArgumentError, match="shards is 6: pass a power of two"):
        join(store, shards=6)
    with pytest.raises(ArgumentTypeError, match="shards is '8'"):
        join(store, shards="8")
    with pytest.raises(ArgumentError, match=r"pass at least 0\.3 s"):
        join(store, silence=timedelta(seconds=0.2))
    run = join(store)
    with pytest.raises(ArgumentError, match=r"run.keep got no model"):
        next(run.steps(1))
    with pytest.raises(ArgumentTypeError, match="x is int: pass an object with state_dict"):
        run.keep(x=3)
    model = nn.Linear(1, 1)
    run.keep(model=model)
    (step,) = [step for step, _ in zip(run.steps(1), range(1), strict=False)]
    del step
    run._runtime.stop()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda step, loss: None, "had no backward|without step.commit"),
        (lambda step, loss: step.commit(), "shard 0 of this step had no backward"),
        (lambda step, loss: [step.backward(loss) for _ in range(2)], "call it once for each"),
        (lambda step, loss: step.commit(3), "3 has no step"),
        (lambda step, loss: step.local(torch.optim.SGD).__enter__(), "use it once for each of"),
        (lambda step, loss: step.sample_ids(elastic.Shard(0, 1)), "got no samples="),
    ],
)
def test_mistakes_in_a_step(
    store: dist.Store, mistake: Callable[[elastic.Step, torch.Tensor], object], message: str
) -> None:
    run = join(store)
    model = nn.Linear(1, 1)
    run.keep(model=model)
    errors = (ReductionError, ArgumentTypeError, ArgumentError)
    step = next(_steps := run.steps(1))
    with pytest.raises(errors, match=message), step:
        mistake(step, model(torch.ones(1, 1)).sum())


def test_step_that_is_lost_repeatedly_is_an_error_on_all_members(store: dist.Store) -> None:
    def member(calls: bool) -> None:
        run = elastic.join(store, members=2, backend="gloo", timeout=timedelta(seconds=1))
        train(run, net(), at=lambda s: calls and s.number == 2 and dist.barrier(run.group))

    for error in together(partial(member, True), partial(member, False)):
        assert isinstance(error, DistributedError)
        assert "step 2 was lost 4 times in a row" in str(error)


def train_locally(run: elastic.Run, model: nn.Module, computed: list[int]) -> list[torch.Tensor]:
    """Take three outer steps of two inner steps; note the shards computed here."""
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    run.keep(model=model, outer=outer)
    for step in run.steps(3, samples=len(X), batch=32):
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                with step.local(partial(torch.optim.AdamW, lr=0.01)) as inner:
                    for part in (ids[:4], ids[4:]):
                        inner.zero_grad()
                        model(X[part]).square().mean().backward()
                        inner.step()
                computed.append(shard.first)
            step.commit(outer)
    return weights(model)


def test_local_steps_are_those_of_diloco(store: dist.Store) -> None:
    computed: list[int] = []
    found = train_locally(join(store, shards=4), net(), computed)
    assert computed == 3 * [0, 1, 2, 3]
    model = net()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    samples = elastic.Samples(len(X), batch=32, shards=4)
    for number in range(3):
        changes = []
        for shard in range(4):
            worker = copy.deepcopy(model)
            inner = torch.optim.AdamW(worker.parameters(), lr=0.01)
            ids = samples.ids(number, elastic.Shard(shard, shard + 1))
            for part in (ids[:4], ids[4:]):
                inner.zero_grad()
                worker(X[part]).square().mean().backward()
                inner.step()
            pairs = zip(model.parameters(), worker.parameters(), strict=True)
            changes.append([(p - w).detach() for p, w in pairs])
        for parameter, *of_shards in zip(model.parameters(), *changes, strict=True):
            parameter.grad = torch.stack(of_shards).mean(dim=0)
        outer.step()
    for mine, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach())


def test_local_steps_have_the_same_bits_with_any_members(store: dist.Store) -> None:
    alone = train_locally(join(dist.HashStore(), shards=4), net(), [])

    def member() -> list[torch.Tensor]:
        return train_locally(join(store, shards=4, members=3, backend="gloo"), net(), [])

    for found in together(member, member, member):
        assert equal(found, alone)


def test_a_repeated_step_computes_only_the_shards_of_the_lost_member(store: dist.Store) -> None:
    alone = train_locally(join(dist.HashStore(), shards=8), net(), [])
    computed: list[list[int]] = [[], [], []]

    def member(number: int) -> list[torch.Tensor]:
        run = join(store, shards=8, members=3, backend="gloo")
        reduce = MemberSteps.reduce

        class Lost(Exception):
            pass

        def lose(steps: MemberSteps) -> None:
            if steps is run._steps and number == 2:
                raise Lost
            reduce(steps)

        model = net()
        try:
            with pytest.MonkeyPatch.context() as patch:
                if number == 2:
                    patch.setattr(MemberSteps, "reduce", lose)
                return train_locally(run, model, computed[number])
        except Lost:
            return []

    first, second, third = together(*(partial(member, number) for number in range(3)))
    assert third == []
    for found in (first, second):
        assert equal(found, alone)
    lost = computed[2]
    assert 2 <= len(lost) <= 3
    # the two others have computed each shard of each step once, also those of the first step
    assert sorted(computed[0] + computed[1]) == sorted(3 * list(range(8)))
    # the step after it is dealt evenly again
    assert sorted([computed[0][-4:], computed[1][-4:]]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_local_steps_of_a_failed_block_leave_the_parameters(store: dist.Store) -> None:
    run, model = join(store, shards=2), net()
    before = weights(model)
    run.keep(model=model)

    def fail(step: elastic.Step) -> None:
        next(step.shards)
        with step.local(partial(torch.optim.SGD, lr=0.1)) as inner:
            model(X).square().mean().backward()
            inner.step()
            raise KeyError("x")

    step = next(_steps := run.steps(1))  # ends the run when it is collected
    with pytest.raises(KeyError), step:
        fail(step)
    assert equal(weights(model), before)


def test_local_steps_without_the_tree(store: dist.Store) -> None:
    run = join(store, shards=1, reproducible=False)
    run.keep(model=DistributedDataParallel(net(), process_group=run.group))
    step = next(_steps := run.steps(1))  # ends the run when it is collected
    next(step.shards)
    refused = pytest.raises(NotSupportedError, match="reproducible=True")
    with refused, step, step.local(partial(torch.optim.SGD, lr=0.1)):
        pass


def train_with_other_parameters(store: dist.Store, number: int, **options: Any) -> int:
    """Train as one of two members, whose parameters differ on member 1."""
    run, model = join(store, members=2, backend="gloo", **options), net()
    apart = 0 if options.get("check_replicas", 1) else 1  # steps after all have one state

    def change(step: elastic.Step) -> None:
        if number == 1 and run.size == 2 and step.number == apart:
            with torch.no_grad():
                next(model.parameters()).add_(1)

    train(run, model, 3, before=change)
    return run.committed_steps


def test_parameters_that_differ_between_members_are_an_error_on_all(store: dist.Store) -> None:
    members = (partial(train_with_other_parameters, store, number) for number in (0, 1))
    for error in together(*members):
        assert isinstance(error, (MismatchError, PeerFailedError))
        assert "parameters differ between members at the beginning of step 0" in str(error)


def test_a_member_lost_before_it_knows_that_parameters_differ_fails_too(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, ended, first = MemberSteps._compare, threading.Event(), []

    def late(self: MemberSteps, digests: Any) -> None:
        if self.runtime.rank == 0:
            first.append(threading.get_ident())
            return compare(self, digests)
        assert ended.wait(20)
        raise PeerLostError("the connection was closed")

    def member(number: int) -> None:
        try:
            train_with_other_parameters(store, number)
        finally:
            if threading.get_ident() in first:
                ended.set()

    monkeypatch.setattr(MemberSteps, "_compare", late)
    errors = together(partial(member, 0), partial(member, 1))
    assert sorted(type(error).__name__ for error in errors) == ["MismatchError", "PeerFailedError"]
    assert all("parameters differ between members" in str(error) for error in errors)


def test_hosts_that_round_differently_may_train_on(store: dist.Store) -> None:
    member = partial(train_with_other_parameters, store, check_replicas=0)
    assert together(partial(member, 0), partial(member, 1)) == [3, 3]
    with pytest.raises(ArgumentError, match="check_replicas is -1"):
        join(store, check_replicas=-1)


def test_a_slow_member_gets_fewer_shards_and_bits_stay(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(join(dist.HashStore(), shards=8), net())
    now = threading.local()

    def clock() -> float:  # each reading is one shard of time after the last: 3 s or 1 s
        now.time = getattr(now, "time", 0.0) + now.speed
        return float(now.time)

    monkeypatch.setattr(shards, "clock", clock)
    counts: list[list[int]] = [[], []]

    def member(number: int) -> list[torch.Tensor]:
        now.speed = (1.0, 3.0)[number]
        run = join(store, shards=8, members=2, backend="gloo")
        return train(run, net(), at=lambda _: counts[number].append(len(run._steps.dealt)))

    for found in together(partial(member, 0), partial(member, 1)):
        assert equal(found, alone)
    # threads join in any order, so that either is the first member
    assert counts == [[4, 6, 6, 6], [4, 2, 2, 2]]


def test_a_member_that_moved_on_ends_the_others_wait(store: dist.Store) -> None:
    """A connection that is lost on one end does not tell the other end."""
    groups: list[dist.ProcessGroup] = []

    def member(number: int) -> int:
        run = elastic.join(store, members=2, backend="gloo")

        def at(step: elastic.Step) -> None:
            if number == 0 and step.number == 1 and not groups:
                groups.append(run.group)  # its connections stay open
                run._runtime.group._cut = None
                raise PeerLostError("a connection was reset")

        train(run, net(), 3, at=at)
        return run.committed_steps

    assert together(partial(member, 0), partial(member, 1)) == [3, 3]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_several_members_receive_the_state_from_several(store: dist.Store, backend: str) -> None:
    came = threading.Event()

    def member(number: int) -> list[torch.Tensor]:
        if number >= 2:
            assert came.wait(30)
        run = join(store, shards=4, members=2, backend=backend)

        def at(step: elastic.Step) -> None:
            if step.number == 2:
                came.set()
            if run.size == 5:
                run.stop()

        return train(run, net(seed=run.number), 10**6, at=at)

    first, *others = together(*(partial(member, number) for number in range(5)))
    assert all(equal(first, found) for found in others)
