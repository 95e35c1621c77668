"""Batch norm with the statistics of all ranks' samples, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from gradwire._groups import check_group
from gradwire.collectives import all_reduce
from gradwire.errors import ArgumentError
from gradwire.hooks import group_from, name_if_group


class SyncBatchNorm(_BatchNorm):
    """Batch norm over a batch that is distributed over the ranks.

    Like `torch.nn.SyncBatchNorm`, but on the CPU, too. Statistics and gradients are those of
    `torch.nn.BatchNorm` on the samples of all ranks. Each sample counts the same, whatever the
    number of samples on its rank, which may be zero. Each training forward sends two messages of a
    few bytes per channel, and so does its backward. In evaluation, or in a group of one rank,
    nothing is sent.

    The sums wait for a communication hook that still sends messages in the same group, such as
    `BlockQuantization`. A layer with its own `process_group` does not wait.

    Adjoint convention: the objective is the sum of all ranks' losses, as in `gradwire.collectives`.

    Args:
        num_features: Number of channels, the size of dim 1 of an input.
        eps: Number added to the variance.
        momentum: Weight of a batch's statistics in the running ones; None for their mean.
        affine: If True, a weight and a bias are learned.
        track_running_stats: If True, running statistics are kept and used for evaluation.
        process_group: Process group; None for the default group.
        device: Device of parameters and running statistics.
        dtype: Dtype of parameters and running statistics.
        bias: If False, no bias is learned.

    Raises:
        ArgumentError: This rank is not in the group.
        ArgumentTypeError: `process_group` is not a process group.

    Example:
        >>> from gradwire.ddp import SyncBatchNorm
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     layer = SyncBatchNorm(1, affine=False)
        ...     return layer(torch.tensor([[[-1.0], [-1.0]], [[1.0]]][dist.get_rank()])).tolist()
        >>> first, second = run_ranks(main, world_size=2)  # mean -1/3, variance 8/9
        >>> [round(value, 3) for (value,) in first + second]
        [-0.707, -0.707, 1.414]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        if process_group is not None:
            check_group(process_group, "process_group")
        self.process_group = process_group

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": name_if_group(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = group_from(state["process_group"])
        super().__setstate__({**state, "process_group": group})  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape (n, channels, ...), where n may differ between ranks.

        Raises:
            ArgumentError: The input has a wrong number of dims or channels, or all ranks together
                have fewer than two values per channel in training.
        """
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if not self.training or group is None or group.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = input
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # float64, because float32 rounds counts from 2**24 on
        count = torch.tensor([x.numel() // x.size(1)], dtype=torch.float64, device=x.device)
        total = all_reduce(torch.cat([wide.sum(dims).double(), count]), group=group)
        number = total[-1].detach()
        if x.is_cpu and number < 2:
            raise ArgumentError(
                f"{number:g} values for each channel on all ranks together: pass at least two in "
                "training"
            )
        mean = total[:-1] / number
        centred = wide - mean.to(wide.dtype).view(shape)
        squares = all_reduce(centred.square().sum(dims).double(), group=group)
        self._track(mean.detach(), squares.detach() / (number - 1))
        out = centred * (squares / number + self.eps).rsqrt().to(wide.dtype).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        # 0 features: converted from a lazy layer that has neither parameters nor buffers
        if input.dim() < 2 or self.num_features not in (0, input.size(1)):
            raise ArgumentError(
                f"input has shape {tuple(input.shape)}: pass (n, {self.num_features}, ...)"
            )

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            factor, tracked = self.momentum, self.num_batches_tracked
            if factor is None:
                factor = 0.0 if tracked is None else 1.0 / float(tracked)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Replace all batch norms in a module by this class.

        The new layers share the parameters and running statistics of the old ones. Call this before
        the module is wrapped and before the optimizer is created.

        Args:
            module: Module, changed in place.
            process_group: Process group of the new layers; None for the default group.

        Returns:
            The module, or a new layer if it is a batch norm itself.

        Raises:
            ArgumentError: A lazy layer has no shape yet.

        Example:
            >>> from torch import nn
            >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
            >>> type(SyncBatchNorm.convert_sync_batchnorm(net)[1]).__name__
            'SyncBatchNorm'
        """
        made: dict[nn.Module, nn.Module] = {}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if isinstance(child, _BatchNorm):
                    if child not in made:
                        made[child] = cls._of(child, process_group)
                    parent._modules[name] = made[child]
        return cls._of(module, process_group) if isinstance(module, _BatchNorm) else module

    @classmethod
    def _of(cls, layer: _BatchNorm, process_group: ProcessGroup | None) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin):
            raise ArgumentError(
                f"{type(layer).__name__} has no shape yet: run a forward of the lazy module first"
            )
        new = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
            device="meta",
        )
        new.weight, new.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, getattr(layer, name))
        new.training = layer.training
        return new
