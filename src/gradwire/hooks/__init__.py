"""Communication hooks: how a bucket of gradients travels."""

from gradwire.hooks.allreduce import allreduce
from gradwire.hooks.around import around
from gradwire.hooks.cast import bf16, compressed, fp16
from gradwire.hooks.registry import by_name, noop

__all__ = ["allreduce", "around", "bf16", "by_name", "compressed", "fp16", "noop"]
