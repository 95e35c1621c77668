"""An elastic run: the training loop's side of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire._groups import keep_for_an_epoch
from gradwire.elastic.members import Engine
from gradwire.elastic.training import checkpoint
from gradwire.elastic.training.member_steps import MemberSteps
from gradwire.elastic.training.samples import Samples, Shard
from gradwire.elastic.training.step import Step
from gradwire.errors import ArgumentError, ReductionError


class Run:
    """This process's part in an elastic run. Made by `join`."""

    def __init__(
        self, engine: Engine, shards: int, *, reproducible: bool, seed: int, nan_guard: bool
    ) -> None:
        self._engine, self._shards, self._reproducible = engine, shards, reproducible
        self._seed, self._nan_guard = seed, nan_guard
        self._steps = MemberSteps(
            engine, shards, reproducible=reproducible, seed=seed, nan_guard=nan_guard
        )
        self._state = self._steps.state

    # -- what can be asked -----------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The group of this epoch; of this process alone before the first step and after the last.

        Each epoch has a new one. Models that are kept get it by themselves. Use it within a step:
        between two steps, no member waits for one that is lost.

        Raises:
            NotSupportedError: The epoch is over, and the next step has not begun.
        """
        group = self._engine.process_group
        keep_for_an_epoch(group)
        return group

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
        return self._steps.version

    @property
    def samples(self) -> Samples:
        """What deals the samples.

        Raises:
            ArgumentError: `steps` was not told how many there are.
        """
        samples = self._steps.samples
        if samples is None:
            raise ArgumentError("run.steps got no samples=: give the dataset's size, and batch=")
        return samples

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
        values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
        if not bool(values.isfinite().all()):
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
        self._steps.start = version

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
            RunOverError: The others were done before this process was taken in, or while it showed
                no sign of life.
            PeerFailedError: A member wants all to end.
            MismatchError: A member has other arguments, here or of `join`: on all members before
                the first epoch, then on a newcomer.
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
        dealer = None
        if samples is not None:
            dealer = Samples(
                samples, batch=batch, shards=self._shards, seed=self._seed, shuffle=shuffle
            )
        self._steps.samples = dealer
        settings = {
            "reproducible": self._reproducible,
            "shards": self._shards,
            "seed": self._seed,
            "steps": steps,
            "samples": samples,
            "batch": None if samples is None else batch,
            "shuffle": None if samples is None else shuffle,
            "keep": sorted(self.kept),
        }
        try:
            self._engine.start(steps, self._steps.start, settings)
            while self._engine.advance():
                yield Step(self._steps, self.version, self.shards(), dealer)
        finally:
            self._engine.stop()

    def stop(self) -> None:
        """Ask to end the run: all members stop at the same step.

        That is the step whose gradients are reduced next: called within its block, before
        `Step.reduce` and `Step.commit`, the step at hand. Where all members call it in the same
        step, by what all of them know, it is that step whichever members are lost. One member that
        calls it alone, as after a signal, may be lost before the others hear of it.
        """
        self._steps.stop()

    def seed_of(self, step: int, first: int, use: str = "") -> int:
        """A seed that follows from the run's, a step and its first shard."""
        return self._steps.seed_of(step, first, use)

    def shards(self) -> list[Shard]:
        """Those that this member runs in this epoch."""
        return list(self._steps.dealt)

    def close(self) -> None:
        """Leave the run; the others go on. The end of `steps` does it."""
        self._engine.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint of what is kept, between two steps: the epoch's first member does.

        In the format of torch.distributed.checkpoint, as `step-N` in the folder, and as a whole or
        not at all. All may call; the others return at once, and do not hear of an error. If the
        loop does not handle it, the first member ends, and another one writes at the next call.

        Args:
            folder: Where the checkpoints of this training lie, and no others.
            keep: How many to keep, the last ones; None for all.

        Raises:
            ArgumentError: The folder has a checkpoint of as many steps or more of another training,
                which `load` was not called for.
            CheckpointError: It could not be written, as on a full disk; nothing is left of it.
        """
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ArgumentError(f"keep is {keep!r}: pass an int above 0, or None to keep all")
        folder = Path(folder)
        if self.rank == 0:
            self._state.put_buffers_back(self.version)  # a step that was lost has changed them
            return checkpoint.save(
                self._state.kept, self.version, folder, line=self._state.line, keep=keep
            )
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
        self._state.line = checkpoint.line_of(path)
        return True
