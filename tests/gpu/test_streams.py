"""Gradients that come on several streams, and steps captured in CUDA graphs."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ddp.common import in_one_process
from torch import nn

from gpu.common import DEVICE, ON_GPU, ONE, WORLDS, assert_same, batch, on_each, plain
from gradwire.ddp import DistributedDataParallel

SLOW = 20_000_000
"""Clock cycles, some 10 ms: what is not ordered after a kernel of that length reads old values."""
LAYERS, WIDE = 4, 128


def stream():
    """Return a new stream; a context without effect where there are none."""
    return torch.cuda.Stream() if ON_GPU else contextlib.nullcontext()


def wait(waiting, awaited):
    """Let a stream wait for another one; None is the current one."""
    if ON_GPU:
        current = torch.cuda.current_stream()
        (waiting or current).wait_stream(awaited or current)


def busy():
    if ON_GPU:
        torch.cuda._sleep(SLOW)


class Layers(nn.Module):
    """Linear layers, each on a stream of its own if there are several."""

    def __init__(self, streams=()):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(LAYERS))
        self.streams = list(streams)

    def forward(self, x):
        h = self.inp(x)
        parts = []
        for i, layer in enumerate(self.layers):
            if not self.streams:
                parts.append(torch.tanh(layer(h)))
                continue
            side = self.streams[i % len(self.streams)]
            wait(side, None)
            with side:
                parts.append(torch.tanh(layer(h)))
            wait(None, side)
        return torch.stack(parts).sum(0)


def check(net, program=plain, *, steps=4):
    for number in range(steps):
        streams, net.module.streams = net.module.streams, []  # cannot be copied
        expected = in_one_process(program, net.module, number, dist.get_world_size())
        net.module.streams = streams
        net.zero_grad()
        program(net, dist.get_rank(), number)
        assert_same(net, expected)


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"lazy_bucket_allocation": True}]


@pytest.mark.parametrize("hook", [None, "all_reduce", "bf16"])
@on_each(WORLDS[:2])
def test_layers_on_several_streams(hook):
    """Forward on side streams; autograd runs backward there too."""
    for options in OPTIONS:
        module = Layers([stream() for _ in range(3)]).to(DEVICE)
        net = DistributedDataParallel(module, **options)
        net.register_comm_hook(None, None if hook == "bf16" else hook)
        check(net)


@pytest.mark.parametrize("cap", [None, 0, 0.01])
@on_each(WORLDS[:2])
def test_nodes_on_several_streams(cap):
    """Gradients of one bucket are accumulated on several streams, and some of them late."""
    for options in OPTIONS[:2]:  # not with lazy buckets: see docs/design/streams.md
        module, edges = Layers().to(DEVICE), []
        for i, p in enumerate(module.parameters()):
            with stream():
                edges.append(torch.autograd.graph.get_gradient_edge(p))  # makes the node
            if i % 3 == 0:
                p.register_hook(late)
        net = DistributedDataParallel(module, bucket_cap_mb=cap, **options)
        check(net)
        del edges


def late(gradient):
    busy()
    return gradient.clone()


@on_each(WORLDS[:2])
def test_built_on_one_stream_and_trained_on_another():
    with (side := stream()):
        net = DistributedDataParallel(Layers().to(DEVICE))
    wait(None, side)
    check(net)
    other = stream()

    def elsewhere(net, rank, number):
        wait(other, None)
        with other:
            plain(net, rank, number)
        wait(None, other)

    check(net, elsewhere)


@on_each(WORLDS[:2])
def test_results_are_finalized_on_another_stream():
    net = DistributedDataParallel(Layers().to(DEVICE))
    net.require_manual_backward_finalization = True
    side = stream()

    def program(net, rank, number):
        busy()
        plain(net, rank, number)
        with side:
            net.finalize_backward()
        wait(None, side)

    check(net, program, steps=3)


@pytest.mark.parametrize("hook", ["all_reduce", "bf16"])
@on_each([(2, "gloo")])
def test_results_of_hooks_are_read_when_they_have_arrived(hook):
    """The buckets are large enough for a copy between host and device to take a while."""
    module = nn.Linear(2048 if ON_GPU else 64, 2048, bias=False).to(DEVICE)
    net = DistributedDataParallel(module)
    net.register_comm_hook(None, hook)
    x = torch.ones(1, module.in_features).to(DEVICE) * (dist.get_rank() + 1)
    for _ in range(5):
        net.zero_grad(set_to_none=True)
        net(x).sum().backward()
        got = module.weight.grad.clone()
        assert (got == 1.5).all(), got.unique()


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("wrapper", ["torch", "gradwire"])
@on_each([(1, ONE)])
def test_a_step_in_a_cuda_graph(wrapper):
    """As PyTorch documents it for its class: built and warmed up on a side stream."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, 4)).to(DEVICE)
    twin = nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, 4)).to(DEVICE)
    twin.load_state_dict(module.state_dict())
    make = nn.parallel.DistributedDataParallel if wrapper == "torch" else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x = torch.randn(4, 8, device=DEVICE)
    with torch.cuda.stream(side):
        net = (make or DistributedDataParallel)(module)
        for _ in range(11):
            net.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    net.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        net(x).square().mean().backward()
    for number in range(3):
        x.copy_(batch(number))
        graph.replay()
        twin.zero_grad()
        twin(x).square().mean().backward()
        for p, q in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
