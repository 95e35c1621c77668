"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.testing.pool import close_pool


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    """The processes that `run_ranks` keeps end with the session, not after it."""
    yield
    close_pool()
