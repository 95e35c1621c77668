"""Results of hooks with any strides, conjugate bits and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.hooks import HostGroups

pytestmark = pytest.mark.usefixtures("each_backend")


def every_second(x):
    return torch.stack([x, x * 9], 1)[:, 0]


def transposed(x):
    return x.view(2, -1).t().contiguous().t()


def conjugated_in_place(x):
    return x.conj_physical_().conj()


def negated_in_place(x):
    return torch._neg_view(x.neg_())


def reals_at_an_odd_place(x):
    reals = torch.view_as_real(x).flatten()
    return torch.cat([reals[:1], reals])[1:]


def every_second_real(x):
    return every_second(torch.view_as_real(x).flatten())


# different layouts of the same values
LAID_OUT = [every_second, transposed, negated_in_place]
COMPLEX = [conjugated_in_place, reals_at_an_odd_place, every_second_real]


def mean(bucket):
    """Return the mean over ranks, in the bucket's buffer."""
    return hooks.all_reduce(None, bucket).wait()


def gradients(hook, dtype=torch.float32, view=False):
    """Return the gradients of a step of a model with an even number of elements."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(n, 4, dtype=dtype) for n in (2, 3))
    net = DistributedDataParallel(Product(model), gradient_as_bucket_view=view)
    net.register_comm_hook(None, hook)
    torch.manual_seed(1 + dist.get_rank())
    net(torch.randn(4, 3, dtype=dtype)).backward()
    return [p.grad.clone() for p in model]


class Product(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        return sum((weight @ x).abs().square().sum() for weight in self.weights)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@on_ranks(2)
def test_results_of_any_strides(dtype, view):
    want = gradients(hooks.all_reduce, dtype, view)
    for lay_out in [*LAID_OUT, *(COMPLEX if dtype.is_complex else [])]:
        got = gradients(lambda _, bucket: lay_out(mean(bucket)), dtype, view)  # noqa: B023
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, msg=lay_out.__name__)
    for gradient in gradients(lambda _, b: b.buffer().new_ones(()).expand(20), dtype, view):
        assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_results_of_another_dtype_in_the_buffers_memory(view):
    def in_half_the_memory(state, bucket):
        small = mean(bucket).half()
        bucket.set_buffer(bucket.buffer().view(torch.float16)[: len(small)].copy_(small))
        return bucket.buffer()

    want = gradients(hooks.all_reduce, view=view)
    for a, b in zip(gradients(in_half_the_memory, view=view), want, strict=True):
        assert torch.equal(a, b.half().float())


@pytest.mark.parametrize("lay_out", [*LAID_OUT, conjugated_in_place])
@on_ranks(2)
def test_results_between_hosts(lay_out):
    """Each rank is a host."""
    group = dist.group.WORLD
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    groups = HostGroups(group, alone, group, hosts=2)
    dtype = torch.complex64
    hook = hooks.across_hosts(lambda _, bucket: lay_out(mean(bucket)), groups)
    want = gradients(hooks.all_reduce, dtype)
    for a, b in zip(gradients(hook, dtype), want, strict=True):
        torch.testing.assert_close(a, b)
