"""An elastic run: the training loop's side of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.elastic import checkpoint, transfer
from gradwire.elastic.engine import Engine, barrier
from gradwire.elastic.gradients import TreeSum
from gradwire.elastic.losses import let_go, may_mean_a_loss, means_a_loss
from gradwire.elastic.samples import Samples
from gradwire.elastic.seeding import seed_of
from gradwire.elastic.shards import Shard, deal
from gradwire.elastic.state import State, check_reduced
from gradwire.elastic.step import Step, Stepper
from gradwire.errors import (
    ArgumentError,
    DistributedError,
    NotSupportedError,
    ReductionError,
)

__all__ = ["Run"]


class Run:
    """This process's part in an elastic run. Made by `join`."""

    def __init__(
        self, engine: Engine, shards: int, *, reproducible: bool, seed: int, nan_guard: bool
    ) -> None:
        self._engine, self._shards, self._reproducible = engine, shards, reproducible
        self._seed, self._nan_guard = seed, nan_guard
        # torch.manual_seed takes 0.1 ms and more, for devices that are not there
        devices = torch.accelerator.is_available()
        self._set_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
        self._state = State()
        self._steppers: tuple[Stepper, ...] = ()
        self._tree: TreeSum | None = None
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor | None] = []
        self._averaged: set[int] = set()
        self._start = 0
        self._dealt = self._deal()
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
        return self._state.kept

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
            self._state.keep(name, value)
            if self._nan_guard and isinstance(value, nn.Module):
                self._guard(value)

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
        if not self._state.modules:
            raise ArgumentError("run.keep got no model: call run.keep(model=..., optimizer=...)")
        if not self._reproducible and not self._state.models:
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
            self._state.set_group(self.group)
            self._tree = None
        finally:
            self._engine.stop()

    def seed_of(self, step: int, first: int, use: str = "") -> int:
        """A seed that follows from the run's, a step and its first shard."""
        return seed_of(self._seed, step, first, use)

    def shards(self) -> list[Shard]:
        """Those that this member runs in this epoch."""
        return list(self._dealt)

    def _deal(self) -> list[Shard]:
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
            self._state.put_buffers_back(self.version)  # a step that was lost has changed them
            return checkpoint.save(self._state.kept, self.version, folder)
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
        self.start_at(checkpoint.load(self._state.kept, path))
        return True

    # -- what a step asks for --------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear gradients; put buffers back to their values at the step's beginning."""
        self._taken = []
        self._state.begin_step(self.version, sync=not self._reproducible)
        if self._tree is not None and self._tree.fits():
            self._tree.clear()
        elif self._tree is not None:
            self._grow_tree()

    def begin_shard(self, shard: Shard) -> None:
        """Seed random numbers, and put buffers back."""
        if self._reproducible and shard.first != self._dealt[0].first:
            self._state.put_buffers_back(self.version)
        self._set_seed(self.seed_of(self.version, shard.first))

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
            for model in self._state.models:  # 1 where all have equally many: nothing to multiply
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

    def check_steppers(self, steppers: tuple[Stepper, ...]) -> None:
        """Raise if one is to step by gradients that are this member's alone."""
        if self._tree is not None:
            check_reduced(steppers, self._tree.known)
            return
        try:
            check_reduced(steppers, self._averaged)
        except ReductionError:  # or a model was refitted
            self._averaged = {id(p) for m in self._state.models for p in m.parameters()}
            check_reduced(steppers, self._averaged)

    def end_step(self, error: BaseException | None) -> bool:
        """Whether an error means that a member was lost."""
        assert error is not None
        if means_a_loss(error) or (may_mean_a_loss(error) and self._engine.was_lost()):
            self._engine.lost()
            # the loop may clear them before the round says that this step is committed
            self._taken = self._state.take_gradients()
            let_go(error)
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
        self._state.give_gradients(self._taken)
        self._taken = []
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
        self._dealt = self._deal()
        self._state.put_buffers_back(self.version)  # a step that was lost has changed them
        self._state.set_group(self.group)
        runs = [run for run in deal(self._shards, self.size) if run]
        self._equal = len({self._count(Shard(run.start, run.stop)) for run in runs}) == 1
        if self._reproducible:
            self._grow_tree()

    def _grow_tree(self) -> None:
        """For the epoch's members, and the parameters that are trained now."""
        self._tree = TreeSum(self._state, self._shards, self.group, self._engine.wait)

    def _on_transfer(self, holds: bool) -> None:
        """Send the state, or receive it."""
        group, wait = self.group, self._engine.wait
        state = self._state
        own = transfer.dump(state.kept, state.beside()) if self.rank == 0 else None
        data = transfer.exchange(group, own, wait)
        if not holds:
            state.put_beside(transfer.load(state.kept, data))
            state.forget()
        barrier(self._engine)
