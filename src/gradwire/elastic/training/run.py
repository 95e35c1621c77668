"""Elastic run, for the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire._groups import mark_temporary
from gradwire.elastic.members import Runtime
from gradwire.elastic.training import checkpoint
from gradwire.elastic.training.member_steps import MemberSteps, Settings
from gradwire.elastic.training.samples import Samples
from gradwire.elastic.training.step import Step
from gradwire.errors import ArgumentError, ReductionError


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
