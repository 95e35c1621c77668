"""An elastic run on this member: `join`, the loop over steps, and the work in each."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire._digest import digest
from gradwire._groups import mark_temporary
from gradwire.elastic import snapshot
from gradwire.elastic.membership import BEAT_SECONDS, members_of_environment, store_of_environment
from gradwire.elastic.protocol import Phase
from gradwire.elastic.runtime import Runtime, let_go, may_mean_a_loss, means_a_loss
from gradwire.elastic.shards import Samples, Shard, Speeds, assign, check_shards, deal, seed_of
from gradwire.elastic.snapshot import Kept, Stepper
from gradwire.elastic.supervisor import end_with_reports, report
from gradwire.elastic.tree_sum import Contribution, TreeSum, gradient_dtype
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSupportedError,
    ReductionError,
    require_linux,
)


def join(
    store: Store | None = None,
    *,
    members: int | None = None,
    backend: str = "shm",
    shards: int = 8,
    reproducible: bool = True,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    silence: timedelta = timedelta(seconds=5),
    nan_guard: bool = False,
    check_replicas: int = 100,
    name: str = "run",
) -> Run:
    """Join an elastic run.

    Other members do not wait for this process before it begins its steps.

    Args:
        store: Store that no member hosts; None for the one that `python -m gradwire.elastic` or the
            environment variable GRADWIRE_ELASTIC_STORE (host:port) names.
        members: Number of processes that the first generation waits for; None for the launcher's
            number, or 1.
        backend: "shm", which falls back to Gloo if members are on several hosts, or "gloo".
        shards: Number of shards of a step's batch: a power of two, the same on all members.
        reproducible: True to add gradients in one fixed tree over the shards, which gives the same
            bits with any members. False to let DistributedDataParallel average them, with its
            overlap and hooks; each member then runs its shards as one.
        seed: Seed of random numbers in forward, by step and shard, and of the order of samples.
        timeout: Timeout of a collective, of the wait for the first members, and of the wait for a
            member that is alive but does not come.
        silence: Time without a sign of life after which a member counts as lost. Dead processes of
            this host are noticed at once.
        nan_guard: True to raise on all members, naming rank, parameter and step, before a gradient
            or a change by `Step.local` that is not finite reaches the others, and before a sum of
            them that is too large is committed.
        check_replicas: Number of steps between two comparisons of the members' parameters, which
            are also compared when the members change; 0 for none, for hosts that round differently.
        name: Name of the run, for a store with several runs.

    Raises:
        ArgumentError: There is no store, or an argument is invalid.
        NotSupportedError: This is not Linux, or this process has another version of PyTorch or
            gradwire than the run, or runs as another user than members that would share its memory.
        DistributedError: The store does not answer.

    Example:
        A single process; its gradients are the sum over all shards.

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
        >>> run.committed_steps, run.size
        (3, 1)
    """
    require_linux("elastic.join")
    if backend not in ("shm", "gloo"):
        raise ArgumentError(f"backend is {backend!r}: pass 'shm' or 'gloo'")
    for argument, value in (("timeout", timeout), ("silence", silence)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ArgumentTypeError(f"{argument} is {value!r}: pass a positive timedelta")
    if silence.total_seconds() < 3 * BEAT_SECONDS:
        raise ArgumentError(f"silence is {silence}: pass at least {3 * BEAT_SECONDS:g} s")
    if check_replicas < 0:
        raise ArgumentError(f"check_replicas is {check_replicas}: pass a number of steps, or 0")
    if isinstance(seed, bool) or not isinstance(seed, int):  # 1 and 1.0 give other orders
        raise ArgumentTypeError(f"seed is {seed!r}: pass an int")
    settings = Settings(check_shards(shards), reproducible, seed, nan_guard, check_replicas)
    expect = members_of_environment() if members is None else members
    runtime = Runtime(
        store_of_environment(timeout) if store is None else store,
        name,
        expect=expect,
        backend=backend,
        timeout=timeout.total_seconds(),
        silence=silence.total_seconds(),
    )
    run = Run(runtime, settings)
    report(finished=False, member=run.number)  # a previous run of this process may have finished
    known = weakref.ref(run)
    end_with_reports(
        run.number, lambda: None if (found := known()) is None else found.committed_steps
    )
    return run


class Run:
    """This process's part in an elastic run. Use `join` to create it."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime, self._settings = runtime, settings
        self._steps = MemberSteps(runtime, settings)
        self._kept = self._steps.kept
        # arguments that the order of samples depends on, as given or loaded; empty if unknown
        self._order: dict[str, Any] = {}
        self._has_ended = False  # the loop over steps

    # -- properties -----------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """Process group of this generation.

        Before the first step and after the last one, it is a group of this process alone.
        Each generation has a new one, which is set on kept models. Use it within a step: between
        two steps, members do not recover from the loss of another.

        Raises:
            NotSupportedError: The generation has ended, and the next step has not begun.
        """
        group = self._runtime.process_group
        mark_temporary(group)
        return group

    @property
    def rank(self) -> int:
        """Rank of this member in the generation."""
        return self._runtime.rank

    @property
    def size(self) -> int:
        """Number of members of the generation."""
        return self._runtime.size

    @property
    def generation(self) -> int:
        """Number of the generation; 0 before the first."""
        decision = self._runtime.member.decision
        return 0 if decision is None else decision.generation

    @property
    def number(self) -> int:
        """Number of this process, unique within the run."""
        return self._runtime.member.number

    @property
    def committed_steps(self) -> int:
        """Number of committed steps."""
        return self._steps.committed_steps

    # -- before the first step -------------------------------------------------------------

    def keep(self, **objects: Any) -> None:
        """Declare the state of training, which a new member receives from another.

        Pass the same names on all members, before the first step. Models, wrapped in
        DistributedDataParallel or not, are trained; optimizers and other objects with `state_dict`
        and `load_state_dict` are transferred.

        Raises:
            ArgumentTypeError: An object has no `state_dict` or `load_state_dict`.
            ArgumentError: The run has begun.
        """
        self._check_not_begun("run.keep")
        for name, value in objects.items():
            self._kept.keep(name, value)

    def _check_not_begun(self, call: str) -> None:
        if self.generation:
            raise ArgumentError(f"{call} was called after the first step: call it before run.steps")

    # -- steps -----------------------------------------------------------------------------

    def steps(
        self, steps: int, *, samples: int | None = None, batch: int = 64, shuffle: bool = True
    ) -> Iterator[Step]:
        """Yield the steps that are still to be committed, each as often as necessary.

        Args:
            steps: Number of steps in the whole run, the same on all members.
            samples: Size of the dataset, if `Step.sample_ids` is used.
            batch: Number of samples in a step, over all members.
            shuffle: True for another order of samples in each pass over the dataset.

        Raises:
            ArgumentError: No model is kept, the run has begun before, or the loaded checkpoint was
                saved with another `samples`, `batch`, `shuffle` or `seed`.
            RunOverError: The other members finished before this process was admitted, or while it
                showed no sign of life.
            PeerFailedError: A member asked all to raise an error.
            MismatchError: A member has other arguments, here or of `join`. It is raised on all
                members before the first generation, and later on the newcomer.
        """
        if self.generation:
            raise ArgumentError("run.steps was called before: join another run to do more steps")
        if not self._kept.parameters:
            raise ArgumentError("run.keep got no model: call run.keep(model=..., optimizer=...)")
        if not self._settings.reproducible and not self._kept.models:
            raise ArgumentError(
                "reproducible=False needs a DistributedDataParallel in run.keep: wrap the model, "
                "with process_group=run.group"
            )
        order: dict[str, Any] = {}
        if samples is not None:
            order = {"batch": batch, "shuffle": shuffle, "seed": self._settings.seed}
            self._steps.samples = Samples(samples, shards=self._settings.shards, **order)
            order["samples"] = samples
            if not shuffle:
                del order["seed"]
        for name, value in order.items():
            if (loaded := self._order.get(name, value)) != value:
                raise ArgumentError(
                    f"{name} is {value!r}, but {loaded!r} in the loaded checkpoint: the next steps "
                    "would skip and repeat samples. Pass the same value, or choose samples in the "
                    "loop, without samples="
                )
        self._order = order
        settings = {**asdict(self._settings), **order, "steps": steps, "samples": samples}
        settings["keep"] = sorted(self._kept.objects)
        try:
            self._runtime.start(steps, self._steps.start, settings)
            while self._runtime.advance():
                self._steps.offered = self.committed_steps
                yield Step(self._steps, self.committed_steps)
        finally:
            self._steps.offered, self._has_ended = None, True
            self._runtime.stop()

    def stop(self) -> None:
        """Ask to end the run; all members stop after the same step.

        That is the next step whose gradients are reduced: called within its block, before
        `Step.reduce` and `Step.commit`, the current step. If all members call it in the same step
        because of values that all have, it is that step whichever members are lost. If a single
        member calls it, for example on a signal, the request is lost when that member is lost
        before its gradients are reduced.
        """
        self._steps.asks_to_stop = True

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint of the kept objects between two steps, on the first member.

        The format is that of torch.distributed.checkpoint. The checkpoint `step-N` in the folder is
        complete or does not exist. All members may call `save`; the others return at once, and do
        not see an error. If the loop does not handle the error, the first member ends, and another
        one writes at the next call. After the loop, each member in turn writes the checkpoint
        unless another has written it, so that it is there if any member lives.

        Args:
            folder: Folder for the checkpoints of this training only.
            keep: Number of checkpoints to keep, the last ones; None for all.

        Raises:
            ArgumentError: The folder has a checkpoint of as many steps or more of another training
                that was not loaded with `load`.
            CheckpointError: Writing failed, for example on a full disk; no partial files are left.
        """
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ArgumentError(f"keep is {keep!r}: pass an int above 0, or None to keep all")
        folder, step, kept = Path(folder), self.committed_steps, self._kept
        over = self._runtime.member.phase is Phase.OVER  # its state is not that of the run
        if over or (self.rank != 0 and not self._has_ended):
            return snapshot.path_of(folder, step)
        kept.put_buffers_back(step)  # a failed step may have changed them
        return snapshot.save(
            kept.objects, step, folder, lineage=kept.lineage, keep=keep, order=self._order
        )

    def load(self, folder: str | Path) -> bool:
        """Load the checkpoint with the most steps in a folder; return False if there is none.

        Call it before `steps`, on any number of members: the member with the most steps sends its
        state to the others.

        Raises:
            ArgumentError: The checkpoint holds other objects, or the run has begun.
            CheckpointError: The checkpoint is damaged; the message names the last one that is not.
        """
        self._check_not_begun("run.load")
        path = snapshot.latest(Path(folder))
        if path is None:
            return False
        self._steps.start, self._order = snapshot.load(self._kept.objects, path)
        self._kept.lineage = snapshot.lineage_of(path)
        return True


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
            NotSupportedError: The run has `reproducible=False`, or a frozen parameter has changed.

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
        first = [(name, p, p.detach().clone()) for name, p in work.kept.trained()]
        frozen = work.kept.digests_of_frozen()
        try:
            yield make([p for _, p, _ in first])
            work.check_unwritten(frozen, work.kept.digests_of_frozen())
            for name, parameter, value in first:
                change, parameter.grad = value - parameter.detach(), None
                if weight and change.count_nonzero():  # one that counts nothing may be NaN
                    parameter.grad = change.to(gradient_dtype(parameter))
                    if work.settings.nan_guard:
                        work.check_finite(name, parameter.grad)
        finally:
            for _, parameter, value in first:
                parameter.detach().copy_(value)
            work.versions = work.kept.versions()
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
        self._work.begin_step(self.number)
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
        self.offered: int | None = None  # the step whose block comes next
        self.versions: dict[str, object] = {}  # of the parameters at the beginning of the step
        self._steppers: tuple[Stepper, ...] = ()
        self._tree: TreeSum | None = None
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor | None] = []
        self._deal_evenly()
        self._speeds = Speeds(1)
        self._held: dict[int, Contribution] = {}  # results of local steps, for a repeated step
        self._held_step = 0
        self._guarded: set[str] = set()  # parameters whose gradients are checked in backward
        # False at the beginning of a generation; the first: shards are dealt by the results held
        self._for_this_step = self._settled = self._compared = False
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
        self._assigned, self._counts = assigned, [len(own) for own in assigned]
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

    def begin_step(self, number: int) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        if self.offered != number:
            raise ReductionError(
                f"step {number} is not the current one: begin each step of run.steps once, and "
                "keep what run.steps returned until the last one, as a for loop does"
            )
        self.offered, self._taken = None, []
        self.kept.begin_step(number, sync=not self.settings.reproducible)
        self.versions = self.kept.versions()
        if self.settings.nan_guard:
            for name, parameter in self.kept.trained():
                if name not in self._guarded:
                    self._guarded.add(name)
                    parameter.register_hook(partial(self.check_finite, name))
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
        self.check_unwritten(self.versions, self.kept.versions())

    def check_unwritten(self, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        """Raise on all members if a parameter was written to, by its values before and now."""
        for name in (name for name, value in before.items() if now.get(name, value) != value):
            error = NotSupportedError(
                f"parameter {name!r} was written to within step {self.committed_steps}, as by the "
                "forward of Embedding(max_norm=): members run different shards, so that its values "
                "would diverge. Write to parameters once per step, in the step() of an object that "
                "is passed to step.commit after the optimizer"
            )
            self.runtime.end_all(error)
            raise error

    def check_finite(self, name: str, gradient: Tensor, *, of_shard: bool = True) -> None:
        """Raise if a gradient is not finite."""
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if bool(values.isfinite().all()):
            return
        whose, more = "", "that of each shard is, but their sum is too large"  # no member's fault
        if of_shard:
            whose = f"rank {self.runtime.rank} (member {self.runtime.member.number}), "
            more = "it was not sent to other members"
        text = f"step {self.committed_steps}: the gradient of {name!r} is not finite"
        raise ReductionError(f"{whose}{text}; {more}", [name])

    @torch.no_grad()
    def add_shard(self, shard: Shard, weight: float, *, hold: bool) -> None:
        """Add the gradients of a shard; keep a copy for a repeated step if `hold`."""
        assert self._tree is not None
        # relative to the first shard: equal shards need no multiplication
        found = self._tree.collect(weight / self._count(Shard(0, 1)))
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
        if self.settings.nan_guard:  # sums of finite gradients may overflow, alike on all members
            for name, parameter in self.kept.trained():
                if parameter.grad is not None:
                    self.check_finite(name, parameter.grad, of_shard=False)
        self._speeds.note(notes.seconds, self._counts)

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
        """Raise if an optimizer would step a parameter whose gradient was not reduced."""
        # otherwise the parameters of the members would silently diverge
        by_ddp = {id(p) for model in self.kept.models for p in model.parameters()}
        reduced = by_ddp if self._tree is None else self._tree.known
        for stepper in steppers:
            for number, group in enumerate(getattr(stepper, "param_groups", ())):
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is not None and id(parameter) not in reduced:
                        raise ReductionError(
                            f"{type(stepper).__name__} steps a parameter of shape "
                            f"{tuple(parameter.shape)}, {index} of its group {number}, whose "
                            "gradient was not reduced over the members: before run.steps, pass "
                            "run.keep a model that has it (with reproducible=False in "
                            "DistributedDataParallel); freeze and unfreeze between two steps"
                        )

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
