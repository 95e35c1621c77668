"""How a process joins an elastic run: by the store that its launcher names."""

from __future__ import annotations

import weakref
from datetime import timedelta

from torch.distributed import Store

from gradwire.elastic.members import (
    Engine,
    Options,
    end_with_reports,
    members_of_environment,
    report,
    store_of_environment,
)
from gradwire.elastic.training.run import Run
from gradwire.elastic.training.samples import check_shards
from gradwire.errors import ArgumentError, ArgumentTypeError

NAME = "run"


def join(
    store: Store | None = None,
    *,
    members: int | None = None,
    backend: str = "shm",
    shards: int = 8,
    reproducible: bool = True,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    heartbeat: timedelta = timedelta(seconds=0.1),
    silence: timedelta = timedelta(seconds=5),
    nan_guard: bool = False,
    name: str = NAME,
) -> Run:
    """Join an elastic run; nobody waits for this process before it begins its steps.

    Args:
        store: A store that no member hosts; None for the one that `python -m gradwire.elastic` or
            the environment variable GRADWIRE_ELASTIC_STORE (host:port) names.
        members: How many processes the first epoch waits for; None for what the launcher says, or
            one.
        backend: "shm", which is Gloo where members are on several hosts; or "gloo".
        shards: Into how many shards a step's batch is cut: a power of two, the same on all members.
        reproducible: Add gradients in one fixed tree over the shards: the same bits whichever
            members there are. Otherwise DistributedDataParallel averages them, with its overlap and
            hooks, and each member runs its shards as one.
        seed: Of random numbers in forward, by step and shard, and of the samples' order.
        timeout: For a collective, for the first members, and for one that runs but does not come.
        heartbeat: Between two signs of life.
        silence: Without one, a member is taken for lost. Dead processes of this host are known at
            once.
        nan_guard: Raise on all members, naming rank, parameter and step, before a gradient that is
            not finite reaches the others.
        name: Of the run, where a store has several.

    Raises:
        ArgumentError: There is no store, or an argument cannot be used.
        NotSupportedError: This process has another version of PyTorch or gradwire than the run, or
            is another user's than those it would share memory with.
        DistributedError: The store does not answer.

    Example:
        One process that is alone; the sum of its gradients is that of all shards.

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
        >>> run.version, run.size
        (3, 1)
    """
    if backend not in ("shm", "gloo"):
        raise ArgumentError(f"backend is {backend!r}: pass 'shm' or 'gloo'")
    for argument, value in (("timeout", timeout), ("heartbeat", heartbeat), ("silence", silence)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ArgumentTypeError(f"{argument} is {value!r}: pass a positive timedelta")
    if silence < 3 * heartbeat:
        raise ArgumentError(f"silence is {silence}, heartbeat {heartbeat}: pass at least 3 of them")
    if members is None:
        members = members_of_environment()
    options = Options(
        members,
        backend,
        timeout.total_seconds(),
        heartbeat.total_seconds(),
        silence.total_seconds(),
    )
    chosen = store_of_environment(timeout) if store is None else store
    engine = Engine(chosen, name, options)
    run = Run(
        engine, check_shards(shards), reproducible=reproducible, seed=seed, nan_guard=nan_guard
    )
    report(finished=False)  # of a run that this process has had before
    known = weakref.ref(run)
    end_with_reports(lambda: None if (found := known()) is None else found.version)
    return run
