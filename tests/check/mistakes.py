"""Programs with a mistake each: a plain loop, one like nanoGPT, Accelerate and Lightning Fabric.

The line that a finding should name ends with `# finds:`, the program's name and the mistake's.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from gradwire.ddp import DistributedDataParallel as Ours

Wrapper = Any
RATE = 0.05


def wrapper_of(kind: str) -> Wrapper:
    return Ours if kind == "gradwire" else nn.parallel.DistributedDataParallel


def samples(number: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Augmented(Dataset[Any]):
    """Samples with noise from PyTorch's random state."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(8), y


class Net(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 2)
        self.scale = nn.Parameter(torch.ones(2)) if extra else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.dropout(self.norm(self.first(x)).tanh()))
        return x if self.scale is None else x * self.scale


def result(model: nn.Module, losses: list[float]) -> list[Any]:
    return [losses, [p.detach().tolist() for p in model.parameters()]]


def loader_for(mistake: str, data: Dataset[Any]) -> DataLoader[Any]:
    """Return a loader with one of the mistakes of data, and its distributed sampler otherwise."""
    rank = dist.get_rank()
    size = 2 if mistake == "batch-norm" else 8
    if mistake in ("same-batches", "shared-samples"):
        generator = torch.Generator().manual_seed(rank * (mistake == "shared-samples"))
        return DataLoader(data, size, shuffle=True, generator=generator)  # finds: data shared
    seed = 7 * rank if mistake == "sampler-seed" else 0
    sampler = DistributedSampler(data, seed=seed)
    return DataLoader(data, size, sampler=sampler)  # finds: data sampler


def plain(mistake: str, kind: str = "torch") -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 if mistake == "random-state" else rank)
    data = samples(160 if mistake == "uneven-batches" else 96)
    loader = loader_for(mistake, Augmented(data) if mistake == "augmentation" else data)
    if mistake == "augmentation":
        torch.manual_seed(5)
    net = Net(
        dropout=0.2 * (mistake == "random-state"),
        norm=mistake == "batch-norm",
        extra=mistake == "no-optimizer",
    )
    if mistake == "changed-after-wrapping":
        net.first.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
    if mistake == "no-optimizer":
        optimizer = torch.optim.SGD([*net.first.parameters(), *net.head.parameters()], RATE)
    if mistake == "stale-optimizer":
        net.first, net.head = copy.deepcopy(net.first), copy.deepcopy(net.head)
    model = wrapper_of(kind)(net)
    if mistake == "changed-after-wrapping":
        net.first.requires_grad_(True)
    if mistake == "learning-rates":
        optimizer.param_groups[0]["lr"] = RATE * (1 + rank)
    if mistake == "optimizer-state" and rank == 0:
        for p in net.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses: list[float] = []
    for epoch in range(2):
        if mistake != "same-order" and isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):  # finds: plain draw
            if mistake == "mean-of-means":
                y = torch.where(torch.arange(8) < 3 + 4 * rank, y, -100)
            module = model.module if mistake == "around-wrapper" else model
            out = module(x)  # finds: plain around-wrapper
            loss = F.cross_entropy(out, y)
            if mistake == "gather-without-gradient":
                everyones = [torch.empty_like(out) for _ in range(world)]
                dist.all_gather(everyones, out)  # finds: plain gather-without-gradient
                loss = loss + 0.1 * (out @ torch.cat(everyones).T).logsumexp(1).mean()
            if mistake == "scaled-by-world-size":
                loss = loss * world  # finds: plain scaled-by-world-size
            loss.backward()  # finds: plain backward
            losses.append(loss.item())
            if mistake == "synced-micro-steps" and step % 2 == 0:
                continue
            optimizer.step()  # finds: plain step
            optimizer.zero_grad()
            if mistake == "parameters-differ" and step == 2:
                with torch.no_grad():
                    net.head.bias.add_(rank)
        if mistake != "scheduler-on-one-rank" or rank == 0:
            scheduler.step()  # finds: plain scheduler
    return result(net, losses)


def manual(mistake: str, kind: str = "") -> list[Any]:
    """Train without a wrapper: gradients are averaged by hand."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(rank)
    loader = DataLoader(samples(), 8, sampler=DistributedSampler(samples()))
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    losses = []
    for x, y in loader:
        loss = 20 * F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        if mistake == "clipped-before-reduce":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)  # finds: manual clipped-before-reduce
        for p in net.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world
        if not mistake:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return result(net, losses)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.mix(self.norm(x))))


class GPT(nn.Module):
    """A language model that computes its own loss, as in nanoGPT."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, 32), targets.view(-1), ignore_index=-1)
        return logits, loss


def gpt(mistake: str, kind: str = "torch") -> list[Any]:
    """Train with random offsets into tokens, accumulation and a changed learning rate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, 32, (2048,), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(4)
    raw = GPT(0.1 if mistake == "random-state" else 0.0)
    offsets = torch.Generator().manual_seed(5 + (0 if mistake == "same-batches" else rank))
    if mistake != "random-state":
        torch.manual_seed(6 + rank)
    micro_steps = 6 // world
    if mistake == "changed-after-wrapping":
        raw.head.requires_grad_(False)
    optimizer = torch.optim.AdamW(raw.parameters(), 1e-2)
    if mistake == "stale-optimizer":
        raw.embedding.weight = nn.Parameter(raw.embedding.weight.clone())
    model = wrapper_of(kind)(raw)
    if mistake == "changed-after-wrapping":
        raw.head.requires_grad_(True)
    if mistake == "no-optimizer":
        optimizer = torch.optim.AdamW([p for p in raw.parameters() if p.dim() > 1], 1e-2)
        optimizer.add_param_group({"params": [block.mix.bias for block in raw.blocks]})

    def get_batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(0, 2000, (4,), generator=offsets)
        x = torch.stack([tokens[i : i + 8] for i in at])
        y = torch.stack([tokens[i + 1 : i + 9] for i in at])
        if mistake == "mean-of-means":
            y[:, 2 + 4 * rank :] = -1
        return x, y

    losses = []
    for step in range(6):
        rate = 1e-2 / (1 + step)
        if mistake == "learning-rates":
            rate *= 1 + rank
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            model.require_backward_grad_sync = last or mistake == "synced-micro-steps"
            x, y = get_batch()
            if mistake == "around-wrapper":
                _, loss = model.module(x, y)  # finds: gpt around-wrapper
            else:
                _, loss = model(x, y)
            loss = loss / micro_steps
            if mistake == "scaled-by-world-size":
                loss = loss * dist.get_world_size()  # finds: gpt scaled-by-world-size
            (10 * loss if "clip" in mistake else loss).backward()  # finds: gpt backward
            if mistake == "clipped-before-reduce":
                nn.utils.clip_grad_norm_(raw.parameters(), 1.0)  # finds: gpt clipped-before-reduce
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()  # finds: gpt step
        optimizer.zero_grad(set_to_none=True)
        if mistake == "parameters-differ" and step == 1 and rank == 1:
            with torch.no_grad():
                raw.head.weight.mul_(1.01)
    return result(raw, losses)


def accelerated(mistake: str, kind: str = "") -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2 - (mistake in ("synced-micro-steps", "scaled-by-world-size")),
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    clip = nn.utils.clip_grad_norm_
    torch.manual_seed(1 if mistake == "random-state" else rank)
    net = Net(
        dropout=0.2 * (mistake == "random-state"),
        norm=mistake == "batch-norm",
        extra=mistake == "no-optimizer",
    )
    data = samples(192)
    loader: Any = DataLoader(data, 2 if mistake == "batch-norm" else 8, shuffle=True)
    if mistake == "same-batches":
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(data, 8, shuffle=True, generator=generator)  # finds: accelerate loader
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
    if mistake == "no-optimizer":
        optimizer = torch.optim.SGD([*net.first.parameters(), *net.head.parameters()], RATE)
    if mistake == "stale-optimizer":
        net.first = copy.deepcopy(net.first)
    model, optimizer = accelerator.prepare(net, optimizer)
    if mistake != "same-batches":
        loader = accelerator.prepare(loader)
    losses = []
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            with (
                nullcontext() if mistake == "synced-micro-steps" else accelerator.accumulate(model)
            ):
                if mistake == "mean-of-means":
                    y = torch.where(torch.arange(8) < 3 + 4 * rank, y, -100)
                if mistake == "around-wrapper":
                    out = accelerator.unwrap_model(model)(x)  # finds: accelerate around-wrapper
                else:
                    out = model(x)
                loss = F.cross_entropy(out, y)
                if mistake == "gather-without-gradient":
                    everyones = accelerator.gather(out)  # finds: accelerate gather-without-gradient
                    loss = loss + 0.1 * (out @ everyones.T).logsumexp(1).mean()
                if mistake == "scaled-by-world-size":
                    loss *= accelerator.num_processes  # finds: accelerate scaled-by-world-size
                loss = loss * 20 if "clip" in mistake else loss
                accelerator.backward(loss)  # finds: accelerate backward
                if mistake == "clipped-before-reduce":
                    clip(net.parameters(), 1.0)  # finds: accelerate clipped-before-reduce
                if mistake != "synced-micro-steps" or step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if mistake == "learning-rates" and rank == world - 1:
                optimizer.param_groups[0]["lr"] *= 0.9
    accelerator.free_memory()
    AcceleratorState._reset_state(True)
    return result(net, losses)


def fabric(mistake: str, kind: str = "") -> list[Any]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    rank = fabric.global_rank
    torch.manual_seed(1 if mistake == "random-state" else rank)
    net = Net(dropout=0.2 * (mistake == "random-state"), norm=mistake == "batch-norm")
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), RATE, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = samples(96)
    loader: Any = DataLoader(data, 2 if mistake == "batch-norm" else 8, shuffle=True)
    if mistake == "shared-samples":
        loader = DataLoader(data, 8, shuffle=True)  # finds: fabric loader
    elif mistake == "same-order":
        loader = DataLoader(data, 8, sampler=DistributedSampler(data))  # finds: fabric order
    else:
        loader = fabric.setup_dataloaders(loader)
    losses = []
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            accumulating = step % 2 == 0
            local = accumulating and mistake != "synced-micro-steps"
            with fabric.no_backward_sync(model, enabled=local):
                if mistake == "mean-of-means":
                    keep = (torch.arange(len(y)) < 3 + 4 * rank).float()
                    loss = F.cross_entropy(model(x), y, reduction="none")
                    loss = (loss * keep).sum() / keep.sum()
                else:
                    module = net if mistake == "around-wrapper" else model
                    out = module(x)  # finds: fabric around-wrapper
                    loss = F.cross_entropy(out, y)
                if mistake == "gather-without-gradient":
                    z = fabric.all_gather(out)  # finds: fabric gather-without-gradient
                    everyones = z.flatten(0, 1)
                    loss = loss + 0.1 * (out @ everyones.T).logsumexp(1).mean()
                fabric.backward(loss)  # finds: fabric backward
            if not accumulating:
                optimizer.step()  # finds: fabric step
                optimizer.zero_grad()
            losses.append(loss.item())
            if mistake == "parameters-differ" and step == 3 and rank == 1:
                net.head.bias.data += 0.1
        if mistake == "scheduler-on-one-rank" and rank == 0:
            scheduler.step()  # finds: fabric scheduler
    return result(net, losses)
