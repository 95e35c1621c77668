"""Forward sends what the raw collective sends, backward one collective of the adjoint's size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.testing import run_ranks


class Recorder(dist.ProcessGroup):
    """The default group, with a note of each collective: its name, and its input's bytes."""

    backend = "gloo"

    def __init__(self):
        self.inner = dist.group.WORLD
        super().__init__(self.inner.rank(), self.inner.size())
        self.seen = []

    def rank(self):
        return self.inner.rank()

    def size(self):
        return self.inner.size()

    def note(self, name, tensors):
        self.seen.append((name, sum(t.nbytes for t in tensors)))

    def allreduce(self, tensors, options):
        self.note("all_reduce", tensors)
        return self.inner.allreduce(tensors, options)

    def reduce(self, tensors, options):
        self.note("reduce", tensors)
        return self.inner.reduce(tensors, options)

    def broadcast(self, tensors, options):
        self.note("broadcast", tensors)
        return self.inner.broadcast(tensors, options)

    def gather(self, outputs, inputs, options):
        self.note("gather", inputs)
        return self.inner.gather(outputs, inputs, options)

    def scatter(self, outputs, inputs, options):
        self.note("scatter", outputs)
        return self.inner.scatter(outputs, inputs, options)

    def _allgather_base(self, output, source, options):
        self.note("all_gather", [source])
        return self.inner._allgather_base(output, source, options)

    def alltoall_base(self, output, source, receive, send, options):
        self.note("all_to_all", [source])
        return self.inner.alltoall_base(output, source, receive, send, options)

    all_gather_single = _allgather_base
    all_to_all_single = alltoall_base


OPS = {
    # 10 rows of 3 float32 are 120 bytes; the names and bytes of forward, then of backward
    "all_reduce": (lambda x, **g: C.all_reduce(x, **g), [("all_reduce", 120)] * 2),
    "avg": (lambda x, **g: C.all_reduce(x, "avg", **g), [("all_reduce", 120)] * 2),
    "invariant": (lambda x, **g: C.all_reduce(x, invariant=True, **g), [("all_reduce", 120)]),
    "vary": (lambda x, **g: C.vary(x, **g), [("all_reduce", 120)]),
    "max": (
        lambda x, **g: C.all_reduce(x, "max", **g),
        # the cotangent, and a byte for each element to count ties
        [("all_reduce", 120), ("all_reduce", 120), ("all_reduce", 30)],
    ),
    "product": (
        lambda x, **g: C.all_reduce(x, "product", **g),
        # the cotangent; then the values and the others' products, exchanged
        [("all_reduce", 120)] * 2 + [("all_to_all", 120)] * 2,
    ),
    "broadcast": (
        lambda x, **g: C.broadcast(x, group_src=0, **g),
        [("broadcast", 120), ("reduce", 120)],
    ),
    "reduce": (
        lambda x, **g: C.reduce(x, group_dst=0, **g),
        [("reduce", 120), ("broadcast", 120)],
    ),
    "all_gather": (lambda x, **g: C.all_gather(x, **g), [("all_gather", 120), ("all_to_all", 240)]),
    "reduce_scatter": (
        lambda x, **g: C.reduce_scatter(x, **g),
        [("all_to_all", 120), ("all_gather", 60)],
    ),
    "gather": (lambda x, **g: C.gather(x, group_dst=0, **g), [("gather", 120), ("scatter", 120)]),
    "scatter": (
        lambda x, **g: C.scatter(x, group_src=0, like=x[:5], **g),
        [("scatter", 60), ("gather", 60)],
    ),
    "all_to_all": (lambda x, **g: C.all_to_all(x, **g), [("all_to_all", 120)] * 2),
    "shift": (lambda x, **g: C.shift(x, **g), [("all_to_all", 120)] * 2),
}


@pytest.mark.parametrize("name", OPS)
def test_both_passes_send_what_the_op_and_its_adjoint_are(name):
    op, expected = OPS[name]

    def main():
        group = Recorder()
        x = torch.randn(10, 3, requires_grad=True)
        op(x, group=group).sum().backward()
        return group.seen

    for seen in run_ranks(main, 2):
        assert seen == expected


@on_ranks(2)
def test_complex_numbers_and_other_dtypes_send_no_more():
    group = Recorder()
    C.all_reduce(torch.ones(4, dtype=torch.complex64), group=group)
    C.all_gather(torch.ones(4, dtype=torch.bool), group=group)
    C.all_to_all(torch.ones(4, dtype=torch.int16), group=group)
    assert group.seen == [("all_reduce", 32), ("all_gather", 4), ("all_to_all", 8)]


@on_ranks(2)
def test_ties_are_counted_only_where_a_gradient_is_asked_for():
    group = Recorder()
    C.all_reduce(torch.ones(4), "max", group=group)
    assert len(group.seen) == 1
