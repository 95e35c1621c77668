"""What the generated models are made of, besides PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Base", "GivesNone", "GivesSaved", "SameForBoth", "SameGradient"]


class Base(nn.Module):
    """A model that remembers activations, and gradients that pass, without copying them.

    What is written behind autograd's back shows in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []

    def watch(self, label: str, h: Tensor) -> None:
        """Remember an activation and its gradient."""
        if h.requires_grad:
            self.seen.append((f"activation {label}", h.detach()))
            h.register_hook(self.note(f"gradient {label}"))

    def note(self, label: str) -> Callable[[Tensor], None]:
        """A hook that remembers what it gets."""

        def hook(g: Tensor) -> None:
            self.seen.append((label, g))

        return hook

    def remember(self, label: str, t: Tensor) -> Tensor:
        """Remember a tensor."""
        self.seen.append((label, t))
        return t


class GivesNone(torch.autograd.Function):
    """Uses a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, p: Tensor) -> Tensor:
        return h + p.abs().max() * 0.1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class GivesSaved(torch.autograd.Function):
    """The gradient is a tensor that others hold, or an alias of it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, p: Tensor, buffer: Tensor, alias: bool) -> Tensor:
        ctx.buffer, ctx.alias = buffer, alias
        return h + p * buffer

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        buffer = ctx.buffer
        return g, buffer.detach() if ctx.alias else buffer, None, None


class SameForBoth(torch.autograd.Function):
    """Two inputs get one tensor as their gradient, which is no one else's."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return h + 2 * (a + b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        both = g * 2
        return g, both, both


class SameGradient(torch.autograd.Function):
    """All inputs get the incoming gradient itself, or aliases of it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, b: Tensor, alias: bool) -> Tensor:
        ctx.alias = alias
        return h + a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.alias:
            return g, g.detach(), g.view(g.shape), None
        return g, g, g, None
