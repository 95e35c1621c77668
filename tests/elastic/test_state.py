"""State of training: reduction, restoring of buffers, and transfer to a new member."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import elastic
from gradwire.ddp import DistributedDataParallel
from gradwire.elastic import snapshot
from gradwire.elastic.snapshot import Kept
from gradwire.errors import (
    ArgumentError,
    MismatchError,
    NotKeptWarning,
    NotSupportedError,
    PeerLostError,
    ReductionError,
)

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net() -> nn.Sequential:
    own = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=own)
    return model


def join(**kept: Any) -> elastic.Run:
    run = elastic.join(dist.HashStore(), shards=2)
    run.keep(**kept)
    return run


def backwards(step: elastic.Step, model: nn.Module) -> None:
    for shard in step.shards:
        step.backward(model(X[step.sample_ids(shard)]).square().mean())


def loses(run: elastic.Run, member: bool) -> None:
    """Let the next barrier fail, as if a member had died in it."""
    passes = run._runtime._pass_barrier

    def fail() -> bool:
        run._runtime._pass_barrier = passes  # type: ignore[method-assign]
        raise PeerLostError("a member is gone")

    if member:
        run._runtime._pass_barrier = fail  # type: ignore[method-assign]


def test_what_the_loop_does_after_a_lost_step_is_not_in_its_commit() -> None:
    def train(member: bool, after: Callable[[torch.optim.Optimizer], object]) -> list[Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = join(model=model, optimizer=optimizer)
        lost = []
        for step in run.steps(3, samples=len(X), batch=8):
            loses(run, member and step.number == 1 and not lost)
            with step:
                backwards(step, model)
                step.commit(optimizer)
            if not step.committed:
                lost.append(step.number)
            after(optimizer)
        assert lost == [1] * member
        return [t.clone() for t in model.state_dict().values()]

    expected = train(False, lambda _: None)
    for after in (lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False)):
        assert all(map(torch.equal, train(True, after), expected))


def test_a_checkpoint_after_a_lost_step_has_none_of_it(tmp_path: Path) -> None:
    model = net()
    run = join(model=model)
    for step in run.steps(2, samples=len(X), batch=8):
        with step:
            before = model[1].running_mean.clone()
            backwards(step, model)
            if step.number and not list(tmp_path.iterdir()):
                raise PeerLostError("a member is gone")
            step.commit()
        if not step.committed:
            run.save(tmp_path)
            again = net()
            copy = join(model=again)
            assert copy.load(tmp_path)
            copy._runtime.stop()
            assert torch.equal(again[1].running_mean, before)
    assert run.committed_steps == 2


def test_a_parameter_that_is_thawed_between_steps_has_the_mean() -> None:
    model = net()
    model[0].requires_grad_(False)
    run = join(model=model)
    weight, samples = model[0].weight, elastic.Samples(len(X), batch=8, shards=2)
    for step in run.steps(3, samples=len(X), batch=8):
        model[0].requires_grad_(step.number > 0)
        with step:
            backwards(step, model)
            step.reduce()
            if step.number == 0:
                assert weight.grad is None
            else:
                halves = [samples.ids(step.number, elastic.Shard(i, i + 1)) for i in range(2)]
                losses = [model(X[ids]).square().mean() for ids in halves]
                (expected,) = torch.autograd.grad(sum(losses) / 2, weight)
                torch.testing.assert_close(weight.grad, expected)
            step.commit()


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_gradient_that_is_this_member_s_alone_is_not_stepped_by(reproducible: bool) -> None:
    run = elastic.join(dist.HashStore(), reproducible=reproducible)
    model = nn.Linear(4, 1).double()
    kept = model if reproducible else DistributedDataParallel(model, process_group=run.group)
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    run.keep(model=kept)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def train() -> None:
        for step in run.steps(1, samples=len(X), batch=8):
            with step:
                for shard in step.shards:
                    step.backward((kept(X[step.sample_ids(shard)]) * scale).mean())
                step.commit(optimizer)

    with pytest.raises(ReductionError, match=r"SGD .* shape \(1,\), 2 of its group 0"):
        train()
    assert scale.item() == 1.0


FUSED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def images() -> nn.Module:
    """A model whose parameters are not row-major."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2), nn.Flatten())
    model.to(memory_format=torch.channels_last)
    model.append(nn.Linear(8, 2))
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    return model


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_read_gradients_with_their_parameters_strides(name: str) -> None:
    x = torch.randn(16, 3, 5, 5, generator=torch.Generator().manual_seed(0))[..., :5, :5]
    models = [images(), images()]
    mine, expected = (FUSED[name](model.parameters()) for model in models)
    samples = elastic.Samples(16, batch=8, shards=2)
    for step in join(model=models[0], optimizer=mine).steps(3, samples=16, batch=8):
        with step:
            for shard in step.shards:
                step.backward(models[0](x[step.sample_ids(shard)]).square().mean())
            step.reduce()
            assert [p.grad.stride() for p in models[0].parameters() if p.grad is not None] == [
                p.stride() for p in models[0].parameters()
            ]
            step.commit(mine)
        expected.zero_grad()
        models[1](x[samples.ids(step.number, elastic.Shard(0, 2))]).square().mean().backward()
        expected.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.bfloat16, (257.0, 0.0)),
        (torch.bfloat16, (257.0, 3.0)),
        (torch.float16, (70000.0, 70000.0)),
        (torch.float32, (1e30, 1e30)),
    ],
)
def test_weights_are_not_rounded_to_the_dtype_of_the_loss(
    dtype: torch.dtype, weights: tuple[float, float]
) -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1, bias=False, dtype=dtype)
            self.register_buffer("large", torch.zeros(1, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.large.fill_(30000.0)
            return super().forward(x)

    model = Model()
    for step in join(model=model).steps(1):
        with step:
            for shard in step.shards:
                loss = model(torch.full((1, 1), 3.0, dtype=dtype)).sum()
                step.backward(loss, weight=weights[shard.first])
            step.reduce()
            assert model.weight.grad is not None
            assert model.weight.grad.dtype is dtype
            assert model.weight.grad.item() == pytest.approx(3.0, rel=1e-6)
            step.commit()
    assert model.large.item() == torch.tensor(30000.0, dtype=dtype).item()


class Buffers(nn.Linear):
    """With a mask of the smallest float, a number of forwards, and one that is not saved."""

    def __init__(self, *, grows: bool = False) -> None:
        super().__init__(4, 1, dtype=torch.float64)
        smallest = torch.finfo(torch.float32).min
        self.register_buffer("mask", torch.full((2,), smallest))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.register_buffer("history", torch.zeros(0))
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        self.unsaved += 1
        if self.grows:
            self.history = torch.zeros(3)
        return super().forward(x)


def test_a_buffer_that_no_shard_changes_stays_as_it_is() -> None:
    model = Buffers()
    run = join(model=model)
    for step in run.steps(1, samples=len(X), batch=8, shuffle=False):
        with step:
            backwards(step, model)
            step.commit()
    assert model.mask.tolist() == [torch.finfo(torch.float32).min] * 2
    assert model.seen.item() == pytest.approx(float(X[:8].sum() / 2))


def test_buffers_of_another_shape_are_named() -> None:
    model = Buffers(grows=True)
    run = join(model=model)
    step = next(_steps := run.steps(1, samples=len(X), batch=8))
    with pytest.raises(NotSupportedError, match=r"to \[\(2,\), \(\), \(\), \(3,\)\]"), step:
        backwards(step, model)


def state_of(model: nn.Module, **others: Any) -> Kept:
    state = Kept()
    for name, value in {"model": model, **others}.items():
        state.keep(name, value)
    return state


def test_a_new_member_gets_what_a_state_dict_leaves_out() -> None:
    source, target = Buffers(), Buffers()
    source.unsaved += 5
    source.weight.requires_grad_(False)
    sends, receives = state_of(source), state_of(target)
    data = snapshot.dump(sends.objects, sends.beside())
    receives.put_beside(snapshot.take_over(receives.objects, data))
    assert target.unsaved.item() == 5
    assert [p.requires_grad for p in target.parameters()] == [False, True]
    with pytest.raises(MismatchError, match=r"of \[\(\(\), torch.float32\)\] here, but 6 and \[\]"):
        receives.put_beside(state_of(net()).beside())


class Precise(torch.optim.Optimizer):
    """Plain steps of parameters of any dtype, with a copy of them in single precision."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"master": p.detach().float() + 1e-4, "nested": [{"m": p.float()}]}


def test_a_new_member_gets_an_optimizer_s_state_in_its_dtypes(tmp_path: Path) -> None:
    """`Optimizer.load_state_dict` casts it to the parameters' dtypes."""

    def built(value: float) -> Kept:
        model = nn.Conv2d(2, 3, 2, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, value)
        model.to(memory_format=torch.channels_last if value else torch.contiguous_format)
        return state_of(model, optimizer=Precise(model.parameters()))

    first, second, third = built(1.0), built(0.0), built(0.0)
    snapshot.take_over(second.objects, snapshot.dump(first.objects))
    snapshot.load(third.objects, snapshot.save(first.objects, 1, tmp_path))
    for state in (second, third):
        for one, other in zip(first.parameters, state.parameters, strict=True):
            mine, found = (
                first.objects["optimizer"].state[one],
                state.objects["optimizer"].state[other],
            )
            assert found["master"].dtype is found["nested"][0]["m"].dtype is torch.float32
            assert torch.equal(found["master"], mine["master"])
            assert found["master"].stride() == other.stride()  # members' strides may differ


class Values:
    """An object whose state is any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def received(kept: dict[str, Any], onto: dict[str, Any]) -> None:
    """Send a state from one member to another; both are threads."""
    store = dist.HashStore()

    def member(rank: int) -> None:
        prefixed = dist.PrefixStore("transfer", store)
        group = dist.ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=20))
        own = snapshot.dump(kept) if rank == 0 else None
        data = snapshot.exchange(group, own, lambda work: work.wait())
        if rank == 1:
            snapshot.take_over(onto, data)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(member, rank) for rank in range(2)]:
            done.result(30)


def test_large_tensors_arrive_as_they_are() -> None:
    x = torch.randn(2, 64, 32, 32)
    values = {
        "strided": x.to(memory_format=torch.channels_last),
        "part": x[:, ::2],
        "conjugate": torch.complex(x, -x).conj(),
        "mask": x > 0,
        "half": x.bfloat16(),
        "numbers": [(x.long(), 3), "text"],
        "small": torch.arange(3),
    }
    ours = Values(None)
    received({"v": Values(values)}, {"v": ours})
    assert [v.dtype for v in map(values.get, ("mask", "half"))] == [
        ours.value["mask"].dtype,
        ours.value["half"].dtype,
    ]
    for name in ("strided", "part", "conjugate", "mask", "half", "small"):
        assert torch.equal(ours.value[name], values[name])
    assert torch.equal(ours.value["numbers"][0][0], x.long())
    assert ours.value["numbers"][1] == "text"


def test_a_model_of_another_dtype_is_named() -> None:
    first, second = state_of(nn.Linear(2, 1)), state_of(nn.Linear(2, 1).bfloat16())
    with pytest.raises(MismatchError, match=r"model\.(weight|bias) is torch.bfloat16 here, but"):
        snapshot.take_over(second.objects, snapshot.dump(first.objects))


class Training:
    """Has a schedule, or several, and their state with others."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nobody joins here."""


@pytest.mark.parametrize("held", [lambda x: x, lambda x: [x], lambda x: {"schedule": x}])
def test_a_state_that_is_stepped_and_not_kept(held: Callable[[Any], Any]) -> None:
    """A member that joins later would step by another learning rate, without a word."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = join(model=model, optimizer=optimizer, training=Training(held(schedule)))
    other = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for step in run.steps(3, samples=len(X), batch=8):
        with step:
            backwards(step, model)
            if step.number == 1:
                with pytest.warns(NotKeptWarning, match=r"run.keep\(constantlr=...\)") as warned:
                    step.commit(optimizer, schedule, other)
                assert [w.filename for w in warned] == [__file__]
            else:
                step.commit(optimizer, schedule, *[other] * step.number)


def test_a_run_saves_nothing_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    """It returned the path of the other run's checkpoint, and had saved nothing."""

    def train(*, loads: bool) -> Path:
        model = net()
        run = join(model=model)
        assert not loads or run.load(tmp_path)
        for step in run.steps(2, samples=len(X), batch=8):
            with step:
                backwards(step, model)
                step.commit()
        return run.save(tmp_path, keep=1)

    path = train(loads=False)
    with pytest.raises(ArgumentError, match="has step-000000002 of another training"):
        train(loads=False)
    assert train(loads=True) == path
