"""What the demo is asked to do, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.cli.demo.data import TRAIN_IMAGES
from gradwire.errors import ArgumentError

__all__ = ["DemoOptions", "DevicesOptions", "check_backend"]

_NO_TRANSPORT = {"undefined", "fake"}  # names torch lists that carry nothing from rank to rank


@dataclass(frozen=True)
class DemoOptions:
    """The demo's settings.

    Args:
        nproc: How many processes train.
        backend: What carries their messages: a backend of torch.distributed.
        epochs: How often each training image is seen.
        hook: The communication hook, by its name in `gradwire.cli.demo.wrap`.
        seed: Of the first parameters and of the order of the images.
        batch_size: Images per step, over all processes together.

    Raises:
        ArgumentError: A value cannot be used.
    """

    nproc: int = 2
    backend: str = "shm"
    epochs: int = 12
    hook: str = "none"
    seed: int = 0
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ArgumentError(f"--nproc is {self.nproc}; at least 1 process has to train")
        _check_training(self.epochs, self.batch_size, self.nproc, "--nproc", "process")


@dataclass(frozen=True)
class DevicesOptions:
    """The settings of the demo's mode "devices": one process, several replicas on its CPU.

    Args:
        epochs: How often each training image is seen.
        seed: Of the first parameters and of the order of the images.
        batch_size: Images per step, over all replicas together.
        replicas: How many there are.

    Raises:
        ArgumentError: A value cannot be used.
    """

    epochs: int = 12
    seed: int = 0
    batch_size: int = 64
    replicas: int = 4

    def __post_init__(self) -> None:
        _check_training(
            self.epochs, self.batch_size, self.replicas, "the number of replicas", "replica"
        )


def _check_training(epochs: int, batch_size: int, shares: int, name: str, taker: str) -> None:
    if epochs < 1:
        raise ArgumentError(f"--epochs is {epochs}; at least 1 is needed to train at all")
    if not shares <= batch_size <= TRAIN_IMAGES:
        raise ArgumentError(
            f"--batch-size is {batch_size}; it must be at least {name} ({shares}), so that each "
            f"{taker} has an image, and at most {TRAIN_IMAGES}, all there are"
        )


def _usable_backends() -> str:
    names = [name for name in dist.Backend.backend_list if name not in _NO_TRANSPORT]
    return ", ".join(name for name in names if dist.is_backend_available(name))


def check_backend(backend: str, local_size: int) -> None:
    """Raise unless `local_size` processes of this host can use `backend`.

    Raises:
        ArgumentError: Torch does not know it, comes without it, or finds too few GPUs for it.
    """
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
