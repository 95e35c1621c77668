"""Order of streams, with streams that only record who waits for whom; tests/gpu has real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.buckets.bucket import Bucket, PackedBucket
from gradwire.ddp.faults.error_channel import waits_on_cpu
from gradwire.ddp.reducer import launch
from gradwire.hooks.interface import after
from gradwire.testing import run_ranks


@dataclass(eq=False)
class FakeStream:
    name: str
    log: list = field(repr=False)
    device = torch.device("cpu")

    def wait_stream(self, other):
        self.log.append((self.name, other.name))


class Streams:
    """A current stream, and one for each parameter, as if its node had been made there."""

    def __init__(self, parameters):
        self.log = []
        self.current = self.caller = FakeStream("caller", self.log)
        for i, p in enumerate(parameters):
            own = FakeStream(f"stream {i}", self.log)
            p.register_hook(lambda g, own=own: setattr(self, "current", own))

    def current_stream(self, _device):
        return self.current

    def note(self, what):
        self.log.append((self.current.name, what))

    def __enter__(self):
        original = PackedBucket.copy_in

        def copy_in(bucket):
            self.note("copy")
            original(bucket)

        def record_use_of_gradients(_bucket):
            self.note("memory")

        self.patches = [
            mock.patch.object(launch, "WITH_STREAMS", ("cpu",)),
            mock.patch.object(torch.accelerator, "current_stream", self.current_stream),
            mock.patch.object(torch.accelerator, "synchronize"),
            mock.patch.object(Bucket, "record_use_of_gradients", record_use_of_gradients),
            mock.patch.object(PackedBucket, "copy_in", copy_in),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def backward_on_two_streams(hook=None):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with Streams(module.parameters()) as fake:
        # two buckets: the first one is sent from the hook of a gradient on stream 1
        net = DistributedDataParallel(module, bucket_cap_mb=0)
        net.register_comm_hook(None, hook)
        for _ in range(2):
            fake.log.clear()
            net(torch.ones(1, 2)).sum().backward()
    return fake.log


@pytest.mark.parametrize("hook", [None, "all_reduce"])
def test_a_bucket_waits_for_the_streams_of_all_gradients(hook):
    """Buckets are sent in the order of registration, gradients arrive in the other."""
    for log in run_ranks(backward_on_two_streams, backend="gloo", args=(hook,)):
        assert ("stream 0", "stream 1") in log
        # and memory that the copy frees is not used again before it
        after_wait = log[log.index(("stream 0", "stream 1")) + 1 :]
        assert after_wait[:2] == [("stream 0", "memory"), ("stream 0", "copy")]


def wait_for_a_bucket_elsewhere():
    with Streams([]) as fake:
        net = DistributedDataParallel(nn.Linear(2, 2))
        net.require_manual_backward_finalization = True
        net(torch.ones(1, 2)).sum().backward()
        fake.current = FakeStream("other", fake.log)
        net.finalize_backward()
    return fake.log


def test_results_are_read_after_the_stream_that_sent_them():
    assert ("other", "caller") in run_ranks(wait_for_a_bucket_elsewhere, 1, backend="gloo")[0]


@pytest.mark.parametrize(("backend", "waits"), [("gloo", True), ("nccl", False)])
def test_only_gloo_waits_on_the_cpu_for_an_accelerator(backend, waits):
    """These waits poll for errors of other ranks: with `wait()` alone they would not be noticed."""
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: backend))
    assert waits_on_cpu(group, torch.device("cuda", 0)) is waits
    assert waits_on_cpu(group, torch.device("cpu"))


@pytest.mark.parametrize(("device", "synchronized"), [("cpu", False), ("meta", True)])
def test_on_an_accelerator_a_callback_waits_for_the_work_itself(device, synchronized):
    """Gloo's future is done before its copy back to the accelerator is."""
    future, log = torch.futures.Future(), []
    work = SimpleNamespace(get_future=lambda: future, synchronize=lambda: log.append("work"))
    result = after(work, lambda: log.append("result"), torch.device(device))
    future.set_result(None)
    result.wait()
    assert log == (["work", "result"] if synchronized else ["result"])
