"""Hugging Face Accelerate over gradwire: install first, then nothing else changes.

torchrun --standalone --nproc-per-node 2 examples/train_with_accelerate.py
"""

from __future__ import annotations

from gradwire import compat

compat.install()  # Accelerate now wraps models in gradwire's class

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


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
    options = DistributedDataParallelKwargs(bucket_cap_mb=1)  # PyTorch's options work as they did
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        kwargs_handlers=[options],
    )
    torch.manual_seed(accelerator.process_index)

    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = spirals()
    loader = DataLoader(data, batch_size=25, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(40):
        for x, label in loader:
            with accelerator.accumulate(model):  # no_sync in every other step
                loss = nn.functional.cross_entropy(model(x), label)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    plain = accelerator.unwrap_model(model)
    with torch.no_grad():
        x, label = (t.to(accelerator.device) for t in data.tensors)
        right = (plain(x).argmax(1) == label).double().mean().item()
    accelerator.print(
        f"{accelerator.num_processes} ranks, {type(model).__module__}, right: {right:.1%}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
