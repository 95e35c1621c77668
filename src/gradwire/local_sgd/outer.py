"""LocalSGD: an optimizer with inner steps on each rank and outer steps of all ranks together.

The anchor is the value of the parameters after the last exchange, the same on all ranks. At the
next exchange, anchor minus parameters, averaged over ranks, is the gradient of an outer step. The
outer step updates the anchor, and every rank sets its parameters to it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradwire._engine_errors import backend_failure, is_over, is_transport
from gradwire._groups import check_group, check_lasting, default_group
from gradwire.ddp import (
    LOST,
    FaultDomain,
    broadcast_coalesced,
    describe,
    load_state,
    save_state,
    verify_same,
    wait_future,
)
from gradwire.errors import ArgumentError, ArgumentTypeError, DistributedError, HookError
from gradwire.hooks import (
    CommHook,
    GradBucket,
    StatefulHook,
    all_reduce,
    as_future,
    bind_hook,
    get_hook,
    group_from,
    hook_name,
    name_if_group,
    parse_hook_result,
    run_in_group,
)
from gradwire.local_sgd.parameters import Named, TrackedParameters


class Reduction:
    """Reduction of one bucket by a hook, under way from the constructor on."""

    def __init__(self, hook: StatefulHook[Any], bucket: GradBucket, domain: FaultDomain) -> None:
        self._bucket, self._hook, self._domain = bucket, hook, domain
        self._dtype = bucket.buffer().dtype
        if domain.broken is not None:
            domain.raise_deferred()
        with self._reporting():
            self._future = as_future(hook.run_hook(bucket), hook)

    def wait(self) -> list[Tensor]:
        """Wait for the result, and return the averaged gradients."""
        with self._reporting():
            poll = partial(self._domain.poll_lost, look=True)
            if late := wait_future(self._future, poll, self._domain.seconds):
                raise late
            reduced = parse_hook_result(self._future.wait(), self._bucket, self._hook)
        self._bucket.set_buffer(reduced.to(self._dtype))
        return self._bucket.gradients()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Convert errors, and report a lost rank to the others."""
        since = time.monotonic()
        try:
            yield
        except DistributedError as error:
            if self._domain.broken is None and isinstance(error, LOST):
                self._domain.give_up(error, error.__cause__)
            raise
        except Exception as error:
            what = f"hook {hook_name(self._hook)}, bucket {self._bucket.index()}"
            if not is_transport(error):
                raise HookError(f"{what}: {type(error).__name__}: {error}") from error
            timed_out = is_over(since, self._domain.seconds)
            self._domain.give_up(backend_failure(error, what, timed_out=timed_out), error)


class Exchange:
    """Exchange of a fragment that is not applied yet."""

    def __init__(
        self,
        fragment: int,
        due: int,
        sent: Sequence[tuple[list[int], Reduction]] = (),
        gradients: dict[int, Tensor] | None = None,
    ) -> None:
        self.fragment, self.due = fragment, due  # due: number of the step after which it is applied
        # reductions of buckets, with the indices of their parameters; averages, once known
        self._sent, self._gradients = sent, gradients

    def wait(self) -> dict[int, Tensor]:
        """Return the averaged outer gradient of each parameter."""
        if self._gradients is None:
            found: dict[int, Tensor] = {}
            for indices, reduction in self._sent:
                found.update(zip(indices, reduction.wait(), strict=True))
            self._gradients, self._sent = found, ()
        return self._gradients


def assign_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of `count` contiguous runs of about equal size, each with an entry."""
    if not 1 <= count <= len(sizes):
        raise ArgumentError(
            f"fragments is {count} for {len(sizes)} parameters: pass 1 to {len(sizes)}"
        )
    total = max(1, sum(sizes))
    runs: list[list[int]] = [[]]
    passed = 0
    for index, size in enumerate(sizes):
        left = len(sizes) - index  # remaining entries, including this one
        needed = count - len(runs)  # remaining runs, excluding the current one
        # True if the middle of the entry is beyond the end of the run, for runs of exactly equal
        # size
        beyond = (2 * passed + size) * count >= 2 * total * len(runs)
        if runs[-1] and needed and (beyond or left == needed):
            runs.append([])
        runs[-1].append(index)
        passed += size
    return runs


def due(step: int, every: int, fragments: int) -> list[int]:
    """Return the fragments that are exchanged after a step. Steps are counted from 1."""
    # each once in `every` steps, spread evenly: with every=4 and 2 fragments, fragment 0 after
    # steps 2, 6, ... and fragment 1 after steps 4, 8, ...
    phase = step % every
    return [f for f in range(fragments) if (f + 1) * every // fragments % every == phase]


REMEDY = "Make LocalSGD with the same parameters and arguments on every rank"
IN_STEP = (
    "Take the same number of steps on every rank (call skip() for a step that a rank omits), "
    "thaw parameters on all ranks, and load states that were saved together"
)
Outer = Callable[[list[Tensor]], Optimizer]


def _of_wrapped(name: str) -> Any:
    """Return a property that is an attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


class LocalSGD(Optimizer):
    """Optimizer wrapper that averages the ranks' changes of the parameters every few steps.

    It is a `torch.optim.Optimizer`, so that it works with schedulers and `GradScaler`. Its
    `param_groups`, `state` and `defaults` are those of the wrapped optimizer. Gradients stay local:
    the module is not wrapped in `DistributedDataParallel`. After an exchange all ranks have the
    same bits of the exchanged parameters. All ranks must take the same number of steps; a step that
    `GradScaler` skips on a rank counts. Buffers are not exchanged.

    A frozen parameter is exchanged from the time it is thawed, which must be between the same steps
    on all ranks. If parameters are added to the optimizer or the module later, or replaced, the
    next exchange raises an error on all ranks, because these parameters would differ between ranks.

    Args:
        optimizer: Optimizer of this rank's steps, any `torch.optim.Optimizer`.
        named_parameters: Module, its `named_parameters()`, or pairs of a name and a parameter. They
            must include all parameters of the optimizer. All ranks start with rank 0's values.
        every: Number of steps between two exchanges of a parameter.
        outer: Function that returns the optimizer of the outer steps for a list of anchors. If
            None, SGD with a learning rate of 1, which averages the ranks' parameters.
        hook: Communication hook that averages the outer gradients, or its name. If None, an
            all_reduce. A compressing hook keeps its errors by the parameters' names.
        hook_state: State of a hook that is a function. If None, the group.
        group: Process group; None for the default group.
        fragments: Number of parts of the parameters that are exchanged one after another, spread
            over `every` steps. More parts send the same bytes in smaller messages.
        delay: Number of steps between the sending of a fragment and its outer step, fewer than
            `every`. Ranks train on meanwhile, so that the exchange is hidden behind these steps.
            It needs a hook with a single collective for each bucket: none, "bf16" or "fp16".
        alpha: Weight of the rank's own parameters after a delayed outer step, at least 0 and less
            than 1; that of the anchor is 1 - alpha. With 0, all ranks have the anchor's values, and
            the delayed steps are lost; with more, parameters differ between ranks.

    Raises:
        ArgumentError: A number is out of its range, there are no parameters, two have the same
            name, or the optimizer has other parameters.
        MismatchError: Parameters or arguments differ between ranks.
        NotSupportedError: The group belongs to an elastic run.

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
        A. Douillard et al., arXiv 2311.08105; fragments, delay and alpha: Streaming DiLoCo,
        A. Douillard et al., arXiv 2501.18512, section 2.
    """

    # GradScaler then calls `step` in every step, so that skipped steps are counted. It sets
    # `found_inf`, and `grad_scale`, which is None if gradients are already unscaled.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: nn.Module | Named,
        *,
        every: int,
        outer: Outer | None = None,
        hook: CommHook | str | None = None,
        hook_state: Any = None,
        group: ProcessGroup | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(f"optimizer is {optimizer!r}: pass a torch.optim.Optimizer")
        self.group = default_group("group") if group is None else check_group(group)
        check_lasting(self.group, "group", "LocalSGD")
        if not 1 <= fragments <= every:
            raise ArgumentError(
                f"fragments is {fragments} and every {every}: pass fragments from 1 to every"
            )
        if not 0 <= delay < every or not 0 <= alpha < 1:
            raise ArgumentError(
                f"delay is {delay} and alpha {alpha}, with every {every}: pass a delay from 0 to "
                "every - 1, and alpha from 0 to less than 1"
            )
        self.optimizer = optimizer
        super().__setstate__({})  # creates the hooks only; Optimizer.__init__ would add parameters
        self.every, self.delay, self.alpha, self.steps = every, delay, alpha, 0
        self._pending: deque[Exchange] = deque()
        self._parameters = TrackedParameters(named_parameters)
        self._count = fragments
        assign_fragments([0] * len(self._parameters.active), fragments)  # raises for too many
        chosen = get_hook(hook) if isinstance(hook, str) else (hook or all_reduce)
        state = self.group if hook_state is None else hook_state
        self._hook = bind_hook(None if hasattr(chosen, "run_hook") else state, chosen)
        if delay and not self._hook.single_collective:
            raise ArgumentError(
                f"delay is {delay} with hook {hook_name(self._hook)}, which sends several messages "
                "for a bucket: pass delay=0, or hook None, 'bf16' or 'fp16'"
            )
        run_in_group(self._hook, self.group)
        FaultDomain.of(self.group).connect()
        self._verify_arguments()
        everything = [p.detach() for _, p in self._parameters.everything]
        broadcast_coalesced(self.group, everything, group_src=0)
        self._parameters.set_anchors()
        self._assign()
        self.outer = (outer or partial(torch.optim.SGD, lr=1.0))(self._parameters.anchors)

    # -- interface of an optimizer -----------------------------------------------------------

    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients with the wrapped optimizer's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which must be in `named_parameters`, to the wrapped optimizer.

        Raises:
            ArgumentError: The group has other parameters.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self._parameters.check(self.optimizer)
        except ArgumentError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of this rank, then exchange the fragments that are due.

        Raises:
            ArgumentError: The optimizer or the module has parameters that are not exchanged.
            MismatchError: The ranks have taken different numbers of steps, or thawed different
                parameters.
            PeerLostError, CollectiveTimeoutError: Another rank was lost, or did not take part in
                time.
            HookError: The hook failed.
            BrokenGroupError: The group failed before.
        """
        self._take_in_thawed()
        result = self._inner_step(closure)
        self._count_step()
        return result

    def skip(self) -> None:
        """Count a step that this rank omits, and exchange the fragments that are due.

        Use it for a batch whose loss is not finite, for example, while the other ranks take the
        step. If `GradScaler` skips a step, `step` counts it.

        Raises:
            DistributedError: See `step`.
        """
        self._take_in_thawed()
        self._count_step()

    def synchronize(self) -> None:
        """Exchange all parameters now. Every rank must call this.

        Delayed outer steps are taken first. Afterwards all ranks have the same parameters, for
        example to evaluate or save them.

        Raises:
            DistributedError: See `step`.
        """
        self._take_in_thawed()
        while self._pending:
            self._apply(self._pending.popleft(), self.alpha)
        for fragment in range(len(self._fragments)):
            self._apply(self._send(fragment, "synchronize()", self.steps), 0.0)

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer as `GradScaler.step` would."""
        found: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inner = self.optimizer
        if found is None:
            return inner.step(closure)
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf, inner.grad_scale = found, scale  # type: ignore[attr-defined]
            try:
                return inner.step(closure)
            finally:
                del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]
        if found.item():
            return None
        if scale is not None:
            _unscale(inner, scale)
        return inner.step(closure)

    # -- the exchange ------------------------------------------------------------------------

    def _count_step(self) -> None:
        self.steps += 1
        for fragment in due(self.steps, self.every, len(self._fragments)):
            applied = self.steps + self.delay
            self._pending.append(self._send(fragment, f"step {self.steps}", applied))
        while self._pending and self._pending[0].due <= self.steps:
            self._apply(self._pending.popleft(), self.alpha if self.delay else 0.0)

    @torch.no_grad()
    def _send(self, fragment: int, occasion: str, applied: int) -> Exchange:
        """Send the outer gradients of a fragment."""
        self._agree(f"fragment {fragment} at {occasion}")
        buckets, domain = self._buckets[fragment], FaultDomain.of(self.group)
        # numbers over all fragments, because a hook may keep state by bucket number
        first = sum(map(len, self._buckets[:fragment]))
        sent = []
        for number, chosen in enumerate(buckets, first):
            is_last = number + 1 == first + len(buckets)
            bucket = self._parameters.outer_gradients(chosen, number, is_last=is_last)
            sent.append((chosen, Reduction(self._hook, bucket, domain)))
            if not self._hook.single_collective:  # else its messages would cross the next bucket's
                sent[-1][1].wait()
        return Exchange(fragment, applied, sent)

    @torch.no_grad()
    def _apply(self, exchange: Exchange, alpha: float) -> None:
        """Take the outer step of a fragment."""
        anchors, parameters = self._parameters.anchors, self._parameters.tensors
        gradients = exchange.wait()
        self._hook.committed()
        # after all buckets are reduced: a failed exchange must not leave gradients behind
        for index, gradient in gradients.items():
            anchors[index].grad = gradient
        self.outer.step()
        for index in gradients:
            if alpha:
                parameters[index].lerp_(anchors[index], 1 - alpha)
            else:
                parameters[index].copy_(anchors[index])
            anchors[index].grad = None

    def _agree(self, occasion: str) -> None:
        """Compare the exchanged parameters between ranks; raise on all ranks if they differ."""
        own = [("exchange", occasion), *self._parameters.describe()]
        verify_same(
            self.group,
            own + self._parameters.problems(self.optimizer),
            "exchanges of LocalSGD",
            IN_STEP,
        )
        self._parameters.check(self.optimizer)
        self._parameters.unshared.clear()

    def _verify_arguments(self) -> None:
        own = [(n, str(getattr(self, n))) for n in ("every", "delay", "alpha")]
        own.append(("fragments", str(self._count)))
        own += describe(self._parameters.everything, "parameter")
        own += self._parameters.problems(self.optimizer)
        verify_same(self.group, own, "arguments of LocalSGD", REMEDY)
        self._parameters.check(self.optimizer)

    def _take_in_thawed(self) -> None:
        if self._parameters.frozen and self._parameters.activate_thawed():
            for exchange in self._pending:
                exchange.wait()
            self._assign()

    def _assign(self) -> None:
        """Assign active parameters to fragments and buckets."""
        anchors, active = self._parameters.anchors, self._parameters.active
        runs = assign_fragments([anchors[i].nbytes for i in active], self._count)
        self._fragments = [[active[i] for i in run] for run in runs]
        self._buckets = [self._parameters.buckets(indices) for indices in self._fragments]

    # -- saving ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with the parameters, on each rank its own.

        It is the wrapped optimizer's state, with additional entries. Between exchanges the state
        and the parameters differ between ranks.

        Warns:
            NotSavedWarning: The hook's state has no `state_dict`.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        tracked = self._parameters
        saved: dict[str, Any] = self.optimizer.state_dict() | {
            "steps": self.steps,
            "outer": self.outer.state_dict(),
            "anchors": {tracked.names[i]: tracked.anchors[i].clone() for i in tracked.active},
            "hook": save_state(self._hook.state),
            "pending": [
                (e.fragment, e.due, {tracked.names[i]: g for i, g in e.wait().items()})
                for e in self._pending
            ],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned on this rank.

        Raises:
            ArgumentError: The state is of other parameters, or of another optimizer.
        """
        saved = state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(saved))
            saved = saved if changed is None else changed
        if missing := sorted(_OWN - saved.keys()):
            raise ArgumentError(
                f"the saved state lacks {missing}: save all of state_dict() on each rank. To load "
                "the state of another optimizer, use self.optimizer.load_state_dict"
            )
        tracked = self._parameters
        tracked.activate_saved(saved["anchors"])
        self._assign()
        self.steps = saved["steps"]
        self.optimizer.load_state_dict({name: saved[name] for name in saved.keys() - _OWN})
        self.outer.load_state_dict(saved["outer"])
        tracked.load_anchors(saved["anchors"])
        load_state(self._hook.state, saved["hook"])
        numbers = {name: i for i, name in enumerate(tracked.names)}
        self._pending = deque(
            Exchange(fragment, due, gradients={numbers[n]: g.clone() for n, g in found.items()})
            for fragment, due, found in saved["pending"]
        )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        for exchange in self._pending:
            exchange.wait()
        kept = {name: self.__dict__[name] for name in _PICKLED}
        return kept | {"group": name_if_group(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.group = group_from(self.group)
        FaultDomain.of(self.group).connect()


@torch.no_grad()
def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide gradients by the scale, with the rounding of `GradScaler.unscale_`."""
    inverse = scale.double().reciprocal().float().item()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)


_OWN = {"steps", "outer", "anchors", "hook", "pending"}
_PICKLED = (
    "alpha", "delay", "every", "optimizer", "outer", "steps", "_buckets", "_count", "_fragments",
    "_hook", "_parameters", "_pending",
)  # fmt: skip


def diloco(
    optimizer: Optimizer,
    named_parameters: nn.Module | Named,
    *,
    every: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    **others: Any,
) -> LocalSGD:
    """Return a `LocalSGD` whose outer optimizer is SGD with Nesterov momentum (DiLoCo).

    Args:
        optimizer: Optimizer of this rank's steps; AdamW in the paper.
        named_parameters: See `LocalSGD`.
        every: Number of steps between two exchanges.
        lr: Outer learning rate.
        momentum: Outer momentum.
        **others: Other arguments of `LocalSGD`: hook, hook_state, group, fragments, delay, alpha.

    Source:
        DiLoCo, A. Douillard et al., arXiv 2311.08105.
    """
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return LocalSGD(optimizer, named_parameters, every=every, outer=outer, **others)
