"""Options of the demo, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import ArgumentError

_NO_TRANSPORT = {"undefined", "fake"}  # backends that torch lists but that send nothing


PROCESSES, DEVICES = "processes", "devices"
REPLICAS = 4
HOOK_NAMES = ("none", "all_reduce", "fp16", "bf16", "powersgd")
TEST_IMAGES, TRAIN_IMAGES = 360, 1437


@dataclass(frozen=True)
class DemoOptions:
    """Settings of the demo.

    Args:
        shares: Number of processes, or of replicas in mode "devices"; each gets a share of every
            batch.
        backend: Backend of torch.distributed.
        epochs: Number of passes over the training images.
        hook: Name of the communication hook in `gradwire.cli.demo.train`.
        seed: Seed of the initial parameters and of the order of images.
        batch_size: Images per step, over all shares.
        mode: `PROCESSES`, or `DEVICES`: replicas on the CPU of one process.

    Raises:
        ArgumentError: A value is out of range.
    """

    shares: int = 2
    backend: str = "shm"
    epochs: int = 12
    hook: str = "none"
    seed: int = 0
    batch_size: int = 64
    mode: str = PROCESSES

    def __post_init__(self) -> None:
        if not self.shares <= self.batch_size <= TRAIN_IMAGES:
            name, taker = "--nproc", "process"
            if self.mode == DEVICES:
                name, taker = "the number of replicas", "replica"
            raise ArgumentError(
                f"--batch-size is {self.batch_size}: pass at least {name} ({self.shares}), so that "
                f"each {taker} has an image, and at most {TRAIN_IMAGES}, the number of images"
            )


def _usable_backends() -> str:
    import torch.distributed as dist

    names = [name for name in dist.Backend.backend_list if name not in _NO_TRANSPORT]
    return ", ".join(name for name in names if dist.is_backend_available(name))


def check_backend(backend: str, local_size: int) -> None:
    """Check that `local_size` processes of this host can use `backend`.

    Raises:
        ArgumentError: The backend is unknown, missing in this build of torch, or needs more GPUs.
    """
    import torch
    import torch.distributed as dist

    if backend in _NO_TRANSPORT or backend not in dist.Backend.backend_list:
        raise ArgumentError(
            f"--backend is {backend!r}, which torch.distributed does not know: pass one of "
            f"{_usable_backends()}"
        )
    supported = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" not in supported:
        found = torch.accelerator.device_count()
        if found < local_size:
            raise ArgumentError(
                f"--backend is {backend!r}, which needs one GPU per process: {local_size} "
                f"processes, {found} GPUs; use --backend gloo"
            )
    if not dist.is_backend_available(backend):
        raise ArgumentError(
            f"--backend is {backend!r}, which this build of torch lacks: pass one of "
            f"{_usable_backends()}"
        )
