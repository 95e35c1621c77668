"""StatefulHook: a communication hook and its state in one object, as the reducer runs it.

The interface has two parts, as `CommHookInterface` of PyTorch's C++ has: one starts communication,
the other takes the reduced tensor out of what the communication's future holds. Functions are
adapted to it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from gradwire.errors import ArgumentError, ArgumentTypeError, HookError
from gradwire.hooks.bucket import GradBucket

HookReturn: TypeAlias = "Future[Any] | Tensor | list[Tensor] | Work"
"""What a hook may return: of a future or a work handle, the result is a tensor or a list of one."""


@runtime_checkable
class CommHook(Protocol):
    """A communication hook: takes a bucket of local gradients, gives the reduced ones.

    Called once for each bucket of a backward, in the same order on every rank. It divides by the
    world size itself. Functions, `functools.partial` and callable objects will do.
    """

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Start communicating `bucket`; return a `HookReturn` with a tensor like its buffer."""
        ...


def check_hook(hook: object) -> CommHook:
    """The hook, if it can be called with a state and a bucket.

    Raises:
        ArgumentTypeError: Not callable, a coroutine function, or with other parameters.
    """
    if not callable(hook):
        raise ArgumentTypeError(f"hook is {hook!r}: pass a callable hook(state, bucket)")
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
        raise ArgumentTypeError(
            f"hook {hook_name(hook)} is a coroutine function: return a torch.futures.Future instead"
        )
    try:
        inspect.signature(hook).bind(None, None)
    except ValueError:
        return hook  # a built-in without a signature
    except TypeError as error:
        raise ArgumentTypeError(
            f"hook {hook_name(hook)} cannot be called as hook(state, bucket): {error}"
        ) from None
    return hook


def hook_name(hook: Callable[..., object]) -> str:
    """A hook's name for messages."""
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


class GroupName(str):
    """Stands for a process group in a pickle."""

    __slots__ = ()


def name_if_group(value: Any) -> Any:
    """A group's name in its place; anything else as it is."""
    return GroupName(value.group_name) if isinstance(value, ProcessGroup) else value


def group_from(value: Any) -> Any:
    """The group that a name stands for, where the pickle is read; anything else as it is."""
    if not isinstance(value, GroupName):
        return value
    return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]


S = TypeVar("S")


class StatefulHook(ABC, Generic[S]):
    """A communication hook as an object, which also reads its own results.

    Register it without another state: `model.register_comm_hook(None, hook)`. As every hook, it
    divides by the world size itself, and runs once for each bucket, in the same order on every
    rank. It can be called as a function, too, and so be given to `hooks.compress` and
    `hooks.wrap`.

    Args:
        state: What the hook keeps: saved by `comm_hook_state_dict`, and exchanged where it is, or
            has as `process_group`, a group that is replaced.

    Attributes:
        state: The same.
        single_collective: Whether each bucket has one collective, which is started at once: the
            next bucket then need not wait for it.
        linear: Whether the hook keeps nothing and its result grows in proportion to the bucket, so
            that weights may be applied to the result. Otherwise the ranks add up their weights
            before the first bucket of each backward, in one small message, and the hook gets
            gradients that are weighted already. What it keeps then has the same unit in each step.
        withdrawn: Whether the mean is to be computed without a hook from the next step on; from
            the same step on on all ranks.

    Example:
        The future holds what was reduced in half precision; it becomes float32 when it is read.

        >>> import torch
        >>> import torch.distributed as dist
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> class Half(StatefulHook[dist.ProcessGroup]):
        ...     single_collective = True
        ...     def run_hook(self, bucket):
        ...         half = (bucket.buffer() / self.state.size()).half()
        ...         return dist.all_reduce(half, group=self.state, async_op=True)
        ...     def parse_hook_result(self, result):
        ...         return super().parse_hook_result(result).float()
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, Half(dist.group.WORLD))
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)
        [1.5, 1.5]
    """

    single_collective: bool = False
    linear: bool = False
    averages: bool = False
    withdrawn: bool = False

    def __init__(self, state: S) -> None:
        self.state = state

    @abstractmethod
    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Start communicating a bucket of local gradients.

        Returns:
            Best a `torch.futures.Future`; what it holds goes to `parse_hook_result`.
        """

    def parse_hook_result(self, result: Any) -> Tensor:
        """The reduced buffer in what the future held: a tensor, or a list or tuple of one.

        The reducer then compares it with the bucket: dtype, device and number of elements.

        Raises:
            HookError: No such thing. Whatever it raises ends the backward on all ranks.
        """
        return tensor_in(result, self)

    def committed(self) -> None:
        """A backward has ended on all ranks: one that failed on a rank has ended on none.

        What decides which collectives a hook runs must be counted here, not when buckets come:
        after an error, ranks may have come to different ones.
        """

    def run_in(self, group: ProcessGroup) -> None:
        """Use a group where the state has none: that of the module which the hook is for."""
        if getattr(self.state, "process_group", group) is None:  # PyTorch's own have it, too
            with suppress(AttributeError):  # a caller's state that cannot be changed: its own
                self.state.process_group = group  # type: ignore[attr-defined]

    def __call__(self, state: None, bucket: Any, /) -> Any:
        """Run as a function of a state, which is None, and a bucket."""
        return self.run_hook(bucket)

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})


class _FunctionHook(StatefulHook[Any]):
    """A hook that is a function of a state and a bucket."""

    def __init__(self, state: Any, func: Callable[[Any, Any], Any]) -> None:
        super().__init__(state)
        self.func = func  # by this name `hook_name` finds the function's
        self.single_collective = getattr(func, "single_collective", False)
        self.linear = getattr(func, "linear", False) or _is_linear_of_torchs(func)

    def run_in(self, group: ProcessGroup) -> None:
        """Use a group where there is no state, and the function takes a group as its state."""
        if self.state is None and getattr(self.func, "takes_group", False):
            self.state = group
        super().run_in(group)

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Calls the function."""
        returned: HookReturn = self.func(self.state, bucket)
        return returned


def _is_linear_of_torchs(func: Callable[..., Any]) -> bool:
    module = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    names = ("allreduce_hook", "bf16_compress_hook")
    return getattr(func, "__module__", "") == module and getattr(func, "__name__", "") in names


Run = Callable[[CommHook, Any, GradBucket], Any]


class DelegatingHook(StatefulHook[Any]):
    """A wrapper of a `StatefulHook`, whose state is that hook's."""

    def __init__(self, hook: StatefulHook[Any]) -> None:
        self.hook = hook
        self.single_collective, self.linear = hook.single_collective, hook.linear

    def committed(self) -> None:
        """Tells the inner hook."""
        self.hook.committed()

    def run_in(self, group: ProcessGroup) -> None:
        """Tells the inner hook."""
        self.hook.run_in(group)

    @property
    def state(self) -> Any:
        """The inner hook's."""
        return self.hook.state

    @state.setter
    def state(self, state: Any) -> None:
        self.hook.state = state


class _ComposedHook(DelegatingHook):
    """A function that wraps a `StatefulHook`."""

    def __init__(self, run: Run, hook: StatefulHook[Any], *, linear: bool) -> None:
        super().__init__(hook)
        self.run, self.linear = run, linear

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Calls the function with the hook."""
        returned: HookReturn = self.run(self.hook, None, bucket)
        return returned


def compose(run: Run, hook: CommHook, *, linear: bool = False) -> CommHook:
    """Return a hook that runs `run(hook, state, bucket)`, with the inner hook's state.

    What `run` returns is read as a function's result: where the inner hook reads its results
    itself, `run` lets it, by `parse_hook_result(result, bucket, hook)`.

    Args:
        run: Function that runs the inner hook.
        hook: Inner hook.
        linear: Whether the result is linear, as `StatefulHook` has it, if the inner hook is.

    Raises:
        ArgumentTypeError: Not a hook.
    """
    check_hook(hook)
    linear = linear and bind_hook(None, hook).linear
    if isinstance(hook, StatefulHook):
        return _ComposedHook(run, hook, linear=linear)

    def composed(state: Any, bucket: GradBucket) -> Any:
        return run(hook, state, bucket)

    composed.single_collective = getattr(hook, "single_collective", False)  # type: ignore[attr-defined]
    composed.takes_group = getattr(hook, "takes_group", False)  # type: ignore[attr-defined]
    composed.linear = linear  # type: ignore[attr-defined]
    return composed


def tensor_in(result: Any, hook: Callable[..., object]) -> Tensor:
    """A tensor, or the only element of a list or tuple; raises HookError for anything else."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        raise HookError(
            f"hook {hook_name(hook)}: the result is {result!r}: give one tensor, or a list of one"
        )
    return result


def bind_hook(state: Any, hook: object) -> StatefulHook[Any]:
    """A hook and its state as one object; a `StatefulHook` is one already.

    Raises:
        ArgumentTypeError: Not a hook.
        ArgumentError: A `StatefulHook` is given another state than its own.

    Example:
        >>> from gradwire.testing import FakeBucket
        >>> import torch
        >>> bind_hook(3, lambda state, bucket: bucket.buffer() * state).run_hook(
        ...     FakeBucket(torch.ones(2))
        ... )
        tensor([3., 3.])
    """
    checked = check_hook(hook)
    if isinstance(checked, type) and issubclass(checked, StatefulHook):
        raise ArgumentTypeError(f"hook is the class {checked.__qualname__}: pass an instance")
    if not isinstance(checked, StatefulHook):
        return _FunctionHook(state, checked)
    if state is not None and state is not checked.state:
        raise ArgumentError(
            f"state is {state!r}, and hook {hook_name(checked)} has a state of its own: pass None"
        )
    return checked


def run_in_group(hook: StatefulHook[Any], group: ProcessGroup) -> None:
    """Let a hook run in the group of what it is registered for, where the caller names none.

    A hook without a group uses the default one, whose other ranks may have other modules: it would
    average their gradients with this one's. One that is in the default group is left alone, as the
    next default group may be another.
    """
    if not (dist.is_initialized() and group is dist.group.WORLD):
        hook.run_in(group)
