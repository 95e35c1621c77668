"""An optimizer of two levels: steps on each rank alone, and now and then one that all take.

Between two exchanges a rank moves away from where all were together, the anchor. The way back,
anchor minus parameters, averaged over ranks, is the gradient of the outer step: which moves the
anchor, and every rank to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradwire._groups import check_group, default_group
from gradwire.buckets import plan_buckets
from gradwire.ddp import broadcast_coalesced
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.verify import describe, verify_same
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.hooks import CommHook, GradBucket, all_reduce, bind_hook, get_hook
from gradwire.hooks.stateful import run_in_group
from gradwire.local_sgd.exchange import reduce_bucket
from gradwire.local_sgd.fragments import assign_fragments, due

__all__ = ["LocalSGD", "diloco"]

BUCKET_BYTES = 25 << 20
REMEDY = "Make LocalSGD with the same parameters and arguments on every rank"
Outer = Callable[[list[Tensor]], Optimizer]


class LocalSGD:
    """Wraps an optimizer: after every few steps, ranks average what they have done since the last.

    The module is not wrapped in `DistributedDataParallel`: its gradients are this rank's. After an
    exchange all ranks have the same bits of the parameters that were exchanged. All take the same
    number of steps. Buffers stay each rank's own.

    Args:
        optimizer: Takes the steps of this rank; any of torch's.
        named_parameters: Names and parameters, of `module.named_parameters()`; those that need no
            gradient are only made rank 0's. All start with rank 0's values.
        every: How many steps lie between two exchanges of a parameter.
        outer: Makes the optimizer of the outer steps from the anchors; None: SGD with a learning
            rate of 1, which is the plain mean of the ranks' parameters.
        hook: Averages the outer gradients, in buckets: a communication hook, or its name; None: an
            all_reduce. One that compresses keeps its errors by the parameters' names.
        hook_state: For a function, its state; the group if None.
        group: The ranks; None: the default group.
        fragments: Parts that are exchanged in turn, spread over `every` steps: the same bytes in
            smaller messages.

    Raises:
        ArgumentError: A number is out of its range, or there are no parameters.
        MismatchError: The ranks' parameters or arguments differ.
        NotSupportedError: The group has no store.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     sgd = torch.optim.SGD([weight], lr=1.0)
        ...     optimizer = LocalSGD(sgd, [("weight", weight)], every=2)
        ...     seen = []
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         (weight * -(1.0 + torch.distributed.get_rank())).sum().backward()
        ...         optimizer.step()
        ...         seen.append(weight.item())
        ...     return seen
        >>> run_ranks(main, world_size=2)  # after the second step: (2 + 4) / 2
        [[1.0, 3.0], [2.0, 3.0]]

    Source:
        S. U. Stich, Local SGD converges fast and communicates little, arXiv 1805.09767; DiLoCo,
        A. Douillard et al., arXiv 2311.08105; in fragments, arXiv 2501.18512.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        every: int,
        outer: Outer | None = None,
        hook: CommHook | str | None = None,
        hook_state: Any = None,
        group: ProcessGroup | None = None,
        fragments: int = 1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(f"optimizer is {optimizer!r}: pass a torch.optim.Optimizer")
        self.group = default_group("group") if group is None else check_group(group)
        everything = list(named_parameters)
        named = [(name, p) for name, p in everything if p.requires_grad]
        if not named:
            raise ArgumentError("named_parameters is empty: there is nothing to exchange")
        if not 1 <= fragments <= every:
            raise ArgumentError(
                f"every is {every} and fragments {fragments}: 1 to every are needed"
            )
        self.optimizer, self.every, self.steps = optimizer, every, 0
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self._fragments = assign_fragments([p.nbytes for p in self._parameters], fragments)
        chosen = get_hook(hook) if isinstance(hook, str) else (hook or all_reduce)
        state = self.group if hook_state is None else hook_state
        self._hook = bind_hook(None if hasattr(chosen, "run_hook") else state, chosen)
        run_in_group(self._hook, self.group)
        self._domain = FaultDomain.of(self.group)
        self._domain.connect()
        _verify(self.group, everything, every, fragments)
        broadcast_coalesced(self.group, [p.detach() for _, p in everything], group_src=0)
        self._anchors = [p.detach().clone() for p in self._parameters]
        self._buckets = [self._planned(indices) for indices in self._fragments]
        self.outer = (outer or partial(torch.optim.SGD, lr=1.0))(self._anchors)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this rank; then the exchange of what is due.

        Raises:
            PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
            HookError: The hook failed.
            BrokenGroupError: The group failed before.
        """
        result = self.optimizer.step(closure)
        self.steps += 1
        for fragment in due(self.steps, self.every, len(self._fragments)):
            self._exchange(fragment)
        return result

    def synchronize(self) -> None:
        """Exchange everything now, whatever is due: every rank calls.

        After it all ranks have the same parameters, to be evaluated or saved once.
        """
        for fragment in range(len(self._fragments)):
            self._exchange(fragment)

    @torch.no_grad()
    def _exchange(self, fragment: int) -> None:
        """An outer step of these parameters."""
        buckets, indices = self._buckets[fragment], self._fragments[fragment]
        # not their numbers in this exchange: a hook may keep by them what belongs to a bucket
        first = sum(map(len, self._buckets[:fragment]))
        gradients: dict[int, Tensor] = {}
        for number, chosen in enumerate(buckets, first):
            bucket = self._bucket(chosen, number, is_last=number + 1 == first + len(buckets))
            reduced = reduce_bucket(self._hook, bucket, self._domain)
            bucket.set_buffer(reduced.to(self._anchors[chosen[0]].dtype))
            gradients.update(zip(chosen, bucket.gradients(), strict=True))
        self._hook.committed()
        # not before all are there: what an exchange that failed left would be in a later step
        for index, gradient in gradients.items():
            self._anchors[index].grad = gradient
        self.outer.step()
        for index in indices:
            self._parameters[index].copy_(self._anchors[index])
            self._anchors[index].grad = None

    def _planned(self, indices: Sequence[int]) -> list[list[int]]:
        """The parameters of each bucket of a fragment."""
        anchors = [self._anchors[i] for i in indices]
        plan = plan_buckets(
            [a.nbytes for a in anchors],
            [a.dtype for a in anchors],
            [a.device for a in anchors],
            [BUCKET_BYTES],
        )
        return [[indices[member] for member in members] for members in plan.buckets]

    def _bucket(self, indices: Sequence[int], number: int, *, is_last: bool) -> GradBucket:
        """How far this rank has come from the anchors, in the other direction."""
        parameters = [self._parameters[i] for i in indices]
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        flat = torch.empty(numel, dtype=first.dtype, device=first.device)
        names = [self._names[i] for i in indices]
        # the anchors' strides are the same on all ranks, those of the parameters may have changed
        like = [self._anchors[i] for i in indices]
        bucket = GradBucket(number, flat, parameters, is_last=is_last, names=names, like=like)
        for index, view in zip(indices, bucket.gradients(), strict=True):
            torch.sub(self._anchors[index], self._parameters[index], out=view)
        return bucket

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved beside the parameters, on each rank its own.

        Between two exchanges ranks differ, in their parameters too.
        """
        hook = self._hook.state
        return {
            "steps": self.steps,
            "optimizer": self.optimizer.state_dict(),
            "outer": self.outer.state_dict(),
            "anchors": {n: a.clone() for n, a in zip(self._names, self._anchors, strict=True)},
            "hook": hook.state_dict() if hasattr(hook, "state_dict") else {},
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        Raises:
            ArgumentError: It is of other parameters.
        """
        if saved["anchors"].keys() != set(self._names):
            differing = sorted(saved["anchors"].keys() ^ set(self._names))
            raise ArgumentError(f"the saved state is of other parameters: {differing} differ")
        self.steps = saved["steps"]
        self.optimizer.load_state_dict(saved["optimizer"])
        self.outer.load_state_dict(saved["outer"])
        for name, anchor in zip(self._names, self._anchors, strict=True):
            anchor.copy_(saved["anchors"][name])
        if saved["hook"]:
            self._hook.state.load_state_dict(saved["hook"])


def _verify(
    group: ProcessGroup, named: Sequence[tuple[str, Tensor]], every: int, fragments: int
) -> None:
    own = [("every", str(every)), ("fragments", str(fragments)), *describe(named, "parameter")]
    verify_same(group, own, "arguments of LocalSGD", REMEDY)


def diloco(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    every: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    **others: Any,
) -> LocalSGD:
    """`LocalSGD` whose outer optimizer is SGD with Nesterov momentum, as DiLoCo has it.

    Args:
        optimizer: Takes the steps of this rank; AdamW in the paper.
        named_parameters: As `LocalSGD` has them.
        every: How many steps lie between two exchanges.
        lr: The outer learning rate.
        momentum: The outer momentum.
        **others: As `LocalSGD` has them: hook, hook_state, group, fragments.

    Source:
        DiLoCo, A. Douillard et al., arXiv 2311.08105.
    """
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return LocalSGD(optimizer, named_parameters, every=every, outer=outer, **others)
