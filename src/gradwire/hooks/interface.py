"""Interface of communication hooks: functions (`CommHook`), objects with state, and their results.

The reducer runs every hook as a `StatefulHook`; functions are adapted. As PyTorch's
`CommHookInterface` in C++, it has two parts: one starts communication, the other extracts the
reduced tensor from the result of the communication's future.

A hook returns a future, a tensor or a work handle. `as_future` converts each into a future;
`parse_hook_result` extracts the tensor from its value and checks it against the bucket. `chain`
runs several collectives one after another.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from gradwire.buckets import flatten
from gradwire.errors import ArgumentError, ArgumentTypeError, HookError
from gradwire.hooks.bucket import GradBucket

HookReturn: TypeAlias = "Future[Any] | Tensor | list[Tensor] | Work"
"""Return type of a hook. A future or work handle holds a tensor or a list of one tensor."""


@runtime_checkable
class CommHook(Protocol):
    """Communication hook: a callable that reduces a bucket of local gradients.

    It is called once for each bucket of a backward pass, in the same order on every rank. It
    divides by the world size itself. Functions, `functools.partial` and callable objects are
    accepted.
    """

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Start communicating `bucket`; return a `HookReturn` with a tensor like its buffer."""
        ...


def check_hook(hook: object) -> CommHook:
    """Return the hook after checking that it can be called with a state and a bucket."""
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
    """Return a hook's name for messages."""
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


class GroupName(str):
    """Name of a process group, which replaces the group in a pickle."""

    __slots__ = ()


def name_if_group(value: Any) -> Any:
    """Return the name of a process group; return any other value unchanged."""
    return GroupName(value.group_name) if isinstance(value, ProcessGroup) else value


def group_from(value: Any) -> Any:
    """Return the process group of a `GroupName`; return any other value unchanged."""
    if not isinstance(value, GroupName):
        return value
    return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]


class PicklesGroups:
    """Base of objects whose process groups are replaced by their names in a pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: name_if_group(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: group_from(value) for name, value in state.items()})


S = TypeVar("S")


class StatefulHook(PicklesGroups, ABC, Generic[S]):
    """Communication hook as an object, which also reads its own results.

    Register it without a separate state: `model.register_comm_hook(None, hook)`. Like every hook,
    it divides by the world size itself, and runs once for each bucket, in the same order on every
    rank. It can also be called as a function, and so be passed to `hooks.compress` and
    `hooks.wrap`.

    Args:
        state: State that the hook keeps between steps. `comm_hook_state_dict` saves it. If it is a
            process group, or has one as `process_group`, that group is replaced when the module's
            is.

    Attributes:
        state: See Args.
        single_collective: True if the hook starts exactly one collective for each bucket, before it
            returns. The next bucket then does not wait for this one.
        linear: True if the hook keeps no state and its result is proportional to the bucket.
            Weights are then applied to the result. Otherwise ranks that use weights sum them in one
            small message before the first bucket of each backward pass, and the hook receives
            weighted gradients. Its state then has the same unit in every step.
        averages: True if all ranks of the hook's group receive the same bits, an approximation of
            the mean. With `single_collective`, no rank may then fail after the last bucket's
            collective: the ranks take its end as that of the backward pass. Without, they vote in
            one small message at the end of each backward pass.

    Example:
        The future holds the reduced buffer in half precision; reading converts it to float32.

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

    def __init__(self, state: S) -> None:
        self.state = state

    @abstractmethod
    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Start communicating a bucket of local gradients.

        Returns:
            Preferably a `torch.futures.Future`. Its value is passed to `parse_hook_result`.
        """

    def parse_hook_result(self, result: Any) -> Tensor:
        """Return the reduced buffer from the future's value: a tensor, or a list or tuple of one.

        The reducer then checks its dtype, device and number of elements against the bucket.

        Raises:
            HookError: The value is anything else. Any exception ends the backward pass on all
                ranks.
        """
        return tensor_in(result, self)

    def committed(self) -> None:
        """Update state after a backward pass that has ended on all ranks.

        A backward pass that failed on one rank counts as ended on none. State that decides which
        collectives a hook runs must be updated here, not in `run_hook`: after an error, ranks may
        have run the hook for different numbers of buckets.
        """

    def run_in(self, group: ProcessGroup) -> None:
        """Set the state's group, if it has none, to the group of the module."""
        if getattr(self.state, "process_group", group) is None:  # states of PyTorch's hooks have it
            with suppress(AttributeError):  # a read-only state of the caller's
                self.state.process_group = group  # type: ignore[attr-defined]

    def __call__(self, state: None, bucket: Any, /) -> Any:
        """Run the hook as a function of a state, which is ignored, and a bucket."""
        return self.run_hook(bucket)


class _FunctionHook(StatefulHook[Any]):
    """Adapter for a hook that is a function of a state and a bucket."""

    def __init__(self, state: Any, func: Callable[[Any, Any], Any]) -> None:
        super().__init__(state)
        self.func = func  # `hook_name` looks for an attribute of this name
        of_torch = _name_in_torch(func)
        self.single_collective = getattr(func, "single_collective", False) or bool(of_torch)
        self.averages = getattr(func, "averages", False) or bool(of_torch)
        self.is_mean = getattr(func, "is_mean", False) or of_torch == "allreduce_hook"
        linear = ("allreduce_hook", "bf16_compress_hook")
        self.linear = getattr(func, "linear", False) or of_torch in linear

    def run_in(self, group: ProcessGroup) -> None:
        """Set the state, if it is None, to the group, for a function whose state is a group."""
        if self.state is None and getattr(self.func, "takes_group", False):
            self.state = group
        super().run_in(group)

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        returned: HookReturn = self.func(self.state, bucket)
        return returned


def _name_in_torch(func: Callable[..., Any]) -> str:
    """Return the name of one of PyTorch's hooks with one all_reduce for each bucket, else ""."""
    module = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    names = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
    name = str(getattr(func, "__name__", ""))
    return name if name in names and getattr(func, "__module__", "") == module else ""


Run = Callable[[CommHook, Any, GradBucket], Any]


class DelegatingHook(StatefulHook[Any]):
    """Wrapper of a `StatefulHook` that shares the wrapped hook's state."""

    def __init__(self, hook: StatefulHook[Any]) -> None:
        self.hook = hook
        self.single_collective, self.linear = hook.single_collective, hook.linear

    def committed(self) -> None:
        self.hook.committed()

    def run_in(self, group: ProcessGroup) -> None:
        self.hook.run_in(group)

    @property
    def state(self) -> Any:
        return self.hook.state

    @state.setter
    def state(self, state: Any) -> None:
        self.hook.state = state


class _ComposedHook(DelegatingHook):
    """`StatefulHook` that is run by a function."""

    def __init__(self, run: Run, hook: StatefulHook[Any], *, linear: bool) -> None:
        super().__init__(hook)
        self.run, self.linear = run, linear

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        returned: HookReturn = self.run(self.hook, None, bucket)
        return returned


def compose(run: Run, hook: CommHook, *, linear: bool = False) -> CommHook:
    """Return a hook that runs `run(hook, state, bucket)`, with the inner hook's state."""
    # The result of `run` is read like a function's result. If the inner hook is a `StatefulHook`,
    # `run` must read the inner result with `parse_hook_result(result, bucket, hook)`.
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
    """Return a tensor, or the only tensor in a list or tuple; raise HookError for anything else."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        raise HookError(
            f"hook {hook_name(hook)}: the result is {result!r}: return one tensor, or a list of one"
        )
    return result


def bind_hook(state: Any, hook: object) -> StatefulHook[Any]:
    """Return a hook and its state as one object; return a `StatefulHook` unchanged."""
    checked = check_hook(hook)
    if isinstance(checked, type) and issubclass(checked, StatefulHook):
        raise ArgumentTypeError(f"hook is the class {checked.__qualname__}: pass an instance")
    if not isinstance(checked, StatefulHook):
        return _FunctionHook(state, checked)
    if state is not None and state is not checked.state:
        raise ArgumentError(
            f"state is {state!r}, but hook {hook_name(checked)} has its own state: pass None"
        )
    return checked


def run_in_group(hook: StatefulHook[Any], group: ProcessGroup) -> None:
    """Let a hook without a group run in the group of the module that it is registered for."""
    # Otherwise it would use the default group, whose other ranks may have other modules, and
    # average their gradients with this module's. If the module is in the default group, the hook is
    # not changed, because the default group may be replaced later.
    if not (dist.is_initialized() and group is dist.group.WORLD):
        hook.run_in(group)


def is_mean_over(hook: StatefulHook[Any], group: ProcessGroup) -> bool:
    """Return True if a hook computes what the reducer computes without one."""
    own = group if hook.state is None and group is dist.group.WORLD else hook.state
    return isinstance(hook, _FunctionHook) and hook.is_mean and own is group


def as_future(returned: object, hook: Callable[..., object]) -> torch._C.Future[Any]:
    """Return a future of a hook's return value; raise HookError if that is not a result."""
    if isinstance(returned, torch._C.Future):
        return returned
    if isinstance(returned, Work):
        return returned.get_future()
    if isinstance(returned, Tensor | list | tuple):
        done: Future[Any] = Future()
        done.set_result(returned)
        return done
    raise HookError(
        f"hook {hook_name(hook)} returned {returned!r}: return a torch.futures.Future, a tensor or "
        "a work handle whose result is the reduced buffer"
    )


def after(work: Work | None, result: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
    """Return a future of `result()` after a collective, or of the collective's error."""
    assert work is not None

    def give(done: Future[Any]) -> Tensor:
        done.value()  # raises the collective's error, which would be lost otherwise
        return result()

    def give_in_order(done: Future[Any]) -> Tensor:
        done.value()
        # Gloo's future is done while the copy back to the accelerator still runs: the work, not the
        # future, knows its end
        work.synchronize()
        return result()

    chosen = give if device.type == "cpu" else give_in_order
    future: Future[Tensor] = work.get_future().then(chosen)
    return future


def parse_hook_result(result: object, bucket: GradBucket, hook: Callable[..., object]) -> Tensor:
    """Return the tensor in a hook's result; if dense, 1-d and contiguous, like the buffer."""
    # A `StatefulHook` reads the value itself. For other hooks it is a tensor of any shape and
    # strides, or a list or tuple of one.
    if isinstance(hook, StatefulHook):
        result = hook.parse_hook_result(result)
    result = tensor_in(result, hook)
    buffer = bucket.buffer()
    prefix = f"hook {hook_name(hook)}, bucket {bucket.index()}: the result"
    # Gloo's futures hold the real view that it has sent: real and imaginary parts alternate.
    if buffer.is_complex() and result.dtype == buffer.dtype.to_real():
        result = _as_complex(result, buffer)
    if result.layout != buffer.layout:
        raise HookError(f"{prefix} has layout {result.layout}, the bucket {buffer.layout}")
    if result.dtype != buffer.dtype or result.device != buffer.device:
        raise HookError(
            f"{prefix} is {result.dtype} on {result.device}, the bucket {buffer.dtype} on "
            f"{buffer.device}: convert the result before returning it"
        )
    if result.layout != torch.strided:
        return result
    if result.numel() != buffer.numel():
        raise HookError(
            f"{prefix} has {result.numel()} elements, the bucket has {buffer.numel()}: "
            "return a tensor like its buffer"
        )
    return flatten(result)


def read_future(
    returned: object, bucket: GradBucket, hook: Callable[..., object]
) -> torch._C.Future[Any]:
    """Return a future of a hook's return value, read by the hook if it is a `StatefulHook`."""
    # Used by hooks that run another hook: the reducer reads the results of the outer hook only.
    future = as_future(returned, hook)
    if not isinstance(hook, StatefulHook):
        return future
    return future.then(lambda done: parse_hook_result(done.value(), bucket, hook))


def _as_complex(result: Tensor, buffer: Tensor) -> Tensor:
    """Return pairs of reals as complex numbers of a bucket; return other tensors unchanged."""
    if result.layout != torch.strided or result.numel() != 2 * buffer.numel():
        return result
    pairs = flatten(result)
    if pairs.storage_offset() % 2:  # a complex view needs an even offset
        pairs = pairs.clone()
    return torch.view_as_complex(pairs.view(-1, 2))


_NOT_RUN: list[Sequence[Callable[[Any], Any]]] = []
"""Steps of failed chains. A thread of the backend must not drop them (see `_Chain`)."""

Step: TypeAlias = Callable[[Any], Any]
"""Function of the previous step's value; returns a value, or a future of one."""


def chain(device: torch.device, first: Any, *steps: Step) -> Future[Any]:
    """Run steps in turn, each after the previous one's future; return the future of the last."""
    # `Future.then` would give a future of a future where a callback starts another collective, and
    # a callback that waited for it would block one of the backend's few threads. Here no thread
    # waits: a step runs on the thread that completes the previous future, or on the calling thread
    # if there was no future before it.
    if not isinstance(threading.current_thread(), threading._DummyThread):  # it is Python's own
        _NOT_RUN.clear()
    running = _Chain(device, steps)
    running.advance(first)
    return running.end


class _Chain:
    """Remaining steps of a chain."""

    def __init__(self, device: torch.device, steps: Sequence[Step]) -> None:
        # An accelerator's futures synchronize its streams.
        self.end: Future[Any] = Future(devices=None if device.type == "cpu" else [device])
        # When the future is done, no reference to a step may be left. Steps refer to a process
        # group, whose last reference must not be dropped by a thread of that group: the thread
        # would wait for itself, and the process would be aborted.
        self._steps = list(steps)

    def advance(self, value: Any) -> None:
        """Run steps until one returns a future, or none is left."""
        failure: Exception | None = None
        try:
            while self._steps and not isinstance(value, torch._C.Future):
                value = self._steps.pop(0)(value)
        except Exception as error:
            failure = _without_frames(error)
        if failure is not None:
            self._fail(failure)
        elif isinstance(value, torch._C.Future):
            value.add_done_callback(self._resume)
        else:
            self.end.set_result(value)

    def _resume(self, done: torch._C.Future[Any]) -> None:
        failure: Exception | None = None
        try:
            value = done.value()
        except Exception as error:
            failure = _without_frames(error)
        if failure is not None:
            self._fail(failure)
        else:
            self.advance(value)

    def _fail(self, failure: Exception) -> None:
        if self._steps:
            _NOT_RUN.append(self._steps)
            self._steps = []
        self.end.set_exception(failure)


class _Traceback(Exception):
    """Traceback of an exception as text. Frames would hold references to what steps refer to."""


def _without_frames(error: Exception) -> Exception:
    error.__cause__ = _Traceback("\n" + "".join(traceback.format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)
