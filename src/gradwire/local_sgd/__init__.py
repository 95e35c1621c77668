"""Local SGD and DiLoCo: ranks train alone and average their parameters every few steps."""

from gradwire.local_sgd.outer import LocalSGD, diloco

__all__ = ["LocalSGD", "diloco"]
