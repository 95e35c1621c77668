"""Step of an elastic run, for the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire.elastic.training.member_steps import MemberSteps
from gradwire.elastic.training.samples import Samples, Shard
from gradwire.elastic.training.state import Stepper
from gradwire.errors import ArgumentError, ArgumentTypeError, ReductionError


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
