"""The mark `on_ranks`: run a test's function on each rank of a group."""

from __future__ import annotations

import pytest

from gradwire.testing import run_ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "on_ranks(world_size, **options): run the function by `run_ranks`, on shm"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    args = tuple(pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames)
    options = {"backend": "shm", "timeout": 60, **mark.kwargs}
    run_ranks(pyfuncitem.obj, *mark.args, args=args, **options)
    return True
