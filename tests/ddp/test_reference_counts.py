"""Counts of references are measured alike, whatever the context of the first import."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.ddp.buckets import ownership


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


CONTEXTS = {
    "none": nullcontext,
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
    "functions": Functions,
    "dispatches": Dispatches,
    "autocast": lambda: torch.autocast("cpu"),
}
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(2)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 2)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),)),
}


def measure():
    return ownership._references()


def expect_the_same(counts):
    assert counts == (ownership.INCOMING_REFERENCES, ownership.BASE_REFERENCES)
    assert all(1 < count < 10 for count in counts)


@pytest.mark.parametrize("context", CONTEXTS)
def test_counts_in_contexts(context):
    with CONTEXTS[context]():
        counts = measure()
    expect_the_same(counts)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_counts_in_transforms(transform):
    found = []

    def function(x):
        found.append(measure())
        return x.sum()

    TRANSFORMS[transform](function)
    expect_the_same(found[0])


def test_counts_while_a_debugger_traces():
    before = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        counts = measure()
    finally:
        sys.settrace(before)
    expect_the_same(counts)
