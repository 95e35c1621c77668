"""Work of this member in a step, called by the step and by the runtime."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire.ddp import digest
from gradwire.elastic import transfer
from gradwire.elastic.generations import let_go, may_mean_a_loss, means_a_loss
from gradwire.elastic.kept import State, Stepper, check_reduced
from gradwire.elastic.runtime import Runtime
from gradwire.elastic.shards import Samples, Shard, Speeds, assign, deal, seed_of
from gradwire.elastic.tree_sum import Contribution, TreeSum, gradient_dtype
from gradwire.errors import ArgumentError, MismatchError, NotSupportedError, ReductionError


@dataclass(frozen=True)
class Settings:
    """Settings of a run, as passed to `join`.

    Args:
        shards: Number of shards of a step.
        reproducible: True to add shards up in a tree, False to average with
            DistributedDataParallel.
        seed: Seed of the run.
        nan_guard: True if a gradient that is not finite ends the run on all members.
        check_replicas: Number of steps between two comparisons of the members' parameters; 0 for
            none.
    """

    shards: int
    reproducible: bool
    seed: int
    nan_guard: bool
    check_replicas: int


class MemberSteps:
    """Steps of a run on this member.

    Args:
        runtime: Runtime that forms generations and commits.
        settings: Settings of the run.

    Attributes:
        state: Kept objects.
        dealt: Shards of this member in this generation.
        samples: Samples of each shard, if `Run.steps` got their number.
        start: Number of steps that were committed before the run.
    """

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime, self._settings = runtime, settings
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
        self._assigned: list[list[int]] = []
        self.dealt: list[Shard] = []
        self._assign([list(run) for run in deal(settings.shards, runtime.size)])
        self._speeds = Speeds(1)
        self._held: dict[int, Contribution] = {}  # results of local steps, for a repeated step
        self._held_step = 0
        self._for_this_step = False  # shards are dealt by the results that members hold
        # False at the beginning of a generation
        self._settled = self._compared = False
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
        return seed_of(self._settings.seed, step, first, use)

    def stop(self) -> None:
        """Ask to stop after the next step whose gradients are reduced."""
        self._asks_to_stop = True

    def _on_done(self) -> None:
        self.state.set_group(self._runtime.process_group)
        self._tree = None

    def _assign(self, assigned: list[list[int]]) -> None:
        """Set the shards of each member."""
        self._assigned = assigned
        own = assigned[self._runtime.rank]
        if self._settings.reproducible:
            self.dealt = [Shard(number, number + 1) for number in own]
        else:
            first = own[0] if own else self._settings.shards
            self.dealt = [Shard(first, first + len(own))]

    # -- called by a step --------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        self._taken = []
        self.state.begin_step(self.committed_steps, sync=not self._settings.reproducible)
        if self._tree is not None and self._tree.fits():
            self._tree.clear()
        elif self._tree is not None:
            self._grow_tree()

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of this member, prepared to be computed."""
        self._settle()
        for shard in self.dealt:
            if shard.first in self._held and self._tree is not None:
                self._tree.add(shard.first, self._tree.copy_of(self._held[shard.first]))
                continue
            self.begin_shard(shard)
            self._speeds.begin()
            yield shard

    def _settle(self) -> None:
        """Agree, in the first step of a generation, on the results that members already hold."""
        if self._settled:
            return
        if self._held_step != self.committed_steps:
            self._held.clear()
        if self._tree is not None and self._runtime.size > 1:
            held = self._tree.gather_held(self._held)
            if any(held):
                self._for_this_step = True
                self._assign(assign(self._settings.shards, held))
                self._tree.assign(self._assigned)
                self._tree.clear()
        self._settled = True

    def begin_shard(self, shard: Shard) -> None:
        """Seed random numbers, and restore buffers."""
        if self._settings.reproducible and shard.first != self.dealt[0].first:
            self.state.put_buffers_back(self.committed_steps)
        self._set_seed(self.seed_of(self.committed_steps, shard.first))

    def backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        """Compute a shard's gradients and add them."""
        self._run_backward(loss, shard, weight)
        self._check_unwritten()
        self._speeds.end()

    @contextlib.contextmanager
    def local(
        self, make: Callable[[list[Parameter]], Optimizer], shard: Shard, weight: float | None
    ) -> Iterator[Optimizer]:
        """Run a shard's local steps in the block, and add the change of the parameters."""
        if self._tree is None:
            raise NotSupportedError("step.local needs elastic.join(reproducible=True)")
        weight = self._check_weight(shard, weight)
        parameters = [p for p in self.state.parameters if p.requires_grad]
        first = [p.detach().clone() for p in parameters]
        try:
            yield make(parameters)
            for parameter, value in zip(parameters, first, strict=True):
                now, dtype = parameter.detach(), gradient_dtype(parameter)
                parameter.grad = None if torch.equal(now, value) else (value - now).to(dtype)
        finally:
            for parameter, value in zip(parameters, first, strict=True):
                parameter.detach().copy_(value)
            self.state.note_versions()
        self._add_shard(shard, weight, hold=self._runtime.size > 1)
        self._speeds.end()

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
        weight = self._check_weight(shard, weight)
        if self._tree is None:
            batch = self._settings.shards if self.samples is None else self.samples.batch
            for model in self.state.models:  # 1 if all have equally many samples: no multiplication
                model.weight(weight * self._runtime.size / batch)
            loss.backward()
            return
        if weight:  # the mean over no samples is NaN
            loss.backward()
        self._add_shard(shard, weight, hold=False)

    @torch.no_grad()
    def _add_shard(self, shard: Shard, weight: float, *, hold: bool) -> None:
        assert self._tree is not None
        # relative to the first shard: equal shards need no multiplication
        found = self._tree.collect(weight / self._count(Shard(0, 1)), apart=hold)
        if hold:
            self._held_step = self.committed_steps
            self._held[shard.first] = self._tree.copy_of(found)
        self._tree.add(shard.first, found)

    def _check_weight(self, shard: Shard, weight: float | None) -> float:
        """Return the weight, by default the number of samples."""
        if weight is None:
            return self._count(shard)
        if not math.isfinite(weight) or weight < 0:
            raise ArgumentError(f"weight is {weight}: pass a finite number of at least 0")
        return weight

    def _count(self, shard: Shard) -> int:
        return len(shard) if self.samples is None else self.samples.count(shard)

    def reduce(self) -> None:
        """Make the gradients complete."""
        self._settle()
        if self._tree is not None:
            own = digest(self.state.parameters) if self._is_time_to_compare() else b""
            changed, notes = self._tree.reduce(self._asks_to_stop, self._speeds.take(), own)
            self._compare(notes.digests)
            self._compared = True
            self._changed, self._stops = changed, notes.stop
            self._speeds.note(notes.seconds, self._counts)
        else:
            self._stops = self._runtime.any(self._asks_to_stop)

    @property
    def _counts(self) -> list[int]:
        return [len(own) for own in self._assigned]

    def _is_time_to_compare(self) -> bool:
        if not self._settings.check_replicas or self._runtime.size == 1:
            return False
        return not self._compared or self.committed_steps % self._settings.check_replicas == 0

    def _compare(self, digests: Sequence[bytes]) -> None:
        """Raise on all members if their parameters differ."""
        if len({*digests}) == 1:
            return
        decision = self._runtime.member.decision
        assert decision is not None
        values = {n: d.hex()[:8] for n, d in zip(decision.members, digests, strict=True)}
        error = MismatchError(
            f"parameters differ between members at the beginning of step {self.committed_steps}: "
            f"digests by member are {values}. Change parameters only in the step() of objects that "
            "are passed to step.commit, alike on all members. On hosts that round differently, "
            "pass elastic.join(check_replicas=0)",
            list(values.values()),
        )
        self._runtime.end_all(error)  # others may lose this member before they have the digests
        raise error

    def commit(self, steppers: tuple[Stepper, ...]) -> None:
        """Commit the step on all members."""
        self.state.warn_of_unkept(steppers)
        self._steppers = steppers
        counts = None if self._tree is None else self._speeds.decide(self._counts)
        self._runtime.commit(stop=self._stops)
        if counts is None and self._for_this_step:
            counts = [len(run) for run in deal(self._settings.shards, self._runtime.size)]
        self._for_this_step = False
        if counts is not None and self._settled and self._tree is not None:
            starts = [sum(counts[:rank]) for rank in range(len(counts))]
            self._assign([list(range(s, s + c)) for s, c in zip(starts, counts, strict=True)])
            self._tree.assign(self._assigned)

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
        if self._settings.nan_guard and isinstance(error, ReductionError) and error.parameters:
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
        self._held.clear()
        for stepper in self._steppers:
            with torch.enable_grad():
                stepper.step()

    def _on_group(self) -> None:
        if not self._settings.reproducible and self._runtime.size > self._settings.shards:
            raise NotSupportedError(
                f"{self._runtime.size} members and {self._settings.shards} shards: pass "
                "elastic.join(shards=...) with at least the largest number of members"
            )
        runs = deal(self._settings.shards, self._runtime.size)
        self._assign([list(run) for run in runs])
        self._settled = self._compared = self._for_this_step = False
        self._speeds = Speeds(self._runtime.size)
        self.state.put_buffers_back(self.committed_steps)  # a step that failed has changed them
        self.state.set_group(self._runtime.process_group)
        runs = [run for run in runs if run]
        self._equal = len({self._count(Shard(run.start, run.stop)) for run in runs}) == 1
        if self._settings.reproducible:
            self._grow_tree()

    def _grow_tree(self) -> None:
        """Build the tree for the current members and trained parameters."""
        self._tree = TreeSum(
            self.state,
            self._settings.shards,
            self._runtime.process_group,
            self._runtime.wait,
            self._assigned,
        )

    def _on_transfer(self, holds: bool) -> None:
        """Send the state, or receive it."""
        group, wait = self._runtime.process_group, self._runtime.wait
        state = self.state
        own = transfer.dump(state.kept, state.beside()) if self._runtime.rank == 0 else None
        data = transfer.exchange(group, own, wait)
        # no member trains on before all have received the state; after a loss here, the member
        # reports its own earlier progress, so its parameters must not have changed
        self._runtime.any(False)
        if not holds:
            state.put_beside(transfer.load(state.kept, data))
            state.forget()
            self._held.clear()  # computed from another state
