"""Join an elastic run through the store that the launcher names."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire._groups import mark_temporary
from gradwire.elastic import checkpoint
from gradwire.elastic.kept import Stepper
from gradwire.elastic.member_steps import MemberSteps, Settings
from gradwire.elastic.membership import BEAT_SECONDS, members_of_environment, store_of_environment
from gradwire.elastic.runtime import Runtime
from gradwire.elastic.shards import Samples, Shard, check_shards
from gradwire.elastic.supervisor import end_with_reports, report
from gradwire.errors import ArgumentError, ArgumentTypeError, ReductionError


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
            that is not finite reaches the others.
        check_replicas: Number of steps between two comparisons of the members' parameters, which
            are also compared when the members change; 0 for none, for hosts that round differently.
        name: Name of the run, for a store with several runs.

    Raises:
        ArgumentError: There is no store, or an argument is invalid.
        NotSupportedError: This process has another version of PyTorch or gradwire than the run, or
            runs as another user than the members with which it would share memory.
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
    if backend not in ("shm", "gloo"):
        raise ArgumentError(f"backend is {backend!r}: pass 'shm' or 'gloo'")
    for argument, value in (("timeout", timeout), ("silence", silence)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ArgumentTypeError(f"{argument} is {value!r}: pass a positive timedelta")
    if silence.total_seconds() < 3 * BEAT_SECONDS:
        raise ArgumentError(f"silence is {silence}: pass at least {3 * BEAT_SECONDS:g} s")
    if check_replicas < 0:
        raise ArgumentError(f"check_replicas is {check_replicas}: pass a number of steps, or 0")
    if members is None:
        members = members_of_environment()
    runtime = Runtime(
        store_of_environment(timeout) if store is None else store,
        name,
        expect=members,
        backend=backend,
        timeout=timeout.total_seconds(),
        silence=silence.total_seconds(),
    )
    settings = Settings(check_shards(shards), reproducible, seed, nan_guard, check_replicas)
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
        self._state = self._steps.state

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
        if self.generation:
            raise ArgumentError(
                "run.keep was called after the first step: call it before run.steps"
            )
        for name, value in objects.items():
            self._state.keep(name, value)
            if self._settings.nan_guard and isinstance(value, nn.Module):
                self._guard(value)

    def _guard(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._check_finite, name))

    def _check_finite(self, name: str, gradient: Tensor) -> None:
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if not bool(values.isfinite().all()):
            raise ReductionError(
                f"rank {self.rank} (member {self.number}), step {self.committed_steps}: the "
                f"gradient of {name!r} is not finite; it was not sent to other members",
                [name],
            )

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
            ArgumentError: No model is kept, or the run has begun before.
            RunOverError: The other members finished before this process was admitted, or while it
                showed no sign of life.
            PeerFailedError: A member asked all to raise an error.
            MismatchError: A member has other arguments, here or of `join`. It is raised on all
                members before the first generation, and later on the newcomer.
        """
        if self.generation:
            raise ArgumentError("run.steps was called before: join another run to do more steps")
        if not self._state.modules:
            raise ArgumentError("run.keep got no model: call run.keep(model=..., optimizer=...)")
        if not self._settings.reproducible and not self._state.models:
            raise ArgumentError(
                "reproducible=False needs a DistributedDataParallel in run.keep: wrap the model, "
                "with process_group=run.group"
            )
        dealer = None
        if samples is not None:
            of_run = self._settings
            dealer = Samples(
                samples, batch=batch, shards=of_run.shards, seed=of_run.seed, shuffle=shuffle
            )
        self._steps.samples = dealer
        settings = asdict(self._settings) | {
            "steps": steps,
            "samples": samples,
            "batch": None if samples is None else batch,
            "shuffle": None if samples is None else shuffle,
            "keep": sorted(self._state.kept),
        }
        try:
            self._runtime.start(steps, self._steps.start, settings)
            while self._runtime.advance():
                yield Step(self._steps, self.committed_steps, dealer)
        finally:
            self._runtime.stop()

    def stop(self) -> None:
        """Ask to end the run; all members stop after the same step.

        That is the next step whose gradients are reduced: called within its block, before
        `Step.reduce` and `Step.commit`, the current step. If all members call it in the same step
        because of values that all have, it is that step whichever members are lost. If a single
        member calls it, for example on a signal, the request is lost when that member is lost
        before its gradients are reduced.
        """
        self._steps.stop()

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint of the kept objects between two steps, on the first member.

        The format is that of torch.distributed.checkpoint. The checkpoint `step-N` in the folder is
        complete or does not exist. All members may call `save`; the others return at once, and do
        not see an error. If the loop does not handle the error, the first member ends, and another
        one writes at the next call.

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
        folder = Path(folder)
        if self.rank == 0:
            # a failed step may have changed them
            self._state.put_buffers_back(self.committed_steps)
            return checkpoint.save(
                self._state.kept,
                self.committed_steps,
                folder,
                lineage=self._state.lineage,
                keep=keep,
            )
        return checkpoint.path_of(folder, self.committed_steps)

    def load(self, folder: str | Path) -> bool:
        """Load the checkpoint with the most steps in a folder; return False if there is none.

        Call it before `steps`, on any number of members: the member with the most steps sends its
        state to the others.

        Raises:
            ArgumentError: The checkpoint holds other objects, or the run has begun.
        """
        if self.generation:
            raise ArgumentError(
                "run.load was called after the first step: call it before run.steps"
            )
        path = checkpoint.latest(Path(folder))
        if path is None:
            return False
        self._steps.start = checkpoint.load(self._state.kept, path)
        self._state.lineage = checkpoint.lineage_of(path)
        return True


class Step:
    """One step: use `with step:` around its forward, backward and commit.

    If a member is lost, the block ends there. The loop's next step is the same one again, or the
    following one if the gradients were complete and the other members have committed the step.

    Args:
        runner: Work of this member.
        number: Number of the step.
        samples: Samples of the shards, if the run got the size of a dataset.

    Attributes:
        number: Number of the step.
        committed: True if the step was committed within its block.
    """

    def __init__(self, runner: MemberSteps, number: int, samples: Samples | None) -> None:
        self.number, self.committed = number, False
        self._runner, self._samples = runner, samples
        self._current: Shard | None = None
        self._reduced = False

    @property
    def shards(self) -> Iterator[Shard]:
        """Shards of this member; run forward and backward for each, in this order.

        In a step that is repeated, shards whose `local` steps this member has completed are left
        out.
        """
        for shard in self._runner.shards():
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
        if self._samples is None:
            raise ArgumentError("run.steps got no samples=: pass the dataset's size, and batch=")
        return self._samples.ids(self.number, shard)

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
        self._runner.backward(loss, shard, weight)
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
        with self._runner.local(make, shard, weight) as inner:
            yield inner
        self._current = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients to the mean over all samples, on all members.

        `commit` calls it if the loop did not. Call it to change gradients before the commit, for
        example to clip their norm.
        """
        if not self._reduced:
            self._runner.reduce()
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
        self._runner.check_steppers(steppers)
        self.reduce()
        self._runner.commit(steppers)
        self.committed = True

    def __enter__(self) -> Step:
        self._runner.begin_step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None and not self.committed:
            error = ReductionError(
                f"step {self.number} ended without step.commit(optimizer): call it last"
            )
            self._runner.end_step(error)
            raise error
        return error is not None and self._runner.end_step(error)
