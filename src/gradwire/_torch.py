"""Differences between the supported versions of PyTorch, each named by its use.

No other module checks PyTorch's version or the existence of its names. Versions 2.11 to 2.15 are
tested. Features are detected by looking for them, never by comparing version numbers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

# This module keeps the world group of the moment of its first import in its functions' default
# arguments, for good. destroy_process_group() then ends neither the group's threads nor its
# connections: another rank that waits in a collective waits on, and with Gloo a process that exits
# soon may abort. torch's compiler imports it, also for torch's DDP, when there is a group.
if not dist.is_initialized():
    import torch.distributed.nn.functional

NEWEST_TESTED: Final = (2, 15)

Method = TypeVar("Method", bound=Callable[..., Any])


def _first_of(*names: str) -> str:
    return next(name for name in names if hasattr(ProcessGroup, name))


# torch 2.13 gave these methods of a process group new names.
ALL_GATHER_SINGLE: Final = _first_of("all_gather_single", "_allgather_base")
ALL_TO_ALL_SINGLE: Final = _first_of("all_to_all_single", "alltoall_base")
REDUCE_SCATTER_SINGLE: Final = _first_of("reduce_scatter_single", "_reduce_scatter_base")

# Before anybody could put another class in the place of torch's.
TORCHS_DDP: Final = DistributedDataParallel
_DDP_ARGUMENTS: Final = inspect.signature(DistributedDataParallel.__init__).parameters

# torch 2.13 gave DistributedDataParallel's broadcast_buffers another name; None: not given.
BROADCAST_BUFFERS_DEPRECATED: Final = _DDP_ARGUMENTS["broadcast_buffers"].default is None


def narrowed_to_torchs_ddp(base: Callable[..., None]) -> Callable[..., Callable[..., None]]:
    """Return a decorator that limits a constructor to the arguments that this PyTorch's DDP has."""
    # Arguments are passed by name, and only if they are given. Others are refused. The signature
    # has this PyTorch's defaults.
    names = inspect.signature(base).parameters
    signature = inspect.Signature([_DDP_ARGUMENTS[n] for n in names if n in _DDP_ARGUMENTS])

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def narrowed(*args: Any, **kwargs: Any) -> None:
            init(**signature.bind(*args, **kwargs).arguments)

        narrowed.__signature__ = signature  # type: ignore[attr-defined]
        return narrowed

    return decorate


def _can_be_made() -> bool:
    try:
        type("_Probe", (Backend,), {})(0, 1)
    except TypeError:  # PyTorch before 2.14 has no constructor for it
        return False
    return True


PYTHON_BACKENDS: Final = _can_be_made()
"""True if a class written in Python can be a backend of one of PyTorch's own groups."""


def is_done(work: Work) -> bool:
    """Return True if a collective has ended, with or without an error."""
    if work.is_completed():
        return True
    # PyTorch wraps the works of a Python backend in an object that forwards only `wait` and
    # `get_future`: its `is_completed` is always False.
    if not PYTHON_BACKENDS or type(work) is not Work:
        return False
    try:
        return work.get_future().done()
    except RuntimeError:  # a backend that has no futures says itself when it is done
        return False


_NAMES = threading.local()


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Make torch.distributed give this name to the groups that this thread creates."""
    # A group that only its own ranks make has a name with the number of groups that each of them is
    # in or, from 2.15 on, has made: ranks for which it differs wait for each other under different
    # names. From 2.15 on, other ranks have then made fewer, and the next group that all ranks make
    # has different names, too.
    c10d = dist.distributed_c10d
    torchs = c10d._process_group_name
    if not hasattr(torchs, "_gradwire"):

        @functools.wraps(torchs)
        def given_or_torchs(*args: Any, **kwargs: Any) -> Any:
            return getattr(_NAMES, "given", None) or torchs(*args, **kwargs)

        given_or_torchs._gradwire = True  # type: ignore[attr-defined]
        c10d._process_group_name = given_or_torchs
    _NAMES.given = name
    try:
        yield
    finally:
        _NAMES.given = None


def outside_graphs(cls: type[Any]) -> type[Any]:
    """Let torch.compile call a class's methods, and what they call, instead of tracing them."""
    # torch.compiler.disable would do the same, but imports the compiler, which takes a second.
    for base in cls.__mro__:
        for method in vars(base).values():
            if isinstance(method, FunctionType):
                run_as_written(method)
    return cls


def run_as_written(method: Method) -> Method:
    """Let torch.compile call a function, and what that calls, instead of tracing them."""
    return _skipped(method, eval_frame._FrameAction.SKIP)


def compile_callees_only(method: Method) -> Method:
    """Let torch.compile run a function as it is, and compile what that calls."""
    return _skipped(method, eval_frame._FrameAction.DEFAULT)


def _skipped(method: Method, below: eval_frame._FrameAction) -> Method:
    assert isinstance(method, FunctionType)
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, below)
    eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return method


def in_compiled_autograd() -> bool:
    """Return True if the running backward was traced by compiled autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # imported by who uses it
    return module is not None and bool(module.in_compiled_autograd_region)


@functools.cache
def analysed_backend() -> str:
    """Return a backend name that this PyTorch's flight-record analyzer knows: Gloo, since 2.13."""
    from torch.distributed.flight_recorder.components.types import Op

    event = dict.fromkeys(_ANALYSED) | {"profiling_name": "gloo:all_reduce"}
    try:
        Op(event | {"process_group": ("", "")}, {"": {0}}, "")
    except AssertionError:
        return "nccl"
    return "gloo"


_ANALYSED = (
    "collective_seq_id",
    "input_dtypes",
    "input_sizes",
    "output_dtypes",
    "output_sizes",
    "p2p_seq_id",
    "state",
    "time_created_ns",
)


def torchs_flight_records(*, stacks: bool = True) -> list[bytes]:
    """Return the pickled flight records of PyTorch: Gloo's, and NCCL's if it is in use."""
    # Resolving the calls' stacks takes most of a second the first time.
    c10d = torch._C._distributed_c10d
    found = []
    if hasattr(c10d, "_dump_fr_trace"):
        found.append(c10d._dump_fr_trace(includeStackTraces=stacks))
    uses_nccl = any("nccl" in str(b) for b, _ in dist.distributed_c10d._world.pg_map.values())
    if uses_nccl and hasattr(c10d, "_dump_nccl_trace"):
        found.append(c10d._dump_nccl_trace(includeStackTraces=stacks))
    return found


def warn_if_untested(stacklevel: int = 2) -> None:
    """Warn if this PyTorch is newer than those that were tested, or Python has no GIL."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"gradwire was tested with PyTorch up to {newest}, this is {torch.__version__}: if "
            "something fails, upgrade gradwire",
            stacklevel=stacklevel + 1,
        )
    has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)  # Python 3.13
    if not has_gil():
        warnings.warn(
            "gradwire was not tested without Python's GIL, and counts on it where it counts "
            "references to gradients: set PYTHON_GIL=1",
            stacklevel=stacklevel + 1,
        )


def nested_forward_mode() -> AbstractContextManager[None]:
    """Enable forward mode inside a function's `jvp`, for nested forward mode."""
    # PyTorch calls a `jvp` with forward mode disabled: in `jacfwd` of `jacfwd`, its own operations
    # would be constant for the outer transform. Saved tensors still carry the inner transform's
    # tangents: remove those first.
    return forward_ad._set_fwd_grad_enabled(True)
