"""Replicas run in threads, in the caller's modes, and fail with their own exceptions."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.devices import parallel_apply
from gradwire.errors import ArgumentError, NotSupportedError


class Odd(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code


def test_inputs_are_tuples_lists_or_the_only_argument() -> None:
    layers = [nn.Linear(10, 5), nn.Linear(10, 5)]
    given = [torch.randn(2, 10), torch.randn(2, 10)]
    expected = [layer(t) for layer, t in zip(layers, given, strict=True)]
    for inputs in ([(t,) for t in given], [[t] for t in given], given):
        for result, right in zip(parallel_apply(layers, inputs), expected, strict=True):
            assert torch.equal(result, right)
    named = parallel_apply(layers, [()] * 2, [{"input": t} for t in given])
    assert torch.equal(named[1], expected[1])


def test_replicas_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=30)
    assert len(parallel_apply([lambda _: barrier.wait()] * 4, [0] * 4)) == 4


def test_modes_are_carried_over() -> None:
    name = contextvars.ContextVar("name", default="unset")

    def modes(_: Any) -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            torch.is_autocast_cache_enabled(),
            name.get(),
        )

    name.set("ours")
    contexts = [
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
    ]
    for context in contexts:
        with context:
            assert parallel_apply([modes] * 3, [None] * 3) == [modes(None)] * 3
    with torch.autocast("cpu", torch.bfloat16):
        results = parallel_apply([nn.Linear(3, 3)] * 2, [torch.randn(2, 3)] * 2)
    assert [r.dtype for r in results] == [torch.bfloat16] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_exception_is_raised_unchanged(failing: int) -> None:
    ended = []

    def run(i: int) -> None:
        ended.append(i)
        if i >= failing:
            raise {0: KeyError("wonderful"), 1: Odd(7, "odd"), 2: SystemExit("bad")}[i]

    with pytest.raises((KeyError, Odd, SystemExit)) as caught:
        parallel_apply([run] * 3, [0, 1, 2])
    error = caught.value
    assert type(error) is [KeyError, Odd, SystemExit][failing]
    assert error.args == [("wonderful",), (7, "odd"), ("bad",)][failing]
    assert error.__notes__ == [f"Caught {type(error).__name__} in replica {failing} on no device"]
    assert sorted(ended) == [0, 1, 2]
    assert "run" in {frame.name for frame in caught.traceback}


def test_no_reference_cycles() -> None:
    def fail(_: int) -> None:
        raise ValueError("no")

    gc.collect()
    gc.disable()
    try:
        for call in (torch.sin, fail):
            with contextlib.suppress(ValueError):
                parallel_apply([call] * 2, [torch.ones(1)] * 2)
            assert gc.collect() == 0
    finally:
        gc.enable()


def test_several_calls_inside_transforms_are_refused() -> None:
    """Their threads do not have the transform: what ran there had no gradient."""

    def total(x: torch.Tensor, calls: int) -> torch.Tensor:
        return sum(y.sum() for y in parallel_apply([torch.exp] * calls, [x] * calls))

    x = torch.randn(3)
    message = r"parallel_apply of 2 modules inside torch\.func transforms.*: apply the transform "
    with pytest.raises(NotSupportedError, match=message):
        torch.func.grad(total)(x, 2)
    torch.testing.assert_close(torch.func.grad(total)(x, 1), x.exp())


def test_lengths_must_match() -> None:
    with pytest.raises(ArgumentError, match="inputs has 1 entries, modules has 2"):
        parallel_apply([torch.sin] * 2, [1])
    with pytest.raises(ArgumentError, match="kwargs has 1 entries, modules has 2"):
        parallel_apply([torch.sin] * 2, [1, 1], [{}])
    with pytest.raises(ArgumentError, match="devices has 1 entries, modules has 2"):
        parallel_apply([torch.sin] * 2, [1, 1], devices=["cpu"])
    assert parallel_apply([], []) == []
