"""Which buffers are synchronized: those that the module has now, wherever they came from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.ddp.buffers import Buffers


def test_buffers_are_those_that_the_module_has_now() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(3)))
    names = [name for name, _ in net.named_buffers()]
    buffers = Buffers(net, names)
    net[0].running_mean = torch.full((2,), 5.0)
    net[1] = nn.Sequential(nn.BatchNorm1d(3))
    named = buffers.named()
    assert list(named) == names
    for name, buffer in net.named_buffers():
        assert named[name] is buffer


def test_a_buffer_that_is_gone_is_named() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    buffers = Buffers(net, ["0.running_mean"])
    net[0] = nn.Identity()
    with pytest.raises(AttributeError, match="running_mean"):
        buffers.named()
