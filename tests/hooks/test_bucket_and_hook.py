"""GradBucket, and parsing of results of hooks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gradwire.errors import ArgumentError, ArgumentTypeError, HookError
from gradwire.hooks import CommHook, GradBucket, check_hook, parse_hook_result
from gradwire.testing import FakeBucket


def test_set_buffer_refuses_other_shapes_and_devices():
    bucket = FakeBucket(torch.ones(3))
    other = torch.zeros(3)
    bucket.set_buffer(other)
    assert bucket.buffer() is other
    bucket.set_buffer(other.half())
    assert bucket.gradients()[0].dtype == torch.float16
    with pytest.raises(ArgumentError, match="device meta"):
        bucket.set_buffer(torch.zeros(3, device="meta"))
    with pytest.raises(ArgumentError, match="shape"):
        bucket.set_buffer(torch.zeros(4))
    with pytest.raises(ArgumentTypeError, match="NoneType"):
        bucket.set_buffer(None)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(8)[::2], r"buffer has stride 2, .* pass buffer\.contiguous\(\)"),
        (torch.zeros(1).expand(4), "buffer has stride 0"),
        (
            torch.zeros(4, dtype=torch.complex64).conj(),
            r"conjugate .* buffer\.resolve_conj\(\)",
        ),
        (torch._neg_view(torch.zeros(4)), r"negative bit .* buffer\.resolve_neg\(\)"),
    ],
)
def test_strided_and_lazily_conjugated_buffers_are_refused(buffer, message):
    with pytest.raises(ArgumentError, match=message):
        FakeBucket(torch.ones(4)).set_buffer(buffer)
    with pytest.raises(ArgumentError, match=message):
        GradBucket(0, buffer, [torch.zeros(4)], is_last=True)


def test_a_short_buffer_is_refused():
    with pytest.raises(ArgumentError, match="at least 4"):
        GradBucket(0, torch.zeros(3), [torch.zeros(4)], is_last=True)


def test_a_sparse_bucket_has_one_gradient():
    sparse = torch.eye(2).to_sparse()
    bucket = GradBucket(0, sparse, [torch.zeros(2, 2)], is_last=True)
    assert bucket.gradients() == [sparse]


class Callable:
    def __call__(self, state, bucket):
        return bucket.buffer()


def double(factor, state, bucket):
    return bucket.buffer() * factor


@pytest.mark.parametrize("hook", [Callable(), partial(double, 2), lambda s, b: None, max])
def test_check_hook_accepts_callables(hook):
    assert check_hook(hook) is hook
    assert isinstance(hook, CommHook)


@pytest.mark.parametrize("hook", [None, 3, "hook", lambda: None, lambda a, b, c: None])
def test_check_hook_refuses_other_objects(hook):
    with pytest.raises(ArgumentTypeError, match="hook"):
        check_hook(hook)


def test_results_are_flattened_and_copied_only_if_needed():
    bucket = FakeBucket(torch.zeros(4))
    numbers = torch.arange(4.0)
    for value in (numbers, numbers.view(4, 1), numbers.view(2, 2)):
        result = parse_hook_result(value, bucket, len)
        assert result.data_ptr() == numbers.data_ptr()
        assert torch.equal(result, numbers)
    for value in (numbers.view(2, 2).t(), torch.arange(8.0)[::2], numbers[:1].expand(4)):
        result = parse_hook_result(value, bucket, len)
        assert result.stride() == (1,)
        assert torch.equal(result, value.flatten())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "the result is None"),
        ([torch.zeros(2)] * 2, r"the result is \["),
        (torch.zeros(3), "3 elements, the bucket has 2"),
        (torch.zeros(2).half(), "float16"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "layout"),
    ],
)
def test_results_that_do_not_match_the_bucket(result, message):
    with pytest.raises(HookError, match=message):
        parse_hook_result(result, FakeBucket(torch.zeros(2)), len)
