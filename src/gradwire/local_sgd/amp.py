"""A step of a wrapped optimizer under `torch.amp.GradScaler`, which may have to be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["scaled_step"]


def scaled_step(
    wrapper: Optimizer, inner: Optimizer, closure: Callable[[], Any] | None = None
) -> Any:
    """Step an optimizer as `GradScaler.step` would, if the scaler has given its attributes.

    The scaler calls an optimizer with `_step_supports_amp_scaling` in every step, and sets its
    `found_inf`, and `grad_scale`, which is None where gradients are unscaled already.

    Args:
        wrapper: The optimizer that the scaler called.
        inner: The optimizer that steps.
        closure: As in `Optimizer.step`.
    """
    found: Tensor | None = getattr(wrapper, "found_inf", None)
    scale: Tensor | None = getattr(wrapper, "grad_scale", None)
    if found is None:
        return inner.step(closure)
    if getattr(inner, "_step_supports_amp_scaling", False):
        inner.found_inf, inner.grad_scale = found, scale  # type: ignore[attr-defined]
        try:
            return inner.step(closure)
        finally:
            del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]
    if found.item():
        return None
    if scale is not None:
        _unscale(inner, scale)
    return inner.step(closure)


@torch.no_grad()
def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide gradients by the scale, with the rounding of `GradScaler.unscale_`."""
    inverse = scale.double().reciprocal().float().item()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)
