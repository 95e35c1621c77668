"""Tensors are reused only if they cannot be distinguished from new ones."""

from __future__ import annotations

import weakref

import pytest
import torch

from gradwire.ddp.buckets.ownership import are_unused

CHANGES = [
    lambda t: t.requires_grad_(),
    lambda t: t.t_(),
    lambda t: t.set_(torch.zeros(2, 3)),
    lambda t: t.resize_(1),
    lambda t: setattr(t, "note", 1),
    lambda t: setattr(t, "data", torch.zeros(2, 3)),
    lambda t: held.append(t),
    lambda t: held.append(weakref.ref(t)),
    lambda t: held.append(torch.ones(2, 3, requires_grad=True) * t),
]
held = []


@pytest.mark.parametrize("change", CHANGES)
def test_altered_or_referenced_tensors_are_not_reused(change):
    views = [torch.zeros(2, 3), torch.zeros(2, 3)]
    tensors = [view.data for view in views]
    assert are_unused(tensors, views)
    change(tensors[1])
    assert not are_unused(tensors, views)
    held.clear()
