"""Programs without a mistake, some of which look like one. Each returns numbers to compare."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import gradwire
from check.mistakes import GPT, Net, Ours, result, samples
from gradwire.local_sgd import LocalSGD

Torchs = nn.parallel.DistributedDataParallel
PROGRAMS: dict[str, Callable[[], Any]] = {}
RANKS: dict[str, int] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def loader(number: int = 64, size: int = 8, **options: Any) -> DataLoader[Any]:
    data = samples(number)
    return DataLoader(data, size, sampler=DistributedSampler(data, **options))


def epochs(batches: DataLoader[Any], number: int = 2) -> Iterator[Any]:
    for epoch in range(number):
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        yield from batches


def train(
    model: nn.Module,
    batches: Any = None,
    optimizer: Any = None,
    loss_of: Callable[[nn.Module, Any, Any], Tensor] | None = None,
    after_backward: Callable[[], Any] = lambda: None,
) -> list[Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for x, y in epochs(loader()) if batches is None else batches:
        optimizer.zero_grad()
        loss = loss_of(model, x, y) if loss_of else F.cross_entropy(model(x), y)
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.item())
    return result(model, losses)


@program
def readme() -> Any:
    model = Ours(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return result(model, [])


@program
def tutorial() -> Any:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))[dist.get_rank() :: 2]
    y = x.sin().sum(dim=1, keepdim=True)
    model = Ours(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    return train(model, [(x, y)] * 6, loss_of=lambda m, x, y: F.mse_loss(m(x), y))


def uneven(wrapper: Any) -> Any:
    torch.manual_seed(dist.get_rank())
    data = Subset(samples(), range(40) if dist.get_rank() else range(40, 96))
    model = wrapper(Net())
    with model.join():
        return train(model, DataLoader(data, 8))


def accumulation(wrapper: Any) -> Any:
    model = wrapper(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step, (x, y) in enumerate(epochs(loader(80))):
        if step % 2 == 0:
            with model.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
            continue
        (F.cross_entropy(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, [])


class Branches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) if x[0, 0] > 0 else super().forward(x)


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


@program
def lora() -> Any:
    net = Net()
    net.first, net.head = LoRA(net.first), LoRA(net.head)
    model = Torchs(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(model, epochs(loader()), torch.optim.AdamW(trained, 0.01))


@program
def lora_in_an_optimizer_of_all() -> Any:
    net = Net()
    net.first = LoRA(net.first)
    return train(Ours(net), epochs(loader()), torch.optim.AdamW(net.parameters(), 0.01))


@program
def head_only() -> Any:
    net = Net()
    return train(Torchs(net), epochs(loader()), torch.optim.SGD(net.head.parameters(), 0.05))


@program
def sync_batch_norm() -> Any:
    net = gradwire.ddp.SyncBatchNorm.convert_sync_batchnorm(Net(norm=True))
    return train(Ours(net), epochs(loader(32, 2)))


@program
def local_sgd() -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), 0.05), net, every=4)
    return train(net, epochs(loader()), optimizer)


@program
def local_steps_of_a_wrapper() -> Any:
    model = Torchs(Net())
    with model.no_sync():
        return train(model)


def padded() -> Iterator[Any]:
    """Yield batches in which the ranks have different numbers of targets."""
    for step, (x, y) in enumerate(epochs(loader())):
        yield x, torch.where(torch.arange(8) < 2 + 3 * dist.get_rank() + step % 2, y, -100)


@program
def weights() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.weight(int((y >= 0).sum()))
        return F.cross_entropy(model(x), y)

    return train(Ours(Net()), padded(), loss_of=loss_of)


@program
def sum_over_all_tokens() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        total = (y >= 0).sum()
        dist.all_reduce(total)
        loss = F.cross_entropy(model(x), y, reduction="sum") / total
        return loss * dist.get_world_size()

    return train(Torchs(Net()), padded(), loss_of=loss_of)


@program
def weighted_means() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        own = (y >= 0).sum()
        total = own.clone()
        dist.all_reduce(total)
        return F.cross_entropy(model(x), y) * (own * dist.get_world_size() / total)

    return train(Torchs(Net()), padded(), loss_of=loss_of)


@program
def two_wrappers() -> Any:
    """A generative adversarial network."""
    torch.manual_seed(dist.get_rank())
    generator, critic = Ours(nn.Linear(4, 8)), Ours(nn.Linear(8, 1))
    steps = [torch.optim.Adam(m.parameters(), 0.01) for m in (generator, critic)]
    for real, _ in epochs(loader()):
        fake = generator(torch.randn(8, 4))
        steps[1].zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        steps[1].step()
        steps[0].zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        steps[0].step()
    return result(generator, [])


@program
def sharpness_aware() -> Any:
    model = Torchs(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in epochs(loader()):
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * p.grad)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, [])


def contrastive(gather: Callable[[Tensor], Tensor]) -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model(x))
        everyones = gather(z)
        at = torch.arange(8) + 8 * dist.get_rank()
        return F.cross_entropy(z @ everyones.T, at)

    return train(Ours(Net()), loss_of=loss_of)


@program
def gather_with_the_own_part() -> Any:
    def gather(z: Tensor) -> Tensor:
        everyones = [torch.empty_like(z) for _ in range(2)]
        dist.all_gather(everyones, z)
        everyones[dist.get_rank()] = z
        return torch.cat(everyones)

    return contrastive(gather)


@program
def gathered_metrics() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        everyones = [torch.empty_like(out) for _ in range(2)]
        dist.all_gather(everyones, out)
        assert torch.cat(everyones).argmax(1).shape == (16,)
        return F.cross_entropy(out, y)

    return train(Torchs(Net()), loss_of=loss_of)


@program
def evaluation_on_all_ranks() -> Any:
    model = Torchs(Net(norm=True))
    first = train(model, epochs(loader(), 1))
    model.eval()
    with torch.no_grad():
        outputs = [model(x).sum().item() for x, _ in loader()]
    model.train()
    return [first, outputs, train(model, epochs(loader(), 1))]


@program
def evaluation_of_the_module_on_one_rank() -> Any:
    model = Torchs(Net(norm=True))
    for _ in range(2):
        train(model, epochs(loader(), 1))
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(torch.ones(4, 8))
            model.train()
        dist.barrier()
    return result(model, [])


@program
def average_of_parameters() -> Any:
    model = Torchs(Net())
    average = copy.deepcopy(model.module).requires_grad_(False)

    def update() -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p.detach(), 0.1)
        average(torch.ones(2, 8))

    return train(model, after_backward=update)


@program
def compressed() -> Any:
    model = Torchs(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model)


@program
def power_sgd() -> Any:
    model = Torchs(Net())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


@program
def clipped_by_gradwire() -> Any:
    def clip(bucket: Any) -> None:
        bucket.buffer().clamp_(-0.1, 0.1)

    model = Ours(Net())
    model.register_comm_hook(None, gradwire.hooks.wrap(gradwire.hooks.all_reduce, before=clip))
    return train(model)


@program
def lbfgs() -> Any:
    model = Torchs(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    for x, y in epochs(loader()):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return result(model, [])


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@program
def checkpointed() -> Any:
    torch.manual_seed(dist.get_rank())
    return train(Torchs(Checkpointed(dropout=0.3)))


@program
def schedules() -> Any:
    model = Torchs(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for x, y in epochs(loader()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        metric = loss.detach()
        dist.all_reduce(metric)
        plateau.step(metric)
    return result(model, [])


@program
def shards_of_a_dataset() -> Any:
    """Each rank has its own part, whose indices begin at 0."""
    part = Subset(samples(), range(dist.get_rank(), 96, 2))
    return train(Torchs(Net()), DataLoader(part, 8, shuffle=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(48):
            x = torch.randn(8, generator=generator)
            yield x, (x.sum() > 0).long()


@program
def samples_with_replacement() -> Any:
    torch.manual_seed(dist.get_rank())
    data = samples()
    sampler = RandomSampler(data, replacement=True, num_samples=48)
    return train(Torchs(Net()), DataLoader(data, 8, sampler=sampler))


@program
def an_endless_loader() -> Any:
    """Ranks have epochs of different lengths, but the same number of steps."""
    torch.manual_seed(dist.get_rank())
    part = DataLoader(TensorDataset(*samples()[dist.get_rank() * 40 :]), 8, shuffle=True)

    def batches() -> Iterator[Any]:
        steps = 0
        while True:
            for batch in part:
                yield batch
                steps += 1
                if steps == 15:
                    return

    return train(Torchs(Net()), batches())


@program
def workers() -> Any:
    data = samples()
    sampler = DistributedSampler(data)
    batches = DataLoader(data, 8, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    return train(Torchs(Net()), epochs(batches))


@program
def parallel_groups() -> Any:
    """Two ranks of four share batches, as in tensor parallelism."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    data = samples()
    sampler = DistributedSampler(data, 2, dist.get_rank() // 2)
    torch.manual_seed(dist.get_rank())
    return train(Torchs(Net(), process_group=own), epochs(DataLoader(data, 8, sampler=sampler)))


RANKS["parallel_groups"] = 4


@program
def scaler() -> Any:
    model = Torchs(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for x, y in epochs(loader()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    return result(model, [])


@program
def sharded_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns: only in the ranks

    model = Torchs(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(model, epochs(loader()), optimizer)


@program
def saving() -> Any:
    model = Torchs(Net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, epochs(loader(), 1), optimizer)
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    content = [file.getvalue()]
    dist.broadcast_object_list(content)
    states = torch.load(io.BytesIO(content[0]))
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return train(model, epochs(loader(), 1), optimizer)


@program
def auxiliary_loss() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out, y) + 0.01 * out.square().mean() + 0.1 * out.std()

    return train(Torchs(Net()), loss_of=loss_of)


@program
def language_model() -> Any:
    torch.manual_seed(dist.get_rank())
    model = Ours(GPT(0.1))
    batches = ((torch.randint(0, 32, (4, 8)), torch.randint(0, 32, (4, 8))) for _ in range(6))
    return train(model, batches, loss_of=lambda m, x, y: m(x, y)[1])


@program
def gradient_penalty() -> Any:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()

    return train(Ours(Net()), loss_of=loss_of)


@program
def another_optimizer_later() -> Any:
    net = Net()
    model = Torchs(net)
    first = torch.optim.SGD(net.head.parameters(), 0.05)
    train(model, epochs(loader(), 1), first)
    first.add_param_group({"params": list(net.first.parameters())})
    return train(model, epochs(loader(), 1), first)


@program
def compiled_wrapper() -> Any:
    model = Torchs(Net())
    step = torch.compile(model, backend="aot_eager")
    return train(model, loss_of=lambda m, x, y: F.cross_entropy(step(x), y))


class Closure:
    """An optimizer's step with the backward inside, as in Lightning's Trainer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(self, x: Tensor, y: Tensor) -> float:
        def closure() -> Tensor:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            return loss

        return float(self.optimizer.step(closure))


@program
def steps_with_closures() -> Any:
    trained = Closure(Ours(Net(norm=True)))
    losses = [trained.step(x, y) for x, y in epochs(loader())]
    return result(trained.model, losses)


WEIGHTS = torch.tensor([0.2, 1.7])
PROGRAMS |= {
    "join_of_torch": lambda: uneven(Torchs),
    "join_of_gradwire": lambda: uneven(Ours),
    "accumulation_of_torch": lambda: accumulation(Torchs),
    "accumulation_of_gradwire": lambda: accumulation(Ours),
    "unused_parameters": lambda: train(Torchs(Branches(), find_unused_parameters=True)),
    "unused_parameters_of_gradwire": lambda: train(Ours(Branches(), find_unused_parameters=True)),
    "static_graph": lambda: train(Torchs(Net(), static_graph=True)),
    "batch_norm_without_broadcasts": lambda: train(Torchs(Net(norm=True), broadcast_buffers=False)),
    "a_smaller_last_batch": lambda: accumulation(Torchs) + train(Torchs(Net()), epochs(loader(72))),
    "a_loss_times_two": lambda: train(
        Torchs(Net()), loss_of=lambda m, x, y: 2.0 * F.cross_entropy(m(x), y)
    ),
    "half_of_a_square": lambda: train(
        Torchs(nn.Linear(8, 1)),
        loss_of=lambda m, x, y: 0.5 * F.mse_loss(m(x), y[:, None].float()),
    ),
    "gather_with_gradients": lambda: contrastive(gradwire.all_gather),
    "gather_with_gradients_of_torch": lambda: contrastive(lambda z: torch.cat(all_gather(z))),
    "stream": lambda: train(Torchs(Net()), DataLoader(Stream(), 8)),
    "class_weights": lambda: train(
        Torchs(Net()), loss_of=lambda m, x, y: F.cross_entropy(m(x), y, WEIGHTS)
    ),
    "compiled": lambda: train(Torchs(torch.compile(Net(), backend="aot_eager"))),
}
