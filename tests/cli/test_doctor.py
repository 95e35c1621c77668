"""`gradwire doctor` with working backends, with failing ones, and without a network."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradwire._processes import ENDED, state_of_pid
from gradwire.cli.app import app
from gradwire.cli.doctor import checks, command, trial
from gradwire.cli.doctor.trial import OPS, Trial, try_backend

DOCTOR = [sys.executable, "-m", "gradwire", "doctor", "--json"]
NO_NETWORK = ["unshare", "--map-root-user", "--net"]


def found_by(*arguments, before=()):
    ended = subprocess.run(
        [*before, *DOCTOR, *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.stderr == ""
    found = json.loads(ended.stdout)
    assert ended.returncode == bool(found["problems"])
    return {each["backend"]: each for each in found["backends"]}, found["problems"]


@pytest.mark.wide
def test_sigterm_leaves_no_process_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    doctor = subprocess.Popen([*DOCTOR, "--backend", "gloo"], stdout=subprocess.PIPE)
    try:
        children, end = (
            Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children"),
            time.monotonic() + 60,
        )
        while len(children.read_text().split()) < 3:  # two ranks, and Python's resource tracker
            assert time.monotonic() < end
            time.sleep(0.02)
        left = [int(pid) for pid in children.read_text().split()]
        doctor.terminate()
        assert doctor.wait(30) == 128 + signal.SIGTERM
        while any(state_of_pid(pid) not in ENDED for pid in left):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not list(tmp_path.glob("gradwire-doctor-*"))
    finally:
        doctor.kill()
        doctor.communicate()


@pytest.mark.wide
def test_doctor_on_this_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    backends, problems = found_by()
    assert problems == []
    for name in ("shm", "gloo"):
        assert backends[name]["works"]
        assert backends[name]["gradients"] == [len(OPS), len(OPS)]
        assert backends[name]["latency_us"] > 0 < backends[name]["bandwidth_mb"]
    assert backends["nccl"]["works"] or not backends["nccl"]["tried"]


@pytest.mark.wide
def test_failing_backend_is_reported(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    backends, problems = found_by("--backend", "gloo")
    assert problems == ["gloo", "interface"]
    assert not backends["gloo"]["works"]
    assert "nosuch" in backends["gloo"]["reason"]


@pytest.mark.wide
def test_shm_works_without_a_network(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    tried = [*NO_NETWORK, "true"]
    if not shutil.which("unshare") or subprocess.run(tried, check=False).returncode:
        pytest.skip("no namespaces here")
    options = ("--backend", "shm", "--backend", "gloo", "--no-gradients")
    backends, problems = found_by(*options, before=NO_NETWORK)
    assert backends["shm"]["works"]
    assert not backends["gloo"]["works"]
    assert backends["gloo"]["reason"]
    assert set(problems) == {"gloo", "interface"}


def test_every_differentiable_op_is_checked():
    from gradwire import collectives

    others = {"Handle", "all_gather_object", "barrier", "checks", "recv", "send", "tie"}
    same_on_all_ranks = {"invariant", "vary"}  # finite differences change only one rank
    named = {name.split(" ")[0] for name in OPS}
    assert named == set(collectives.__all__) - others - same_on_all_ranks


def test_output_fits_one_screen(monkeypatch):
    trials = {
        "shm": Trial("shm", True, latency_us=40, bandwidth_mb=5000, gradients=(28, 28)),
        "gloo": Trial("gloo", reason="RuntimeError: no interface"),
        "nccl": Trial("nccl", reason="no GPU", tried=False),
    }
    monkeypatch.setattr(command, "try_backend", lambda name, nproc, gradients: trials[name])
    monkeypatch.setattr(command, "run_checks", lambda nproc: [checks._versions()])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) < 24
    assert "28 of 28" in result.stdout
    assert "gloo: RuntimeError: no interface" in result.stdout
    assert lines[-1] == "Problems: gloo"
    del trials["gloo"].reason
    monkeypatch.setattr(command, "BACKENDS", ("shm", "nccl"))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    trials["shm"].wrong = {"all_reduce": "GradientError: wrong"}
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_few_open_files_few_cores_and_little_memory(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 4096))
    assert checks._descriptors(2).state == checks.BAD
    assert "ulimit -n 4096" in checks._descriptors(2).remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, resource.RLIM_INFINITY))
    assert "ulimit -n 4096" in checks._descriptors(2).remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    assert "raise the hard limit" in checks._descriptors(2).remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert checks._descriptors(2).state == checks.GOOD
    monkeypatch.setattr(checks, "cores", lambda: 2.0)
    assert checks._cores(2).state == checks.GOOD
    assert checks._cores(3).state == checks.WARN
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "4 threads on 2 cores" in checks._threads(2).remedy

    def none_left(size):
        raise MemoryError("the host leaves 5 bytes")

    monkeypatch.setattr(checks, "check_available", none_left)
    assert checks._memory().found == "the host leaves 5 bytes"


def test_missing_temporary_folder_is_reported(monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    assert checks._temporary().state == checks.GOOD
    monkeypatch.setattr(checks.tempfile, "gettempdir", none)
    assert checks._temporary().state == checks.BAD
    assert "TMPDIR" in checks._temporary().remedy


def test_interface_of_gloo(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(checks, "_interfaces", lambda: [("lo", "127.0.0.1"), ("e0", "10.0.0.2")])
    monkeypatch.setattr(checks, "_address_of_host", lambda: "10.0.0.2")
    assert "Gloo binds to e0 (10.0.0.2)" in checks._interface().found
    monkeypatch.setattr(checks, "_address_of_host", lambda: "10.9.9.9")
    assert checks._interface().state == checks.WARN
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "e1")
    assert checks._interface().state == checks.BAD
    monkeypatch.setattr(checks, "_interfaces", list)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert checks._interface().found == "no interface is up"


def test_host_name_that_does_not_resolve(monkeypatch):
    def fail(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    found = checks._name_lookup()
    assert found.state == checks.WARN
    assert "/etc/hosts" in found.remedy


def test_failure_under_load_is_unclear(monkeypatch):
    failed = Trial("gloo", reason="RuntimeError: timeout")
    monkeypatch.setattr(trial, "cores", lambda: 2.0)
    monkeypatch.setattr(trial.os, "getloadavg", lambda: (0.5, 0, 0))
    assert trial._unless_busy(failed, 2) == failed
    monkeypatch.setattr(trial.os, "getloadavg", lambda: (7.0, 0, 0))
    found = trial._unless_busy(failed, 2)
    assert found.busy
    assert "RuntimeError: timeout; the load average was 7.0 on 2 cores" in found.reason
    assert not trial._unless_busy(Trial("gloo", works=True), 2).busy
    monkeypatch.setattr(command, "try_backend", lambda name, nproc, gradients: found)
    monkeypatch.setattr(command, "run_checks", lambda nproc: [])
    assert "unclear" in CliRunner().invoke(app, ["doctor", "--backend", "gloo"]).stdout
    monkeypatch.setattr(checks, "cores", lambda: 2.0)
    assert checks._load().state == checks.WARN


def test_backend_of_a_plain_program(monkeypatch):
    monkeypatch.delenv("GRADWIRE_BACKEND", raising=False)
    assert 'init_process_group("gloo") uses Gloo' in checks._default_backend().found
    monkeypatch.setenv("GRADWIRE_BACKEND", "shm")
    monkeypatch.setattr(checks, "_autoload", lambda: checks.Check("import torch", checks.GOOD, ""))
    assert "uses shm" in checks._default_backend().found
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.undo()


def test_unavailable_backend_is_not_tried(monkeypatch):
    monkeypatch.setattr(trial.dist, "is_backend_available", lambda name: False)
    assert try_backend("nccl", 2) == Trial(
        "nccl", reason="this build of PyTorch lacks it", tried=False
    )
