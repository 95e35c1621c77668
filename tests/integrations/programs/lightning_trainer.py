"""Lightning's Trainer on two processes that it starts itself."""

import json
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        self.wrapped_by = type(self.trainer.strategy.model).__module__
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ManualNet(Net):
    """Backwards run inside DDP's forward, and Lightning prepares DDP's reducer for each."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


torch.manual_seed(0)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    strategy=DDPStrategy(process_group_backend="shm") if "shm" in sys.argv else "ddp",
    devices=2,
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
net = ManualNet() if "manual" in sys.argv else Net()
trainer.fit(net, loader)
if trainer.global_rank == 0:
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    told = [net.wrapped_by, dist.get_backend(), shares_memory(dist.group.WORLD), net.losses]
    print("RESULT", json.dumps(told))
