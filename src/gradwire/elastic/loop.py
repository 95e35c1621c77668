"""Join an elastic run through the store that the launcher names."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store

from gradwire._groups import mark_temporary
from gradwire.elastic import snapshot
from gradwire.elastic.membership import BEAT_SECONDS, members_of_environment, store_of_environment
from gradwire.elastic.runtime import Runtime
from gradwire.elastic.shards import Samples, check_shards
from gradwire.elastic.steps import MemberSteps, Settings, Step
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
        self._kept = self._steps.kept

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
            if self._settings.nan_guard and isinstance(value, nn.Module):
                for of_module, parameter in value.named_parameters():
                    if parameter.requires_grad:
                        parameter.register_hook(partial(self._check_finite, of_module))

    def _check_finite(self, name: str, gradient: Tensor) -> None:
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if not bool(values.isfinite().all()):
            raise ReductionError(
                f"rank {self.rank} (member {self.number}), step {self.committed_steps}: the "
                f"gradient of {name!r} is not finite; it was not sent to other members",
                [name],
            )

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
            ArgumentError: No model is kept, or the run has begun before.
            RunOverError: The other members finished before this process was admitted, or while it
                showed no sign of life.
            PeerFailedError: A member asked all to raise an error.
            MismatchError: A member has other arguments, here or of `join`. It is raised on all
                members before the first generation, and later on the newcomer.
        """
        if self.generation:
            raise ArgumentError("run.steps was called before: join another run to do more steps")
        if not self._kept.modules:
            raise ArgumentError("run.keep got no model: call run.keep(model=..., optimizer=...)")
        if not self._settings.reproducible and not self._kept.models:
            raise ArgumentError(
                "reproducible=False needs a DistributedDataParallel in run.keep: wrap the model, "
                "with process_group=run.group"
            )
        settings = asdict(self._settings)
        settings |= {"steps": steps, "samples": samples, "keep": sorted(self._kept.objects)}
        if samples is not None:
            shards, seed = self._settings.shards, self._settings.seed
            self._steps.samples = Samples(
                samples, batch=batch, shards=shards, seed=seed, shuffle=shuffle
            )
            settings |= {"batch": batch, "shuffle": shuffle}
        try:
            self._runtime.start(steps, self._steps.start, settings)
            while self._runtime.advance():
                yield Step(self._steps, self.committed_steps)
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
        self._steps.asks_to_stop = True

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
        folder, step, kept = Path(folder), self.committed_steps, self._kept
        if self.rank != 0:
            return snapshot.path_of(folder, step)
        kept.put_buffers_back(step)  # a failed step may have changed them
        return snapshot.save(kept.objects, step, folder, lineage=kept.lineage, keep=keep)

    def load(self, folder: str | Path) -> bool:
        """Load the checkpoint with the most steps in a folder; return False if there is none.

        Call it before `steps`, on any number of members: the member with the most steps sends its
        state to the others.

        Raises:
            ArgumentError: The checkpoint holds other objects, or the run has begun.
        """
        self._check_not_begun("run.load")
        path = snapshot.latest(Path(folder))
        if path is None:
            return False
        self._steps.start = snapshot.load(self._kept.objects, path)
        self._kept.lineage = snapshot.lineage_of(path)
        return True
