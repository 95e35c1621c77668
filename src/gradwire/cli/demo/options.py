"""The demo's options, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import ArgumentError

_NO_TRANSPORT = {"undefined", "fake"}  # torch lists them, but they send nothing


PROCESSES, DEVICES = "processes", "devices"
REPLICAS = 4
HOOK_NAMES = ("none", "all_reduce", "fp16", "bf16", "powersgd")
TEST_IMAGES, TRAIN_IMAGES = 360, 1437


@dataclass(frozen=True)
class DemoOptions:
    """The demo's settings.

    Args:
        shares: How many processes train, or how many replicas in mode "devices"; each has a share
            of every batch.
        backend: Of torch.distributed, for the processes' messages.
        epochs: How often each training image is seen.
        hook: The communication hook, by its name in `gradwire.cli.demo.wrap`.
        seed: Of the initial parameters and of the order of the images.
        batch_size: Images per step, over all shares together.
        mode: `PROCESSES`, or `DEVICES`: replicas on the CPU of one process.

    Raises:
        ArgumentError: A value cannot be used.
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
                f"--batch-size is {self.batch_size}; it must be at least {name} ({self.shares}), "
                f"so that each {taker} has an image, and at most {TRAIN_IMAGES}, all there are"
            )


def _usable_backends() -> str:
    import torch.distributed as dist

    names = [name for name in dist.Backend.backend_list if name not in _NO_TRANSPORT]
    return ", ".join(name for name in names if dist.is_backend_available(name))


def check_backend(backend: str, local_size: int) -> None:
    """Raise unless `local_size` processes of this host can use `backend`.

    Raises:
        ArgumentError: Torch does not know it, comes without it, or finds too few GPUs for it.
    """
    import torch
    import torch.distributed as dist

    if backend in _NO_TRANSPORT or backend not in dist.Backend.backend_list:
        raise ArgumentError(
            f"--backend is {backend!r}, which torch.distributed does not know; "
            f"it can use here: {_usable_backends()}"
        )
    supported = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" not in supported:
        found = torch.accelerator.device_count()
        if found < local_size:
            raise ArgumentError(
                f"--backend is {backend!r}, which needs a GPU for each process on a machine: "
                f"{local_size} processes, {found} GPUs; use --backend gloo"
            )
    if not dist.is_backend_available(backend):
        raise ArgumentError(
            f"--backend is {backend!r}, which this build of torch comes without; "
            f"it can use here: {_usable_backends()}"
        )
