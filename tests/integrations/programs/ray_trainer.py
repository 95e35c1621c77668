"""Ray Train's TorchTrainer with two workers."""

import json
import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, str]) -> None:
    import ray.train.torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    net = ray.train.torch.prepare_model(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        x = torch.randn(8, 8)
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    from gradwire.shm import shares_memory  # here, so that it puts nothing in place

    told = [type(net).__module__, dist.get_backend(), shares_memory(dist.group.WORLD), losses]
    if dist.get_rank() == 0:
        Path(config["file"]).write_text(json.dumps(told))


def put_gradwire_in_place() -> None:
    """What Ray calls in each worker before anything else of the program."""
    from gradwire import compat

    compat.install()


if __name__ == "__main__":
    hook = {"worker_process_setup_hook": put_gradwire_in_place} if "hook" in sys.argv else {}
    file = f"{sys.argv[1]}/told.json"
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=hook, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"file": file},
        torch_config=TorchConfig(backend="shm") if "shm" in sys.argv else None,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=f"{sys.argv[1]}/ray"),
    )
    trainer.fit()
    print("RESULT", Path(file).read_text())
