"""Counts of references are measured alike, whatever the context of the first import."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from gradwire.ddp.buckets import ownership


def within(context):
    def call(function):
        with context():
            function(torch.ones(()))

    return call


def traced(function):
    """As by a debugger."""
    before = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        function(torch.ones(()))
    finally:
        sys.settrace(before)


CONTEXTS = {
    "none": lambda f: f(torch.ones(())),
    "inference mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "default device": within(lambda: torch.device("meta")),
    "fake tensors": within(FakeTensorMode),
    "functions": within(BaseTorchFunctionMode),
    "dispatches": within(BaseTorchDispatchMode),
    "autocast": within(lambda: torch.autocast("cpu")),
    "grad": lambda f: torch.func.grad(f)(torch.ones(2)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 2)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),)),
    "debugger": traced,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("context", CONTEXTS)
def test_counts_in_contexts(context):
    found = []

    def measure(x):
        found.extend(ownership._references())
        return x.sum()

    CONTEXTS[context](measure)
    assert found == [ownership.INCOMING_REFERENCES, ownership.BASE_REFERENCES]
    assert all(1 < count < 10 for count in found)
