"""What the reducer asks of a bucket, whatever its gradients are.

Gradients become ready, or are known to be unused in this backward; when nothing more is expected,
the bucket copies them into something flat that travels, and copies out what came back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.ddp.buckets.ownership import Ownership
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.hooks import GradBucket

__all__ = ["Bucket", "BucketOptions", "Member", "dense_gradient"]


@dataclass(frozen=True)
class Member:
    """A parameter of a bucket.

    Attributes:
        index: Its number in the reducer.
        like: Has the strides with which the parameter was wrapped, the same on all ranks: its
            gradient lies by them in what travels. Its own may change, on one rank alone.
        count: How often its gradient arrives in a backward: more than once in several reentrant
            checkpoints, not at all where this rank never uses it.
    """

    index: int
    name: str
    parameter: Parameter
    like: Tensor
    count: int = 1


@dataclass(frozen=True)
class BucketOptions:
    """What all buckets of a reducer have alike.

    Attributes:
        group: The group that reduces; on shm, buffers lie in memory that its ranks share.
        ownership: What is known about the parameters' gradients.
        as_views: Whether gradients are views of their bucket's buffer (gradient_as_bucket_view).
        lazy: Whether buffers are allocated in each backward, and released after it.
        lend: Whether small gradients may accumulate in the buffer from the start: all parameters
            are on the CPU, so that one thread runs all that autograd does with their gradients.
    """

    group: ProcessGroup
    ownership: Ownership
    as_views: bool = False
    lazy: bool = False
    lend: bool = False


class Bucket(ABC):
    """Parameters whose gradients travel together.

    Attributes:
        members: The parameters' indices, in the order they lie in the bucket.
        names, parameters: In the same order.
        like: As a `Member` has it, in the same order.
        early: Those of them that get `copy_in_early` when their gradient is ready.
        ready: Those whose gradient is ready in this backward, as they came.
        unused: Those that get no gradient in this backward.
        expected: How many gradients, as often as each is to come, make the bucket ready.
        scale: What gradients are multiplied by on their way.
        flat: What travels; valid from `copy_in` to `copy_out`.
        extra_numel: How many elements of `flat` follow the gradients, for numbers that travel too.
    """

    flat: Tensor
    extra_numel = 0

    def __init__(
        self,
        members: Sequence[Member],
        *,
        scale: float,
        early: Collection[int],
        options: BucketOptions,
    ) -> None:
        self.members = tuple(m.index for m in members)
        self.names = [m.name for m in members]
        self.parameters = [m.parameter for m in members]
        self.like = [m.like for m in members]
        self._scale, self._ownership = scale, options.ownership
        self.ready: list[int] = []
        self._counts = {m.index: m.count for m in members}
        self._never = {m.index for m in members if m.count == 0}
        self._count = sum(m.count for m in members)
        self._early = early
        self.reset()

    def reset(self) -> None:
        """Ready for the next backward."""
        self.ready.clear()
        self.unused = set(self._never)
        self.expected: float = self._count
        self.early = self._early
        self.scale = self._scale
        self._deferred = self._with_graph = False

    def defer(self, *, with_graph: bool = False) -> None:
        """Copy nothing in early in this backward; with a graph, keep the gradients' history."""
        self.early = ()
        self._deferred, self._with_graph = True, with_graph

    def mark_unused(self, members: Iterable[int]) -> None:
        """These get no gradient in this backward."""
        for member in members:
            if member not in self.unused:
                self.unused.add(member)
                self.expected -= self._counts[member]

    def missing(self) -> list[int]:
        """Members whose gradient is neither ready nor known to be unused."""
        known = self.unused.union(self.ready)
        return [m for m in self.members if m not in known]

    def unexpected(self) -> list[str]:
        """Names of parameters whose gradient arrived more often than expected."""
        if len({*self.ready}) == len(self.ready) and self.unused.isdisjoint(self.ready):
            return []  # as a rule: counting takes ten times as long
        came = Counter(self.ready)
        limit = {m: 0 if m in self.unused else n for m, n in self._counts.items()}
        return [n for n, m in zip(self.names, self.members, strict=True) if came[m] > limit[m]]

    @property
    def all_ready(self) -> bool:
        """Whether all gradients of this backward are there."""
        return len(self.ready) >= self.expected

    @property
    def what(self) -> str:
        """The bucket, for messages."""
        more = f", … ({len(self.names)} parameters)" if self.names[3:] else ""
        return f"bucket of {', '.join(self.names[:3])}{more}"

    def lend(self) -> None:  # noqa: B027 - most kinds of buckets have nothing to lend
        """A backward begins: small gradients that are None may become zeros in the buffer."""

    def take_back(self) -> None:  # noqa: B027
        """What has been lent and not been added to is None again."""

    def move_out(self) -> None:  # noqa: B027
        """An exception ended the backward: what comes back is not to be written to gradients."""

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        """Copy in one gradient that is ready; `incoming` holds what backward gave the parameter."""
        raise AssertionError("this bucket copies nothing in early")

    @abstractmethod
    def copy_in(self) -> None:
        """Make `flat` hold all gradients, scaled; zeros for unused ones that are None."""

    def multiply(self, factor: float) -> None:
        """Multiply what travels."""
        self.flat.mul_(factor)

    @abstractmethod
    def zero(self) -> None:
        """Make `flat` hold zeros, and leave all gradients alone."""

    @abstractmethod
    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        """Make the gradients hold the reduced values.

        Args:
            reduced: As `flat` is, of any dtype; None: the values in `flat`.
            untouched: Members, unused here, whose gradient stays what it was.
        """

    def as_grad_bucket(self, index: int, *, is_last: bool) -> GradBucket:
        """The bucket as hooks see it."""
        return GradBucket(
            index, self.flat, self.parameters, is_last=is_last, names=self.names, like=self.like
        )


def move_out(parameter: Parameter, address: int) -> None:
    """Give the gradient memory of its own, if it lies at this address."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return
    if gradient.data_ptr() == address:
        parameter.grad = gradient.clone()


def dense_gradient(parameter: Parameter) -> Tensor:
    """The parameter's gradient, present and dense."""
    gradient = parameter.grad
    if gradient is None:
        raise ReductionError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} was taken away (.grad "
            "is None) before it was communicated: free gradients after backward; for an optimizer "
            "in backward use torch.distributed.optim._apply_optimizer_in_backward"
        )
    if gradient.layout != torch.strided:
        raise NotSupportedError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has layout "
            f"{gradient.layout}, which only embeddings made with sparse=True may have: use dense "
            "gradients"
        )
    if gradient.dtype is not parameter.dtype:
        raise NotSupportedError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is of {gradient.dtype} "
            f"and the parameter of {parameter.dtype}: gradients are reduced in their parameter's "
            "dtype. Leave grad_dtype as it is"
        )
    return gradient
