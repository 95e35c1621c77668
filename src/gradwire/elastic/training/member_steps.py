"""Work of this member in a step, called by the step and by the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.elastic.members import Runtime, barrier, let_go, may_mean_a_loss, means_a_loss
from gradwire.elastic.training import transfer
from gradwire.elastic.training.gradients import TreeSum
from gradwire.elastic.training.samples import Samples, Shard, deal
from gradwire.elastic.training.seeding import seed_of
from gradwire.elastic.training.state import State, check_reduced
from gradwire.elastic.training.step import Stepper
from gradwire.errors import ArgumentError, NotSupportedError, ReductionError


class MemberSteps:
    """Steps of a run on this member; a `StepRunner`.

    Args:
        runtime: Runtime that forms generations and commits.
        shards: Number of shards of a step.
        reproducible: True to add shards up in a tree, False to average with
            DistributedDataParallel.
        seed: Seed of the run.
        nan_guard: True if a gradient that is not finite ends the run on all members.

    Attributes:
        state: Kept objects.
        dealt: Shards of this member in this generation.
        samples: Samples of each shard, if `Run.steps` got their number.
        start: Number of steps that were committed before the run.
    """

    def __init__(
        self, runtime: Runtime, shards: int, *, reproducible: bool, seed: int, nan_guard: bool
    ) -> None:
        self._runtime, self._shards, self._reproducible = runtime, shards, reproducible
        self._seed, self._nan_guard = seed, nan_guard
        # torch.manual_seed takes at least 0.1 ms to look for devices
        devices = torch.accelerator.is_available()
        self._set_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
        self.state = State()
        self.samples: Samples | None = None
        self.start = 0
        self._steppers: tuple[Stepper, ...] = ()
        self._tree: TreeSum | None = None
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._asks_to_stop = self._stops = False
        self._taken: list[Tensor | None] = []
        self._averaged: set[int] = set()
        self.dealt = self._deal()
        self._equal = False
        runtime.on_commit = self._apply
        runtime.on_group = self._on_group
        runtime.on_done = self._on_done
        runtime.on_transfer = self._on_transfer

    @property
    def committed_steps(self) -> int:
        """Number of committed steps."""
        return self._runtime.member.committed or self.start

    def seed_of(self, step: int, first: int, use: str = "") -> int:
        """Return the seed of a step and its first shard."""
        return seed_of(self._seed, step, first, use)

    def stop(self) -> None:
        """Ask to stop after the next step whose gradients are reduced."""
        self._asks_to_stop = True

    def _on_done(self) -> None:
        self.state.set_group(self._runtime.process_group)
        self._tree = None

    def _deal(self) -> list[Shard]:
        run = deal(self._shards, self._runtime.size)[self._runtime.rank]
        if self._reproducible:
            return [Shard(number, number + 1) for number in run]
        return [Shard(run.start, run.stop)]

    # -- called by a step --------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        self._taken = []
        self.state.begin_step(self.committed_steps, sync=not self._reproducible)
        if self._tree is not None and self._tree.fits():
            self._tree.clear()
        elif self._tree is not None:
            self._grow_tree()

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call a function with each item, divided among the members."""
        runtime, step = self._runtime, self.committed_steps
        self._check_unwritten()
        self.state.begin_step(step, sync=False)
        results = []
        for index in deal(len(items), runtime.size)[runtime.rank]:
            self._set_seed(self.seed_of(step, index, "map"))
            with torch.no_grad():
                results.append(function(items[index]))
            self.state.put_buffers_back(step)
        self._check_unwritten()
        self.state.begin_step(step, sync=not self._reproducible)
        return transfer.gather(runtime.process_group, results, runtime.wait)

    def begin_shard(self, shard: Shard) -> None:
        """Seed random numbers, and restore buffers."""
        if self._reproducible and shard.first != self.dealt[0].first:
            self.state.put_buffers_back(self.committed_steps)
        self._set_seed(self.seed_of(self.committed_steps, shard.first))

    def backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        """Compute a shard's gradients and add them."""
        self._run_backward(loss, shard, weight)
        self._check_unwritten()

    def _check_unwritten(self) -> None:
        try:
            self.state.check_unwritten(self.committed_steps)
        except NotSupportedError as error:
            self._runtime.end_all(error)
            raise

    def _run_backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        if weight is None and self._tree is None and self._equal:
            # the mean over members is right; a weight would cost a pass over the gradients
            loss.backward()
            return
        if weight is None:
            weight = self._count(shard)
        if not math.isfinite(weight) or weight < 0:
            raise ArgumentError(f"weight is {weight}: pass a finite number of at least 0")
        if self._tree is None:
            batch = self._shards if self.samples is None else self.samples.batch
            for model in self.state.models:  # 1 if all have equally many samples: no multiplication
                model.weight(weight * self._runtime.size / batch)
            loss.backward()
            return
        if weight:  # the mean over no samples is NaN
            loss.backward()
        with torch.no_grad():
            # relative to the first shard: equal shards need no multiplication
            self._tree.add_shard(shard.first, weight / self._count(Shard(0, 1)))

    def _count(self, shard: Shard) -> int:
        return len(shard) if self.samples is None else self.samples.count(shard)

    def reduce(self) -> None:
        """Make the gradients complete."""
        if self._tree is not None:
            self._changed, self._stops = self._tree.reduce(self._asks_to_stop)
        else:
            self._stops = self._runtime.any(self._asks_to_stop)

    def commit(self, steppers: tuple[Stepper, ...]) -> None:
        """Commit the step on all members."""
        self.state.warn_of_unkept(steppers)
        self._steppers = steppers
        self._runtime.commit(stop=self._stops)

    def check_steppers(self, steppers: tuple[Stepper, ...]) -> None:
        """Raise if an object would step a parameter with a local gradient."""
        if self._tree is not None:
            check_reduced(steppers, self._tree.known)
            return
        try:
            check_reduced(steppers, self._averaged)
        except ReductionError:  # or the parameters of a model were replaced
            self._averaged = {id(p) for m in self.state.models for p in m.parameters()}
            check_reduced(steppers, self._averaged)

    def end_step(self, error: BaseException | None) -> bool:
        """Return True if an error means that a member was lost."""
        assert error is not None
        if means_a_loss(error) or (may_mean_a_loss(error) and self._runtime.was_lost()):
            self._runtime.lost(error)
            # the loop may clear them before the rendezvous decides to commit this step
            self._taken = self.state.take_gradients()
            let_go(error)
            return True
        if self._nan_guard and isinstance(error, ReductionError) and error.parameters:
            self._runtime.end_all(error)
        self._runtime.stop()
        return False

    # -- called by the runtime ----------------------------------------------------------

    @torch.no_grad()
    def _apply(self) -> None:
        """Apply a committed step."""
        self.state.give_gradients(self._taken)
        self._taken = []
        for buffer, value in self._changed:
            buffer.copy_(value)
        self._changed = []
        for stepper in self._steppers:
            with torch.enable_grad():
                stepper.step()

    def _on_group(self) -> None:
        if not self._reproducible and self._runtime.size > self._shards:
            raise NotSupportedError(
                f"{self._runtime.size} members and {self._shards} shards: pass "
                "elastic.join(shards=...) with at least the largest number of members"
            )
        self.dealt = self._deal()
        self.state.put_buffers_back(self.committed_steps)  # a step that failed has changed them
        self.state.set_group(self._runtime.process_group)
        runs = [run for run in deal(self._shards, self._runtime.size) if run]
        self._equal = len({self._count(Shard(run.start, run.stop)) for run in runs}) == 1
        if self._reproducible:
            self._grow_tree()

    def _grow_tree(self) -> None:
        """Build the tree for the current members and trained parameters."""
        self._tree = TreeSum(
            self.state, self._shards, self._runtime.process_group, self._runtime.wait
        )

    def _on_transfer(self, holds: bool) -> None:
        """Send the state, or receive it."""
        group, wait = self._runtime.process_group, self._runtime.wait
        state = self.state
        own = transfer.dump(state.kept, state.beside()) if self._runtime.rank == 0 else None
        data = transfer.exchange(group, own, wait)
        if not holds:
            state.put_beside(transfer.load(state.kept, data))
            state.forget()
        barrier(self._runtime)
