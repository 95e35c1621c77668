"""Lightning Fabric over gradwire: a strategy that wraps modules in gradwire's class.

torchrun --standalone --nproc-per-node 2 examples/train_with_fabric.py
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire import DistributedDataParallel
from gradwire.hooks import bf16


class GradwireStrategy(DDPStrategy):
    """Fabric's DDPStrategy with gradwire's DistributedDataParallel; takes the same arguments."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        return super().get_module_state_dict(inner)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(inner, state_dict, strict=strict)


class _NoSync(_BackwardSyncControl):
    """Implementation of `fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync() if enabled else nullcontext()


def spirals(points: int = 600) -> TensorDataset:
    """Two spirals, to be told apart."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(points) % 2
    radius = torch.rand(points, generator=generator) * 2 + 0.3
    angle = 2.5 * radius + torch.pi * label
    noise = 0.05 * torch.randn(points, 2, generator=generator)
    return TensorDataset(
        torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None] + noise, label
    )


def main() -> None:
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])  # from torchrun
    fabric = Fabric(accelerator="auto", devices=ranks_here, strategy=GradwireStrategy())
    fabric.launch()
    fabric.seed_everything(0)  # also of the samplers: they divide one order between the ranks

    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    wrapped = model._forward_module  # the strategy's module, inside Fabric's own wrapper
    wrapped.register_comm_hook(None, bf16)

    data = spirals()
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=25, shuffle=True))
    for epoch in range(40):
        loader.sampler.set_epoch(epoch)
        for step, (x, label) in enumerate(loader):
            accumulating = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss: Tensor = nn.functional.cross_entropy(model(x), label)
                fabric.backward(loss)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()

    with torch.no_grad():
        x, label = (t.to(fabric.device) for t in data.tensors)
        right = (model(x).argmax(1) == label).double().mean().item()
    fabric.print(f"{fabric.world_size} ranks, {type(wrapped).__module__}, right: {right:.1%}")


if __name__ == "__main__":
    main()
