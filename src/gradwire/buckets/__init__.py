"""Buckets: which tensors share a buffer (`plan`), and copies into and out of it (`pack`)."""

from gradwire.buckets.pack import flatten as flatten
from gradwire.buckets.pack import is_as_read as is_as_read
from gradwire.buckets.pack import memory_strides, pack, unpack, views
from gradwire.buckets.plan import BucketPlan, plan_buckets

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["BucketPlan", "memory_strides", "pack", "plan_buckets", "unpack", "views"]
