"""Base of optimizers that wrap another: PyTorch's interface, and `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class WrappedOptimizer(Optimizer):
    """Base of an optimizer that shares the parameters and the state of a wrapped one.

    It has its own optimizer hooks. A subclass defines `step`, `_collect` and `_restore`.

    Args:
        optimizer: Wrapped optimizer.

    Attributes:
        optimizer: Wrapped optimizer.
    """

    _step_supports_amp_scaling = True
    """Makes GradScaler call `step` in every step, so that skipped steps are counted.

    GradScaler sets `found_inf`, and `grad_scale`, which is None if gradients are already unscaled.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__setstate__({})  # creates the hooks only; Optimizer.__init__ would add parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients with the wrapped optimizer's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._collect()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned on this rank.

        Raises:
            ArgumentError: The state is of other parameters, or of another optimizer.
        """
        saved = state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(saved))
            saved = saved if changed is None else changed
        self._restore(saved)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _collect(self) -> dict[str, Any]:
        """Return the state to save, before the optimizer's hooks."""
        raise NotImplementedError

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state, between the optimizer's hooks."""
        raise NotImplementedError

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer as `GradScaler.step` would."""
        found: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inner = self.optimizer
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
