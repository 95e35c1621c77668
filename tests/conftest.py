"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from gradwire.testing import run_ranks
from gradwire.testing.pool import close_pool


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    """The processes that `run_ranks` keeps end with the session, not after it."""
    yield
    close_pool()


@pytest.fixture(params=["gloo", "shm"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once on each backend: its module's `run_ranks` has it as the default."""
    backend: str = request.param
    monkeypatch.setattr(request.module, "run_ranks", partial(run_ranks, backend=backend))
    return backend
