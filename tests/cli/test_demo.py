"""The demo: completed, interrupted, and with wrong results."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal

import pytest

from gradwire import hooks
from gradwire.cli.demo import TOLERANCE, failures, report
from gradwire.cli.demo_training import Result, run
from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks

FOREVER = ("-m", "gradwire", "demo", "--epochs", "100000")
FIRST_EPOCH = "1/100000 "
RIGHT = Result(b"a1", 2e-7)


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_two_processes_match_one_process(command, backend):
    demo = command("-m", "gradwire", "demo", "--epochs", "1", "--backend", backend)
    code, out, err = demo.end()
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    (loss, accuracy, difference) = next(line[1:] for line in lines if line[:1] == ["1/1"])
    assert float(loss) < 2
    assert float(accuracy.rstrip("%")) > 80
    assert 0 < float(difference) < 1e-5  # two ranks and one process round differently
    assert "parameters in all processes      equal, bit for bit" in out
    assert "rounding\n" in out
    assert not demo.survivors()


ENDS = {  # what ends the demo, its exit code, and what it says
    "Ctrl-C": (
        lambda demo: os.killpg(demo.process.pid, signal.SIGINT),  # like a terminal
        130,
        "Interrupted; every process of the demo has been stopped.\n",
    ),
    "death of a rank": (
        lambda demo: os.kill(demo.ranks()[-1], signal.SIGKILL),
        1,
        r"(?s)gradwire demo: fn failed on rank.*was killed by SIGKILL.*",
    ),
    "death": (lambda demo: demo.process.kill(), -signal.SIGKILL, "(?s).*"),
}


@pytest.mark.wide
@pytest.mark.parametrize("how", ENDS)
def test_no_process_outlives_the_demo(command, how):
    demo, (end, code, said) = command(*FOREVER), ENDS[how]
    demo.read_until(FIRST_EPOCH)
    assert len(demo.ranks()) == 2
    end(demo)
    found, _, err = demo.end()
    assert found == code
    assert re.fullmatch(said, err), err
    assert not demo.survivors()


@pytest.mark.wide
@pytest.mark.parametrize("lost_in_step", [3, 44])
def test_lost_half_bucket_in_one_step_exceeds_rounding(lost_in_step):
    def main():
        calls = []

        def lose(group, bucket):
            calls.append(bucket.index())
            if calls.count(1) == lost_in_step and bucket.index() == 1:
                bucket.buffer().mul_(0.5)
            return hooks.all_reduce(group, bucket)

        def wrap(model):
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.25)
            wrapped.register_comm_hook(None, lose)
            return wrapped

        return run(2, 64, wrap)

    results = run_ranks(main, 2, backend="gloo")
    assert results[0].relative > 10 * TOLERANCE
    assert len(failures(results)) == 1


def test_failures_of_results():
    assert failures([RIGHT, RIGHT]) == []
    for relative in (2 * TOLERANCE, math.nan):
        wrong = dataclasses.replace(RIGHT, relative=relative)
        (said,) = failures([wrong, RIGHT])
        assert "more than rounding" in said
        assert f"FAILED: {said}" in report([wrong, RIGHT])
    (said,) = failures([RIGHT, dataclasses.replace(RIGHT, digest=b"b2")])
    assert "different parameters" in said
