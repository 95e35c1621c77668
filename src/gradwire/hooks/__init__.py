"""Communication hooks: how a bucket of gradients travels."""

from gradwire.hooks.allreduce import allreduce
from gradwire.hooks.cast import bf16, compressed, fp16

__all__ = ["allreduce", "bf16", "compressed", "fp16"]
