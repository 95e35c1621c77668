"""Environment variables by which launchers name the store, the members and the launch."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from gradwire.errors import ArgumentError, DistributedError

STORE_VARIABLE = "GRADWIRE_ELASTIC_STORE"
MEMBERS_VARIABLE = "GRADWIRE_ELASTIC_MEMBERS"
LAUNCH_VARIABLES = ("GRADWIRE_ELASTIC_LAUNCH", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Variables that identify a launch: a restarted process has the same value."""


def members_of_environment() -> int:
    """Return the number of members that the launcher names; 1 if it names none.

    Raises:
        ArgumentError: The variable does not hold a positive number.
    """
    text = os.environ.get(MEMBERS_VARIABLE, "1")
    if not text.isdecimal() or not int(text):
        raise ArgumentError(
            f"{MEMBERS_VARIABLE} is {text!r}: give the number of members, 1 or more"
        )
    return int(text)


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return the host and the port of a text "host:port".

    Args:
        text: The text.
        name: Name of the option or variable, for the error.

    Raises:
        ArgumentError: The text has another format.

    Example:
        >>> parse_address("10.0.0.1:29400", "--store")
        ('10.0.0.1', 29400)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError(f"{name} is {text!r}: give host:port, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def store_of_environment(timeout: timedelta) -> Store:
    """Connect to the store that the launcher names.

    Raises:
        ArgumentError: The launcher names no store, or the address cannot be parsed.
        DistributedError: The store does not answer.
    """
    address = os.environ.get(STORE_VARIABLE)
    if address is None:
        raise ArgumentError(
            f"store is None, and {STORE_VARIABLE} is not set: start with "
            "`python -m gradwire.elastic --nproc-per-node N script.py`, or pass a store"
        )
    host, port = parse_address(address, STORE_VARIABLE)
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise DistributedError(
            f"no store answers at {address} ({STORE_VARIABLE}): start it with `python -m "
            f"gradwire.elastic --serve {address}` on its host, and keep it running ({error})"
        ) from error
