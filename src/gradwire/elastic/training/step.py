"""One step of an elastic run, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.elastic.training.samples import Shard
from gradwire.errors import ArgumentError, ArgumentTypeError, ReductionError

if TYPE_CHECKING:
    from gradwire.elastic.training.samples import Samples


T = TypeVar("T")
R = TypeVar("R")


class Stepper(Protocol):
    """What is called once when a step is committed: an optimizer, a learning rate schedule."""

    def step(self) -> Any:
        """Go on by one step."""
        ...


class StepRunner(Protocol):
    """What a step needs of its run."""

    def begin_step(self) -> None:
        """Clear gradients; put buffers back to their values at the step's beginning."""
        ...

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call a function with each item, divided among the members."""
        ...

    def begin_shard(self, shard: Shard) -> None:
        """Seed random numbers, and put buffers back."""
        ...

    def backward(self, loss: Tensor, shard: Shard, weight: float | None) -> None:
        """Compute a shard's gradients and add them."""
        ...

    def reduce(self) -> None:
        """Make the gradients complete."""
        ...

    def check_steppers(self, steppers: tuple[Stepper, ...]) -> None:
        """Raise if one is to step by gradients that are this member's alone."""
        ...

    def commit(self, steppers: tuple[Stepper, ...]) -> None:
        """Commit the step on all members."""
        ...

    def end_step(self, error: BaseException | None) -> bool:
        """Whether an error means that a member was lost, so that the loop goes on."""
        ...


class Step:
    """A step: `with step:` around its forward, backward and commit.

    If a member is lost in it, the block ends there, and the loop's next step is the same one again,
    or the one after it where the gradients were complete and the others have committed it.

    Args:
        runner: The run.
        number: Its number.
        shards: Those that this member runs.
        samples: Deals their samples, if the run was given a dataset's size.

    Attributes:
        number: Its number.
        committed: Whether it was committed within its block.
    """

    def __init__(
        self, runner: StepRunner, number: int, shards: list[Shard], samples: Samples | None
    ) -> None:
        self.number, self.committed = number, False
        self._runner, self._shards, self._samples = runner, shards, samples
        self._current: Shard | None = None
        self._running = self._begun = self._reduced = False

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call a function with each item, divided among the members; all get all results.

        For validation and other work that all members share: call it on all of them, before the
        step's first shard. If a member is lost, the step is repeated, and the call with it. The
        results are the same whoever computes them: random numbers follow from the step and the
        item's place, buffers begin each call with the step's first values, and are put back.
        Gradients are disabled.

        Args:
            function: Returns tensors and plain values: numbers, strings, lists, tuples, dicts.
            items: The same on all members.

        Returns:
            The results, in the order of the items.

        Raises:
            ReductionError: The step has not begun, or its first shard has.
            NotSupportedError: A result has more than tensors and plain values, or the function has
                written to a parameter.

        Example:
            >>> import torch, torch.distributed as dist
            >>> from gradwire import elastic
            >>> net = torch.nn.Linear(1, 1)
            >>> run = elastic.join(dist.HashStore(), shards=2)
            >>> run.keep(model=net)
            >>> for step in run.steps(1):
            ...     with step:
            ...         squares = step.map(lambda part: net(part).shape, torch.ones(6, 1).split(2))
            ...         for shard in step.shards:
            ...             step.backward(net(torch.ones(1, 1)).sum())
            ...         step.commit()
            >>> squares
            [torch.Size([2, 1]), torch.Size([2, 1]), torch.Size([2, 1])]
        """
        if not self._running or self._begun:
            raise ReductionError(
                f"step.map of step {self.number}: call it within `with step:`, before the first of "
                "step.shards"
            )
        return self._runner.map(function, items)

    @property
    def shards(self) -> Iterator[Shard]:
        """This member's shards: forward and backward are run for each, in this order."""
        self._begun = True
        for shard in self._shards:
            self._runner.begin_shard(shard)
            self._current = shard
            yield shard
            if self._current is not None:
                raise ReductionError(
                    f"{shard} of step {self.number} had no backward: call step.backward(loss) "
                    "once for each of step.shards"
                )

    def sample_ids(self, shard: Shard) -> list[int]:
        """Indices into the dataset: the same for this step and shard on any member.

        Raises:
            ArgumentError: `Run.steps` was not told how many samples there are.
        """
        if self._samples is None:
            raise ArgumentError("run.steps got no samples=: give the dataset's size, and batch=")
        return self._samples.ids(self.number, shard)

    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Compute the gradients of the shard at hand.

        Args:
            loss: The mean over the shard's samples, or tokens.
            weight: How many those are; by default the number of `sample_ids`, or of shards.

        Raises:
            ReductionError: No shard is at hand, or it had its backward.
            ArgumentTypeError: The loss is no tensor of one element.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentTypeError(f"loss is {loss!r}: pass the mean over the shard, one element")
        if (shard := self._current) is None:
            raise ReductionError("step.backward: call it once for each of step.shards")
        self._runner.backward(loss, shard, weight)
        self._current = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Make the gradients those of the mean over all samples, on all members.

        `commit` does it where it was not called: call it to change gradients before, as by clipping
        their norm.
        """
        if not self._reduced:
            self._runner.reduce()
            self._reduced = True

    def commit(self, *steppers: Stepper) -> None:
        """Commit the step on all members, and call `step()` of each of these, once.

        What is to happen once a step, but must not if it is repeated, belongs here: optimizers,
        learning rate schedules, counters. If a member is lost meanwhile, it may happen after the
        block has ended.

        One that `Run.keep` was not given is a NotKeptWarning, if it has a `state_dict`.

        Raises:
            ArgumentTypeError: One has no `step`.
            ReductionError: A shard had no backward, or one of them has a parameter with a gradient
                that is in nothing which was kept, so that its gradient is this member's alone.
        """
        for stepper in steppers:
            if not callable(getattr(stepper, "step", None)):
                raise ArgumentTypeError(f"{stepper!r} has no step(): pass optimizers, schedules")
        self._runner.check_steppers(steppers)
        self.reduce()
        self._runner.commit(steppers)
        self.committed = True

    def __enter__(self) -> Step:
        self._runner.begin_step()
        self._running = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._running = False
        if error is None and not self.committed:
            error = ReductionError(
                f"step {self.number} ended without step.commit(optimizer): call it last"
            )
            self._runner.end_step(error)
            raise error
        return error is not None and self._runner.end_step(error)
