"""Join an elastic run through the store that the launcher names."""

from __future__ import annotations

import weakref
from datetime import timedelta

from torch.distributed import Store

from gradwire.elastic.members import (
    Options,
    Runtime,
    end_with_reports,
    members_of_environment,
    report,
    store_of_environment,
)
from gradwire.elastic.training.member_steps import Settings
from gradwire.elastic.training.run import Run
from gradwire.elastic.training.samples import check_shards
from gradwire.errors import ArgumentError, ArgumentTypeError

HEARTBEAT = timedelta(seconds=0.1)


def join(
    store: Store | None = None,
    *,
    members: int | None = None,
    backend: str = "shm",
    shards: int = 8,
    reproducible: bool = True,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    silence: timedelta = timedelta(seconds=5),
    nan_guard: bool = False,
    check_replicas: int = 100,
    name: str = "run",
) -> Run:
    """Join an elastic run.

    Other members do not wait for this process before it begins its steps.

    Args:
        store: Store that no member hosts; None for the one that `python -m gradwire.elastic` or the
            environment variable GRADWIRE_ELASTIC_STORE (host:port) names.
        members: Number of processes that the first generation waits for; None for the launcher's
            number, or 1.
        backend: "shm", which falls back to Gloo if members are on several hosts, or "gloo".
        shards: Number of shards of a step's batch: a power of two, the same on all members.
        reproducible: True to add gradients in one fixed tree over the shards, which gives the same
            bits with any members. False to let DistributedDataParallel average them, with its
            overlap and hooks; each member then runs its shards as one.
        seed: Seed of random numbers in forward, by step and shard, and of the order of samples.
        timeout: Timeout of a collective, of the wait for the first members, and of the wait for a
            member that is alive but does not come.
        silence: Time without a sign of life after which a member counts as lost. Dead processes of
            this host are noticed at once.
        nan_guard: True to raise on all members, naming rank, parameter and step, before a gradient
            that is not finite reaches the others.
        check_replicas: Number of steps between two comparisons of the members' parameters, which
            are also compared when the members change; 0 for none, for hosts that round differently.
        name: Name of the run, for a store with several runs.

    Raises:
        ArgumentError: There is no store, or an argument is invalid.
        NotSupportedError: This process has another version of PyTorch or gradwire than the run, or
            runs as another user than the members with which it would share memory.
        DistributedError: The store does not answer.

    Example:
        A single process; its gradients are the sum over all shards.

        >>> import torch
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        >>> run = join(dist.HashStore(), shards=2)
        >>> run.keep(model=net, optimizer=optimizer)
        >>> data = torch.arange(8.0).view(8, 1)
        >>> for step in run.steps(3, samples=8, batch=4):
        ...     with step:
        ...         for shard in step.shards:
        ...             step.backward(net(data[step.sample_ids(shard)]).mean())
        ...         step.commit(optimizer)
        >>> run.committed_steps, run.size
        (3, 1)
    """
    if backend not in ("shm", "gloo"):
        raise ArgumentError(f"backend is {backend!r}: pass 'shm' or 'gloo'")
    for argument, value in (("timeout", timeout), ("silence", silence)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ArgumentTypeError(f"{argument} is {value!r}: pass a positive timedelta")
    if silence < 3 * HEARTBEAT:
        raise ArgumentError(f"silence is {silence}: pass at least 3 signs of life, {3 * HEARTBEAT}")
    if check_replicas < 0:
        raise ArgumentError(f"check_replicas is {check_replicas}: pass a number of steps, or 0")
    if members is None:
        members = members_of_environment()
    options = Options(
        members,
        backend,
        timeout.total_seconds(),
        HEARTBEAT.total_seconds(),
        silence.total_seconds(),
    )
    chosen = store_of_environment(timeout) if store is None else store
    runtime = Runtime(chosen, name, options)
    settings = Settings(check_shards(shards), reproducible, seed, nan_guard, check_replicas)
    run = Run(runtime, settings)
    report(finished=False, member=run.number)  # a previous run of this process may have finished
    known = weakref.ref(run)
    end_with_reports(
        run.number, lambda: None if (found := known()) is None else found.committed_steps
    )
    return run
