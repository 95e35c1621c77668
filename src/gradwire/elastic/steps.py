"""Step of an elastic run, and the work of this member in it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire._digest import digest
from gradwire.elastic import snapshot
from gradwire.elastic.kept import Kept, Stepper, check_reduced
from gradwire.elastic.runtime import Runtime, let_go, may_mean_a_loss, means_a_loss
from gradwire.elastic.shards import Samples, Shard, Speeds, assign, deal, seed_of
from gradwire.elastic.tree_sum import Contribution, TreeSum, gradient_dtype
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSupportedError,
    ReductionError,
)


class Step:
    """One step: use `with step:` around its forward, backward and commit.

    If a member is lost, the block ends there. The loop's next step is the same one again, or the
    following one if the gradients were complete and the other members have committed the step.

    Args:
        work: Work of this member.
        number: Number of the step.

    Attributes:
        number: Number of the step.
        committed: True if the step was committed within its block.
    """

    def __init__(self, work: MemberSteps, number: int) -> None:
        self.number, self.committed = number, False
        self._work = work
        self._current: Shard | None = None
        self._reduced = False

    @property
    def shards(self) -> Iterator[Shard]:
        """Shards of this member; run forward and backward for each, in this order.

        In a step that is repeated, shards whose `local` steps this member has completed are left
        out.
        """
        self._work.settle()
        for shard in self._work.dealt:
            if not self._work.begin_shard(shard):
                continue
            self._current = shard
            yield shard
            if self._current is not None:
                raise ReductionError(
                    f"{shard} of step {self.number} had no backward: call step.backward(loss), "
                    "or use step.local, once for each of step.shards"
                )

    def sample_ids(self, shard: Shard) -> list[int]:
        """Return the dataset indices of a shard, the same on any member.

        Raises:
            ArgumentError: `Run.steps` did not get the number of samples.
        """
        return self._work.sample_ids(self.number, shard)

    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Compute the gradients of the current shard.

        Args:
            loss: Mean over the shard's samples or tokens.
            weight: Number of these samples or tokens; by default the number of `sample_ids`, or of
                shards.

        Raises:
            ReductionError: There is no current shard, or it had its backward.
            ArgumentTypeError: The loss is not a tensor with one element.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentTypeError(
                f"loss is {loss!r}: pass a tensor with one element, the mean over the shard"
            )
        if (shard := self._current) is None:
            raise ReductionError("step.backward: call it once for each of step.shards")
        self._work.backward(loss, shard, weight)
        self._current = None

    @contextlib.contextmanager
    def local(
        self, make: Callable[[list[Parameter]], Optimizer], *, weight: float | None = None
    ) -> Iterator[Optimizer]:
        """Train on the current shard alone, with an optimizer of its own (DiLoCo's inner steps).

        At the end of the block, the difference between the parameters at its beginning and now is
        the gradient of the shard, in place of `backward`, and the parameters have their values at
        the beginning of the step again. The optimizer passed to `commit` takes the outer step, with
        the mean of these gradients over all shards.

        If another member is lost, the step is repeated; this member keeps the results of its
        shards, and only those of the lost one are computed again. They need memory of the size of
        the parameters for each shard.

        Args:
            make: Function that returns the optimizer of the inner steps for a list of parameters.
                Its state begins anew with each step and shard.
            weight: See `backward`.

        Raises:
            ReductionError: There is no current shard, or it had its backward.
            NotSupportedError: The run has `reproducible=False`.

        Example:
            >>> import torch, torch.distributed as dist
            >>> from gradwire import elastic
            >>> net = torch.nn.Linear(1, 1, bias=False)
            >>> outer = torch.optim.SGD(net.parameters(), lr=1.0)
            >>> torch.nn.init.zeros_(net.weight).requires_grad
            True
            >>> run = elastic.join(dist.HashStore(), shards=2)
            >>> run.keep(model=net, outer=outer)
            >>> for step in run.steps(1):
            ...     with step:
            ...         for shard in step.shards:  # shard 0 goes to -3, shard 1 to -6
            ...             with step.local(lambda p: torch.optim.SGD(p, lr=1.0)) as inner:
            ...                 for _ in range(3):
            ...                     inner.zero_grad()
            ...                     (net(torch.ones(1, 1)).sum() * (1 + shard.first)).backward()
            ...                     inner.step()
            ...         step.commit(outer)
            >>> net.weight.item()
            -4.5

        Source:
            DiLoCo, A. Douillard et al., arXiv 2311.08105.
        """
        if (shard := self._current) is None:
            raise ReductionError("step.local: use it once for each of step.shards")
        work, weight = self._work, self._work.check_weight(shard, weight)
        if not work.settings.reproducible:
            raise NotSupportedError("step.local needs elastic.join(reproducible=True)")
        parameters = [p for p in work.kept.parameters if p.requires_grad]
        first = [p.detach().clone() for p in parameters]
        try:
            yield make(parameters)
            for parameter, value in zip(parameters, first, strict=True):
                now, dtype = parameter.detach(), gradient_dtype(parameter)
                parameter.grad = None if torch.equal(now, value) else (value - now).to(dtype)
        finally:
            for parameter, value in zip(parameters, first, strict=True):
                parameter.detach().copy_(value)
            work.kept.note_versions()
        work.add_shard(shard, weight, hold=work.runtime.size > 1)
        self._current = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients to the mean over all samples, on all members.

        `commit` calls it if the loop did not. Call it to change gradients before the commit, for
        example to clip their norm.
        """
        if not self._reduced:
            self._work.reduce()
            self._reduced = True

    def commit(self, *steppers: Stepper) -> None:
        """Commit the step on all members, and call `step()` of each object once.

        Pass everything that has to advance once per step and not when a step is repeated:
        optimizers, learning rate schedules, counters. If a member is lost meanwhile, `step()` may
        be called after the block has ended.

        An object with a `state_dict` that was not passed to `Run.keep` gives a NotKeptWarning.

        Raises:
            ArgumentTypeError: An object has no `step`.
            ReductionError: A shard had no backward, or an optimizer has a parameter with a gradient
                that belongs to no kept model and was not reduced.
        """
        for stepper in steppers:
            if not callable(getattr(stepper, "step", None)):
                raise ArgumentTypeError(f"{stepper!r} has no step(): pass optimizers or schedules")
        self._work.check_steppers(steppers)
        self.reduce()
        self._work.commit(steppers)
        self.committed = True

    def __enter__(self) -> Step:
        self._work.begin_step()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None and not self.committed:
            error = ReductionError(
                f"step {self.number} ended without step.commit(optimizer): call it last"
            )
            self._work.end_step(error)
            raise error
        return error is not None and self._work.end_step(error)


@dataclass(frozen=True)
class Settings:
    """Settings of a run, as passed to `join`."""

    shards: int  # number of shards of a step
    reproducible: bool  # shards are added in a tree, not averaged by DistributedDataParallel
    seed: int
    nan_guard: bool  # a gradient that is not finite ends the run on all members
    check_replicas: int  # steps between comparisons of the members' parameters; 0 for none


class MemberSteps:
    """Steps of a run on this member."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self.runtime, self.settings = runtime, settings
        # torch.manual_seed takes at least 0.1 ms to look for devices
        devices = torch.accelerator.is_available()
        self._set_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
        self.kept = Kept()
        self.samples: Samples | None = None  # if `Run.steps` got their number
        self.start = 0  # steps that were committed before the run
        # the former: to stop after the next step whose gradients are reduced
        self.asks_to_stop = self._stops = False
        self._steppers: tuple[Stepper, ...] = ()
        self._tree: TreeSum | None = None
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor | None] = []
        self._deal_evenly()
        self._speeds = Speeds(1)
        self._held: dict[int, Contribution] = {}  # results of local steps, for a repeated step
        self._held_step = 0
        self._for_this_step = False  # shards are dealt by the results that members hold
        # False at the beginning of a generation
        self._settled = self._compared = False
        runtime.on_commit = self._apply
        runtime.on_group = self._on_group
        runtime.on_done = self._on_done
        runtime.on_transfer = self._on_transfer

    @property
    def committed_steps(self) -> int:
        """Number of committed steps."""
        return self.runtime.member.committed or self.start

    def sample_ids(self, step: int, shard: Shard) -> list[int]:
        """Return the dataset indices of a shard."""
        if self.samples is None:
            raise ArgumentError("run.steps got no samples=: pass the dataset's size, and batch=")
        return self.samples.ids(step, shard)

    def _assign(self, assigned: list[list[int]]) -> None:
        """Set the shards of each member."""
        self._assigned = assigned
        own = assigned[self.runtime.rank]
        if self.settings.reproducible:
            self.dealt = [Shard(number, number + 1) for number in own]
        else:
            first = own[0] if own else self.settings.shards
            self.dealt = [Shard(first, first + len(own))]
        if self._tree is not None:
            self._tree.assign(assigned)

    def _deal_evenly(self) -> None:
        self._assign([list(run) for run in deal(self.settings.shards, self.runtime.size)])

    # -- called by a step --------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        self._taken = []
        self.kept.begin_step(self.committed_steps, sync=not self.settings.reproducible)
        if self._tree is not None and self._tree.fits():
            self._tree.clear()
        elif self._tree is not None:
            self._grow_tree()

    def settle(self) -> None:
        """Agree, in the first step of a generation, on the results that members already hold."""
        if self._settled:
            return
        if self._held_step != self.committed_steps:
            self._held.clear()
        if self._tree is not None and self.runtime.size > 1:
            held = self._tree.gather_held(self._held)
            if any(held):
                self._for_this_step = True
                self._assign(assign(self.settings.shards, held))
                self._tree.clear()
        self._settled = True

    def begin_shard(self, shard: Shard) -> bool:
        """Seed random numbers, and restore buffers; return False if its result is held."""
        if shard.first in self._held and self._tree is not None:
            self._tree.add(shard.first, self._tree.copy_of(self._held[shard.first]))
            return False
        if self.settings.reproducible and shard.first != self.dealt[0].first:
            self.kept.put_buffers_back(self.committed_steps)
        self._set_seed(seed_of(self.settings.seed, self.committed_steps, shard.first))
        self._speeds.begin()
        return True

    def backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        """Compute a shard's gradients and add them."""
        if self._tree is not None:
            weight = self.check_weight(shard, weight)
            if weight:  # the mean over no samples is NaN
                loss.backward()
            self.add_shard(shard, weight, hold=False)
        else:
            # if all members have equally many samples, the mean over members is right; a weight
            # would cost a pass over the gradients
            if weight is not None or not self._equal:
                batch = self.settings.shards if self.samples is None else self.samples.batch
                share = self.check_weight(shard, weight) * self.runtime.size / batch
                for model in self.kept.models:
                    model.weight(share)
            loss.backward()
            self._speeds.end()
        try:
            self.kept.check_unwritten(self.committed_steps)
        except NotSupportedError as error:
            self.runtime.end_all(error)
            raise

    @torch.no_grad()
    def add_shard(self, shard: Shard, weight: float, *, hold: bool) -> None:
        """Add the gradients of a shard; keep a copy for a repeated step if `hold`."""
        assert self._tree is not None
        # relative to the first shard: equal shards need no multiplication
        found = self._tree.collect(weight / self._count(Shard(0, 1)), apart=hold)
        if hold:
            self._held_step = self.committed_steps
            self._held[shard.first] = self._tree.copy_of(found)
        self._tree.add(shard.first, found)
        self._speeds.end()

    def check_weight(self, shard: Shard, weight: float | None) -> float:
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
        self.settle()
        if self._tree is None:
            self._stops = self.runtime.any(self.asks_to_stop)
            return
        every, own = self.settings.check_replicas, b""
        due = not self._compared or self.committed_steps % max(every, 1) == 0
        if every and due and self.runtime.size > 1:
            own = digest(self.kept.parameters)
        changed, notes = self._tree.reduce(self.asks_to_stop, self._speeds.take(), own)
        self._compare(notes.digests)
        self._compared = True
        self._changed, self._stops = changed, notes.stop
        self._speeds.note(notes.seconds, self._counts)

    @property
    def _counts(self) -> list[int]:
        return [len(own) for own in self._assigned]

    def _compare(self, digests: Sequence[bytes]) -> None:
        """Raise on all members if their parameters differ."""
        if len({*digests}) == 1:
            return
        decision = self.runtime.member.decision
        assert decision is not None
        values = {n: d.hex()[:8] for n, d in zip(decision.members, digests, strict=True)}
        error = MismatchError(
            f"parameters differ between members at the beginning of step {self.committed_steps}: "
            f"digests by member are {values}. Change parameters only in the step() of objects that "
            "are passed to step.commit, alike on all members. On hosts that round differently, "
            "pass elastic.join(check_replicas=0)",
            list(values.values()),
        )
        self.runtime.end_all(error)  # others may lose this member before they have the digests
        raise error

    def check_steppers(self, steppers: tuple[Stepper, ...]) -> None:
        """Raise if an object would step a parameter with a local gradient."""
        by_ddp = {id(p) for model in self.kept.models for p in model.parameters()}
        check_reduced(steppers, by_ddp if self._tree is None else self._tree.known)

    def commit(self, steppers: tuple[Stepper, ...]) -> None:
        """Commit the step on all members."""
        self.kept.warn_of_unkept(steppers)
        self._steppers = steppers
        counts = None if self._tree is None else self._speeds.decide(self._counts)
        self.runtime.commit(stop=self._stops)
        if counts is not None:
            starts = [sum(counts[:rank]) for rank in range(len(counts))]
            self._assign([list(range(s, s + c)) for s, c in zip(starts, counts, strict=True)])
        elif self._for_this_step:
            self._deal_evenly()
        self._for_this_step = False

    def end_step(self, error: BaseException) -> bool:
        """Return True if an error means that a member was lost."""
        if means_a_loss(error) or (may_mean_a_loss(error) and self.runtime.was_lost()):
            self.runtime.lost(error)
            # the loop may clear them before the rendezvous decides to commit this step
            self._taken = self.kept.swap_gradients(repeat(None))
            let_go(error)
            return True
        if self.settings.nan_guard and isinstance(error, ReductionError) and error.parameters:
            self.runtime.end_all(error)
        self.runtime.stop()
        return False

    # -- called by the runtime ----------------------------------------------------------

    @torch.no_grad()
    def _apply(self) -> None:
        """Apply a committed step."""
        self.kept.swap_gradients(self._taken)
        self._taken = []
        for buffer, value in self._changed:
            buffer.copy_(value)
        self._changed = []
        self._held.clear()
        for stepper in self._steppers:
            with torch.enable_grad():
                stepper.step()

    def _on_group(self) -> None:
        shards, size = self.settings.shards, self.runtime.size
        if not self.settings.reproducible and size > shards:
            raise NotSupportedError(
                f"{size} members and {shards} shards: pass elastic.join(shards=...) with at least "
                "the largest number of members"
            )
        self._tree = None
        self._deal_evenly()
        self._settled = self._compared = self._for_this_step = False
        self._speeds = Speeds(size)
        self.kept.put_buffers_back(self.committed_steps)  # a step that failed has changed them
        self.kept.set_group(self.runtime.process_group)
        runs = [Shard(run.start, run.stop) for run in deal(shards, size) if run]
        self._equal = len({self._count(run) for run in runs}) == 1
        if self.settings.reproducible:
            self._grow_tree()

    def _grow_tree(self) -> None:
        """Build the tree for the current members and trained parameters."""
        runtime = self.runtime
        self._tree = TreeSum(
            self.kept, self.settings.shards, runtime.process_group, runtime.wait, self._assigned
        )

    def _on_done(self) -> None:
        self.kept.set_group(self.runtime.process_group)
        self._tree = None

    def _on_transfer(self, holds: bool) -> None:
        """Send the state, or receive it."""
        kept, runtime = self.kept, self.runtime
        own = snapshot.dump(kept.objects, kept.beside()) if runtime.rank == 0 else None
        data = snapshot.exchange(runtime.process_group, own, runtime.wait)
        # no member trains on before all have received the state; after a loss here, the member
        # reports its own earlier progress, so its parameters must not have changed
        runtime.any(False)
        if not holds:
            kept.put_beside(snapshot.take_over(kept.objects, data))
            self._held.clear()  # computed from another state
