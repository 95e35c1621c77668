"""Buckets: which tensors share a buffer (`plan`), and copies into and out of it (`pack`)."""

from gradwire.buckets.pack import memory_strides, pack, unpack, views
from gradwire.buckets.plan import BucketPlan, plan_buckets

__all__ = ["BucketPlan", "memory_strides", "pack", "plan_buckets", "unpack", "views"]
