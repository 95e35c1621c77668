"""An elastic run: the training loop's side of it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store

from gradwire.ddp import DistributedDataParallel
from gradwire.elastic import checkpoint, transfer
from gradwire.elastic.engine import Engine, Options, barrier, means_a_loss
from gradwire.elastic.gradients import TreeSum
from gradwire.elastic.samples import Samples
from gradwire.elastic.shards import Shard, check_shards, deal
from gradwire.elastic.step import Step, Stepper
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    HookError,
    NotSupportedError,
    ReductionError,
)

__all__ = ["MEMBERS_VARIABLE", "STORE_VARIABLE", "Run", "join"]

STORE_VARIABLE = "GRADWIRE_ELASTIC_STORE"
MEMBERS_VARIABLE = "GRADWIRE_ELASTIC_MEMBERS"
NAME = "run"


def join(
    store: Store | None = None,
    *,
    members: int | None = None,
    backend: str = "shm",
    shards: int = 8,
    reproducible: bool = True,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    heartbeat: timedelta = timedelta(seconds=0.1),
    silence: timedelta = timedelta(seconds=5),
    nan_guard: bool = False,
    name: str = NAME,
) -> Run:
    """Join an elastic run; nobody waits for this process before it begins its steps.

    Args:
        store: A store that no member hosts; None for the one that `python -m gradwire.elastic` or
            the environment variable GRADWIRE_ELASTIC_STORE (host:port) names.
        members: How many processes the first epoch waits for; None for what the launcher says, or
            one.
        backend: "shm", which is Gloo where members are on several hosts; or "gloo".
        shards: Into how many shards a step's batch is cut: a power of two, the same on all members.
        reproducible: Add gradients in one fixed tree over the shards: the same bits whichever
            members there are. Otherwise DistributedDataParallel averages them, with its overlap and
            hooks, and each member runs its shards as one.
        seed: Of random numbers in forward, by step and shard, and of the samples' order.
        timeout: For a collective, for the first members, and for one that runs but does not come.
        heartbeat: Between two signs of life.
        silence: Without one, a member is taken for lost. Dead processes of this host are known at
            once.
        nan_guard: Raise on all members, naming rank, parameter and step, before a gradient that is
            not finite reaches the others.
        name: Of the run, where a store has several.

    Raises:
        ArgumentError: There is no store, or an argument cannot be used.

    Example:
        One process that is alone; the sum of its gradients is that of all shards.

        >>> import torch
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> run = join(dist.HashStore(), shards=2)
        >>> run.keep(model=net, optimizer=optimizer)
        >>> data = torch.arange(8.0).view(8, 1)
        >>> for step in run.steps(3, samples=8, batch=4):
        ...     with step:
        ...         for shard in step.shards:
        ...             step.backward(net(data[step.sample_ids(shard)]).mean())
        ...         step.commit(optimizer)
        >>> run.version, run.size
        (3, 1)
    """
    if backend not in ("shm", "gloo"):
        raise ArgumentError(f"backend is {backend!r}: pass 'shm' or 'gloo'")
    for argument, value in (("timeout", timeout), ("heartbeat", heartbeat), ("silence", silence)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ArgumentTypeError(f"{argument} is {value!r}: pass a positive timedelta")
    if silence < 3 * heartbeat:
        raise ArgumentError(f"silence is {silence}, heartbeat {heartbeat}: pass at least 3 of them")
    if members is None:
        members = int(os.environ.get(MEMBERS_VARIABLE, "1"))
    options = Options(
        members,
        backend,
        timeout.total_seconds(),
        heartbeat.total_seconds(),
        silence.total_seconds(),
    )
    chosen = _store_of_environment(timeout) if store is None else store
    engine = Engine(chosen, name, options)
    return Run(
        engine, check_shards(shards), reproducible=reproducible, seed=seed, nan_guard=nan_guard
    )


def _store_of_environment(timeout: timedelta) -> Store:
    address = os.environ.get(STORE_VARIABLE)
    if address is None:
        raise ArgumentError(
            f"store is None, and {STORE_VARIABLE} is not set: start with "
            "`python -m gradwire.elastic --nproc-per-node N script.py`, or pass a store"
        )
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


class Run:
    """This process's part in an elastic run. Made by `join`."""

    def __init__(
        self, engine: Engine, shards: int, *, reproducible: bool, seed: int, nan_guard: bool
    ) -> None:
        self._engine, self._shards, self._reproducible = engine, shards, reproducible
        self._seed, self._nan_guard = seed, nan_guard
        self._kept: dict[str, Any] = {}
        self._models: list[DistributedDataParallel] = []
        self._modules: list[nn.Module] = []
        self._steppers: tuple[Stepper, ...] = ()
        self._tree: TreeSum | None = None
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._first_values: tuple[int, list[Tensor]] = (-1, [])
        self._start = 0
        self._equal = False
        self._samples: Samples | None = None
        engine.on_commit = self._apply
        engine.on_group = self._on_group
        engine.on_transfer = self._on_transfer

    # -- what can be asked -----------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The group of this epoch; of this process alone before the first step and after the last.

        Each epoch has a new one. Models that are kept get it by themselves.
        """
        return self._engine.process_group

    @property
    def rank(self) -> int:
        """This member's rank in the epoch."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """How many members the epoch has."""
        return self._engine.size

    @property
    def epoch(self) -> int:
        """The number of the epoch; 0 before the first."""
        decision = self._engine.member.decision
        return 0 if decision is None else decision.epoch

    @property
    def number(self) -> int:
        """This process's number, which no other process of the run ever has."""
        return self._engine.member.number

    @property
    def version(self) -> int:
        """How many steps are committed."""
        return self._engine.member.version or self._start

    @property
    def samples(self) -> Samples:
        """What deals the samples.

        Raises:
            ArgumentError: `steps` was not told how many there are.
        """
        if self._samples is None:
            raise ArgumentError("run.steps got no samples=: give the dataset's size, and batch=")
        return self._samples

    @property
    def kept(self) -> Mapping[str, Any]:
        """What `keep` was given."""
        return self._kept

    # -- before the first step -------------------------------------------------------------

    def keep(self, **objects: Any) -> None:
        """Name what makes up the state of training: a new member receives it from another.

        The same names on all members, before the first step. Models, wrapped in
        DistributedDataParallel or not, are trained; optimizers and whatever else has `state_dict`
        and `load_state_dict` come along.

        Raises:
            ArgumentTypeError: One has no `state_dict` or `load_state_dict`.
            ArgumentError: The run has begun.
        """
        if self.epoch:
            raise ArgumentError("run.keep after the first step: call it before run.steps")
        for name, value in objects.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise ArgumentTypeError(
                    f"{name} is {type(value).__name__}: pass what has state_dict and "
                    "load_state_dict"
                )
            self._kept[name] = value
            if isinstance(value, nn.Module):
                self._modules.append(value)
                if self._nan_guard:
                    self._guard(value)
            if isinstance(value, DistributedDataParallel):
                self._models.append(value)

    def _guard(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._check_finite, name))

    def _check_finite(self, name: str, gradient: Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            raise ReductionError(
                f"rank {self.rank} (member {self.number}), step {self.version}: the gradient of "
                f"{name!r} is not finite; nothing of this step was sent",
                [name],
            )

    def start_at(self, version: int) -> None:
        """Say how many steps the state has that was loaded into what is kept: from a checkpoint."""
        if self.epoch or version < 0:
            raise ArgumentError(
                f"run.start_at({version}): call it before run.steps, with 0 or more"
            )
        self._start = version

    # -- steps -----------------------------------------------------------------------------

    def steps(
        self, steps: int, *, samples: int | None = None, batch: int = 64, shuffle: bool = True
    ) -> Iterator[Step]:
        """The steps that are still to be committed, each as often as it takes.

        Args:
            steps: How many there are in the whole run; the same on all members.
            samples: The size of the dataset, if `Step.sample_ids` is used.
            batch: Samples in a step, over all members.
            shuffle: Whether samples come in another order each time the dataset is gone through.

        Raises:
            ArgumentError: Nothing is kept, or the run has begun before.
            RunOverError: The others were done before this process was taken in.
            PeerFailedError: A member wants all to end.
        """
        if self.epoch:
            raise ArgumentError("run.steps was called before: join another run for more steps")
        if not self._modules:
            raise ArgumentError("run.keep got no model: call run.keep(model=..., optimizer=...)")
        if not self._reproducible and not self._models:
            raise ArgumentError(
                "reproducible=False and no DistributedDataParallel in run.keep: wrap the model, "
                "with process_group=run.group"
            )
        self._samples = None
        if samples is not None:
            self._samples = Samples(
                samples, batch=batch, shards=self._shards, seed=self._seed, shuffle=shuffle
            )
        self._engine.start(steps, self._start)
        try:
            while self._engine.advance():
                yield Step(self, self.version, self.shards(), self._samples)
            self._engine.settle()
            self._set_group()
            self._tree = None
        finally:
            self._engine.stop()

    def shards(self) -> list[Shard]:
        """Those that this member runs in this epoch."""
        run = deal(self._shards, self.size)[self.rank]
        if self._reproducible:
            return [Shard(number, number + 1) for number in run]
        return [Shard(run.start, run.stop)]

    def close(self) -> None:
        """Leave the run; the others go on. The end of `steps` does it."""
        self._engine.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of what is kept, between two steps: the epoch's first member does.

        In the format of torch.distributed.checkpoint, as `step-N` in the folder, and as a whole or
        not at all. All may call; the others return at once.
        """
        folder = Path(folder)
        if self.rank == 0:
            return checkpoint.save(self._kept, self.version, folder)
        return checkpoint.path_of(folder, self.version)

    def load(self, folder: str | Path) -> bool:
        """Begin with the checkpoint of the most steps in a folder; whether there is one.

        Before `steps`, on any number of members: who has most steps gives its state to the others.

        Raises:
            ArgumentError: It is of something else, or the run has begun.
        """
        path = checkpoint.latest(Path(folder))
        if path is None:
            return False
        self.start_at(checkpoint.load(self._kept, path))
        return True

    # -- what a step asks for --------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear gradients; put buffers back to their values at the step's beginning."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        for model in self._models:
            model.require_backward_grad_sync = not self._reproducible
            model.require_forward_param_sync = not self._reproducible
        if self._tree is not None:
            self._tree.clear()
        buffers = self._buffers()
        if self._first_values[0] != self.version:
            self._first_values = (self.version, [b.detach().clone() for b in buffers])
        else:
            self._put_buffers_back()

    def begin_shard(self, shard: Shard) -> None:
        """Seed random numbers, and put buffers back."""
        if self._reproducible and shard.first != self.shards()[0].first:
            self._put_buffers_back()
        text = f"{self._seed} {self.version} {shard.first}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))

    def backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        """Compute a shard's gradients and add them."""
        if weight is None and self._tree is None and self._equal:
            loss.backward()  # the mean over members: a weight would cost a look at each gradient
            return
        if weight is None:
            weight = self._count(shard)
        if not math.isfinite(weight) or weight < 0:
            raise ArgumentError(f"weight is {weight}: pass a finite number that is 0 or more")
        if self._tree is None:
            batch = self._shards if self._samples is None else self._samples.batch
            for model in self._models:  # 1 where all have equally many: nothing to multiply
                model.weight(weight * self.size / batch)
            loss.backward()
            return
        if weight:  # of no samples the mean is NaN
            torch.autograd.backward(loss, torch.full_like(loss, weight))
        with torch.no_grad():
            self._tree.add_shard(shard.first, weight)

    def _count(self, shard: Shard) -> int:
        return len(shard) if self._samples is None else self._samples.count(shard)

    def reduce(self) -> None:
        """Make the gradients complete."""
        if self._tree is not None:
            self._changed = self._tree.reduce()

    def commit(self, steppers: tuple[Stepper, ...]) -> None:
        """Commit the step on all members."""
        self._steppers = steppers
        self._engine.commit()

    def end_step(self, error: BaseException | None) -> bool:
        """Whether an error means that a member was lost."""
        assert error is not None
        if means_a_loss(error) or (_may_mean_a_loss(error) and self._engine.was_lost()):
            self._engine.lost()
            return True
        if self._nan_guard and isinstance(error, ReductionError) and error.parameters:
            with contextlib.suppress(DistributedError):
                self._engine.membership.fail(str(error))
        self.close()
        return False

    # -- what the engine asks for ----------------------------------------------------------

    @torch.no_grad()
    def _apply(self) -> None:
        """A step is committed."""
        for buffer, value in self._changed:
            buffer.copy_(value)
        self._changed = []
        for stepper in self._steppers:
            with torch.enable_grad():
                stepper.step()

    def _on_group(self) -> None:
        if not self._reproducible and self.size > self._shards:
            raise NotSupportedError(
                f"{self.size} members and {self._shards} shards: pass elastic.join(shards=...) of "
                "at least as many as there may be members"
            )
        if self._first_values[0] == self.version:  # a step that was lost has changed them
            self._put_buffers_back()
        self._set_group()
        runs = [run for run in deal(self._shards, self.size) if run]
        self._equal = len({self._count(Shard(run.start, run.stop)) for run in runs}) == 1
        if self._reproducible:
            parameters = [p for module in self._modules for p in module.parameters()]
            self._tree = TreeSum(
                parameters, self._buffers(), self._shards, self.group, self._engine.wait
            )

    def _set_group(self) -> None:
        for model in self._models:
            model.process_group = self.group

    def _on_transfer(self, holds: bool) -> None:
        """Send the state, or receive it."""
        group, wait = self.group, self._engine.wait
        data = transfer.exchange(group, transfer.dump(self._kept) if self.rank == 0 else None, wait)
        if not holds:
            transfer.load(self._kept, data)
            self._first_values = (-1, [])
        barrier(self._engine)

    def _buffers(self) -> list[Tensor]:
        return [b for module in self._modules for b in module.buffers() if b.numel()]

    @torch.no_grad()
    def _put_buffers_back(self) -> None:
        for buffer, value in zip(self._buffers(), self._first_values[1], strict=True):
            buffer.copy_(value)


def _may_mean_a_loss(error: BaseException) -> bool:
    """Whether a backend raises such where a member is lost, among other things."""
    kinds = (dist.DistError, HookError, DistributedError)
    return isinstance(error, kinds) or type(error) is RuntimeError
