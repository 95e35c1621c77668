"""`gradwire doctor` with working backends, with a failing one, and without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradwire.cli import doctor
from gradwire.cli.app import app
from gradwire.cli.doctor import Check

DOCTOR = [sys.executable, "-m", "gradwire", "doctor", "--json"]
NO_NETWORK = ["unshare", "--map-root-user", "--net"]


def found_by(*arguments, before=()):
    ended = subprocess.run(
        [*before, *DOCTOR, *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.stderr == ""
    found = json.loads(ended.stdout)
    assert ended.returncode == bool(found["problems"])
    return {check["name"]: check for check in found["checks"]}, found["problems"]


@pytest.mark.wide
def test_doctor_on_this_machine(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    checks, problems = found_by()
    assert problems == []
    assert list(checks) == ["versions", "cores", "/dev/shm", "shm", "gloo", "nccl"]
    for name in ("shm", "gloo"):
        assert checks[name]["state"] == "ok"
        assert "all_reduce of 40 bytes in " in checks[name]["found"]
    assert checks["nccl"]["state"] in ("ok", "absent")


@pytest.mark.wide
def test_failing_backend_is_reported(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    checks, problems = found_by("--backend", "gloo")
    assert problems == ["gloo"]
    assert "nosuch" in checks["gloo"]["found"]


@pytest.mark.wide
def test_shm_works_without_a_network():
    tried = [*NO_NETWORK, "true"]
    if not shutil.which("unshare") or subprocess.run(tried, check=False).returncode:
        pytest.skip("no namespaces here")
    checks, problems = found_by("--backend", "shm", "--backend", "gloo", before=NO_NETWORK)
    assert checks["shm"]["state"] == "ok"
    assert problems == ["gloo"]


def test_problems_are_listed_at_the_end(monkeypatch):
    trials = {
        "shm": Check("shm", "ok", "all_reduce of 40 bytes in 40 µs, of 16 MiB in 7 ms"),
        "gloo": Check("gloo", "problem", "RuntimeError: [no] interface"),
        "nccl": Check("nccl", "absent", "no GPU"),
    }
    monkeypatch.setattr(doctor, "try_backend", lambda name, nproc: trials[name])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "RuntimeError: [no] interface" in result.stdout
    assert result.stdout.splitlines()[-1] == "Problems: gloo"
    assert len(result.stdout.splitlines()) < 24
    result = CliRunner().invoke(app, ["doctor", "--backend", "shm", "--backend", "nccl"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "No problems."
