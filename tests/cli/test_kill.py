"""`gradwire demo --kill`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(*arguments: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "demo", "--kill", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.wide
@pytest.mark.timeout(250)
def test_processes_are_killed_and_the_parameters_are_equal() -> None:
    done = run("--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert "equal, bit for bit" in done.stdout
    assert "SIGKILL" in done.stdout, done.stdout


@pytest.mark.wide
def test_options_that_do_not_go_with_it_are_refused() -> None:
    done = run("--hook", "fp16")
    assert done.returncode == 2
    assert "--kill adds gradients in its own tree" in done.stderr
