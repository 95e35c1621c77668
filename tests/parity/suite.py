"""One test of PyTorch's own distributed suite, on this rank, with PyTorch's DDP or with gradwire's.

The suite (`torch.testing._internal.distributed.distributed_test`) starts processes for each test
and skips most of them without accelerators. Here the ranks are those of `run_ranks`, and the CPU
stands in for every accelerator: `.cuda()` is the tensor itself, and a rank's device is the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gradwire import compat

ABOUT = ("DistributedDataParallel", "DDP", "_broadcast_coalesced", "_compute_bucket_assignment")
"""A test is about data parallelism if it, or a helper that it calls, mentions one of these."""
FACTORIES = (
    "arange empty eye full ones ones_like rand rand_like randint randn randn_like tensor zeros "
    "zeros_like as_tensor empty_like full_like"
)
CUDA = {
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: contextlib.nullcontext(),
    "stream": lambda stream: contextlib.nullcontext(),
    "device": lambda device: contextlib.nullcontext(),
    "device_count": lambda: int(os.environ["WORLD_SIZE"]),
}


def run(name: str, side: str, scratch: str) -> tuple[str, str]:
    """Run a test on this rank: ("passed", "") or ("skipped", the reason); a failure is raised."""
    from torch.testing._internal import common_distributed, common_utils

    suite = load(side)
    common_utils.set_rng_seed()
    os.environ["TEMP_DIR"] = scratch
    suite.Barrier.barrier_id = 0
    case = the_class()(name)
    case.rank = torch.distributed.get_rank()
    case.file_name = os.path.join(scratch, "file")
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        for skip in common_distributed.TEST_SKIPS.values():
            if skip.exit_code == end.code:
                return "skipped", skip.message
        raise
    case._barrier(timeout=60)
    return "passed", ""


@functools.cache
def load(side: str) -> ModuleType:
    """The suite's module in this process, with a side's DistributedDataParallel in it."""
    if side == "gradwire":
        compat.install()
    no_test_asks_for_accelerators()
    torch.manual_seed(0)  # the suite makes its models when it is imported: the same on every rank
    from torch.testing._internal.distributed import distributed_test

    cpu_stands_in()
    return distributed_test


@functools.cache
def the_class() -> Any:
    """The suite's tests as a class that can be made without starting processes."""
    from torch.testing._internal.distributed import distributed_test as suite

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    return Tests


def names() -> list[str]:
    import ast
    import inspect

    from torch.testing._internal.distributed import distributed_test as suite

    tree = ast.parse(inspect.getsource(suite))
    (base,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    )
    methods = {node.name: ast.unparse(node) for node in base.body if hasattr(node, "name")}
    about = {name for name, text in methods.items() if any(word in text for word in ABOUT)}
    while found := {
        name
        for name, text in methods.items()
        if name not in about and any(f"self.{other}(" in text for other in about)
    }:
        about |= found
    return [name for name in methods if name in about and name.startswith("test_")]


def no_test_asks_for_accelerators() -> None:
    """Let tests run that would be skipped for want of one; before the suite is imported."""
    from torch.testing._internal import common_distributed as common

    def always(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common.skip_if_lt_x_gpu = common.nccl_skip_if_lt_x_gpu = always
    common.skip_if_no_gpu = lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {r: [r] for r in range(world_size)}


def cpu_stands_in() -> None:
    """Make the CPU take the place of every accelerator; TorchScript must have seen torch before."""
    for name in FACTORIES.split():
        setattr(torch, name, without_device(getattr(torch, name)))
    torch.ones = with_small_pictures(torch.ones)
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *args, **kwargs: self
        kind.to = moving_nowhere(kind.to)
    module = torch.nn.parallel.DistributedDataParallel
    module.__init__ = on_the_cpu(module.__init__)


def is_device(value: object) -> bool:
    if isinstance(value, str | torch.device):
        return torch.device(value).type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def without_device(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, with accelerators taken out of its arguments."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if is_device(kwargs.get("device")):
            del kwargs["device"]
        return factory(*args, **kwargs)

    return make


def with_small_pictures(ones: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.ones` with fewer pixels: test_ddp_uneven_inputs would take half an hour on a CPU."""

    @functools.wraps(ones)
    def make(*size: Any, **kwargs: Any) -> Any:
        return ones(*(1, 1, 40, 40) if size == (1, 1, 1000, 1000) else size, **kwargs)

    return make


def moving_nowhere(to: Callable[..., Any]) -> Callable[..., Any]:
    """`.to` with accelerators taken out of its arguments."""

    @functools.wraps(to)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_device(kwargs.get("device")):
            del kwargs["device"]
        return (
            to(self, *(a for a in args if not is_device(a)), **kwargs) if args or kwargs else self
        )

    return move


def on_the_cpu(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        init(self, *args[:1], *(None for _ in args[1:3]), *args[3:], **kwargs)

    return construct
