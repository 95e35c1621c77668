"""Fixtures of the tests of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest

from ddp import common
from gradwire.ddp.faults import error_channel


def _with_quick_polls(fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fn)
    def main(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(error_channel, "POLL_SECONDS", 0.02)
            return fn(*args)

    return main


@pytest.fixture
def quick_polls(
    each_backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks ask for each other's errors ten times as often: tests of errors end sooner."""
    run_ranks = request.module.run_ranks
    monkeypatch.setattr(
        request.module,
        "run_ranks",
        lambda fn, *args, **kw: run_ranks(_with_quick_polls(fn), *args, **kw),
    )


@pytest.fixture
def same_as_one_process(each_backend: str) -> Callable[..., None]:
    """The oracle of `ddp.common`, on each backend."""
    return partial(common.same_as_one_process, backend=each_backend)
