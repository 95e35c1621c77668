"""For each op: what a step of it takes, made at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.collectives_case import INTEGERS, Case, Made, named, shape, uneven, with_size

__all__ = [
    "ASYNC", "MARKED", "NOT_RESOLVED", "ONE_WAY", "OPS", "TOKENS", "selects",
]  # fmt: skip


def all_reduce(case: Case) -> Made:
    args = case.reducing()
    if args["op"] in ("sum", "avg") and not case.twice and case.chance(0.15):
        args["invariant"] = case.dtype not in INTEGERS
    return case.alike(shape(case.rng)), args


def reduce(case: Case) -> Made:
    return case.alike(shape(case.rng)), case.reducing() | case.root()


def broadcast(case: Case) -> Made:
    receivers = ["tensor", "tensor"]
    if not (case.twice or case.by_grad):
        receivers.append("meta")
        if case.checks is True:
            receivers += ["shape", "none"]
    return case.alike(shape(case.rng)), case.root() | {"receivers": case.rng.choice(receivers)}


def all_gather(case: Case) -> Made:
    return _gathered(case)


def gather(case: Case) -> Made:
    shapes, args = _gathered(case)
    return shapes, args | case.root()


def _gathered(case: Case) -> Made:
    form = case.rng.choice(["even", "even", "stack", "sizes", "find"])
    if form in ("even", "stack"):
        own = shape(case.rng)
        dims = len(own) + (form == "stack")
        dim = case.rng.randrange(dims or 1)
        return case.alike(own), {"form": form, "dim": named(case, dim, dims)}
    sizes, dim, shapes = uneven(case)
    return shapes, {"form": form, "dim": named(case, dim, len(shapes[0])), "sizes": sizes}


def all_gather_list(case: Case) -> Made:
    form = case.rng.choice(["even", "sizes", "find"])
    if form == "even":
        return case.alike(shape(case.rng)), {"form": form}
    sizes = case.sizes()
    rest = shape(case.rng, case.rng.choice([0, 1, 2]))
    return tuple((size, *rest) for size in sizes), {"form": form, "sizes": sizes}


def scatter(case: Case) -> Made:
    sizes, dim, shapes = uneven(case)
    form = case.rng.choice(["tensor", "list"])
    if case.chance(0.4):
        sizes = [sizes[0]] * case.world
    if form == "list" and case.chance(0.15):
        sizes, dim, numbers, whole = [1] * case.world, 0, True, (case.world,)
    else:
        numbers, whole = False, with_size(shapes[0], dim, sum(sizes))
    args = {"form": form, "dim": named(case, dim, len(whole)), "sizes": sizes, "numbers": numbers}
    likes = ["tensor"] if case.twice or case.by_grad else ["none", "tensor", "meta"]
    receivers = ["tensor"] if case.twice or case.by_grad else ["none", "tensor"]
    args |= {"like": case.rng.choice(["none", *likes]), "receivers": case.rng.choice(receivers)}
    return case.alike(whole), args | case.root()


def reduce_scatter(case: Case) -> Made:
    sizes, dim, shapes = uneven(case)
    form = case.rng.choice(["even", "sizes", "list", "numbers"])
    if form == "even":
        sizes = [sizes[0]] * case.world
    if form == "numbers":
        sizes, dim, shapes = [1] * case.world, 0, ((1,),)
    whole = with_size(shapes[0], dim, sum(sizes))
    args = {"form": form, "dim": named(case, dim, len(whole)), "sizes": sizes}
    return case.alike(whole), args | case.reducing()


def all_to_all(case: Case) -> Made:
    world, rng = case.world, case.rng
    form = rng.choice(
        ["even", "splits", "both", "dims", "dims_splits", "list", "numbers", "output"]
    )
    own = shape(rng, rng.choice([1, 2, 3]) if form[:4] != "dims" else rng.choice([2, 3]))
    dim = rng.randrange(len(own)) if form not in ("list", "numbers") else 0
    if form in ("even", "dims"):
        splits = [[rng.choice([0, 1, 2])] * world] * world
    elif form == "output":  # even on each rank, though not alike
        splits = [[rng.choice([0, 1, 2])] * world for _ in range(world)]
    elif form == "dims_splits":  # what is joined along another dim is of one size in this
        splits = [[rng.choice([0, 1, 2]) for _ in range(world)]] * world
    elif form == "numbers":
        own, splits = (1,), [[1] * world] * world
    else:
        splits = [[rng.choice([0, 1, 2, 3]) for _ in range(world)] for _ in range(world)]
    args = {"form": form, "dim": dim, "splits": splits, "given": case.chance(0.5)}
    if form[:4] == "dims":
        args["concat_dim"] = rng.choice([d for d in range(len(own)) if d != dim])
    return tuple(with_size(own, dim, sum(row)) for row in splits), args


def ppermute(case: Case) -> Made:
    count = case.rng.randrange(case.world + 1)
    pairs = zip(
        case.rng.sample(range(case.world), count),
        case.rng.sample(range(case.world), count),
        strict=True,
    )
    return case.alike(shape(case.rng)), {"pairs": [*pairs]}


def shift(case: Case) -> Made:
    args = {"k": case.rng.choice([1, -1, 2, -3, 0, 5]), "wrap": case.chance(0.5)}
    return case.alike(shape(case.rng)), args


def halo_exchange(case: Case) -> Made:
    widths = case.rng.choice([1, (1, 0), (0, 2), (2, 1), 0])
    least = widths if isinstance(widths, int) else max(widths)
    _, dim, shapes = uneven(case, least)
    dim = named(case, dim, len(shapes[0]))
    return shapes, {"widths": widths, "dim": dim, "wrap": case.chance(0.5)}


def coalesced(case: Case) -> Made:
    own = shape(case.rng, case.rng.choice([1, 2]))
    args = {"mixed": case.dtype not in INTEGERS and case.chance(0.4)}
    args["unused"] = not case.twice and case.chance(0.3)
    args["containers"] = case.rng.randrange(1 << 16)
    return case.alike(own), args


def all_reduce_coalesced(case: Case) -> Made:
    shapes, args = coalesced(case)
    return shapes, args | {"op": case.reduction()}


def reduce_scatter_coalesced(case: Case) -> Made:
    shapes, args = all_reduce_coalesced(case)
    return case.alike((case.world * case.rng.choice([0, 1, 2]), *shapes[0][1:])), args


def send(case: Case) -> Made:
    world = case.world
    every = [(a, b) for a in range(world) for b in range(world) if a != b]
    moves = [case.rng.choice(every) for _ in range(case.rng.choice([1, 2, 3]))] if every else []
    return case.alike(shape(case.rng)), {"moves": moves}


def send_recv(case: Case) -> Made:
    shapes, args = ppermute(case)
    return shapes, {"pairs": [(a, b) for a, b in args["pairs"] if a != b]}


def plain(case: Case) -> Made:
    return case.alike(shape(case.rng)), {}


OPS: dict[str, tuple[float, Callable[[Case], Made]]] = {
    "all_reduce": (4, all_reduce), "reduce": (2, reduce), "broadcast": (2, broadcast),
    "all_gather": (3, all_gather), "all_gather_list": (2, all_gather_list), "gather": (2, gather),
    "scatter": (3, scatter), "reduce_scatter": (4, reduce_scatter), "all_to_all": (4, all_to_all),
    "ppermute": (2, ppermute), "shift": (1, shift), "halo_exchange": (2, halo_exchange),
    "all_reduce_coalesced": (1.5, all_reduce_coalesced), "all_gather_coalesced": (1.5, coalesced),
    "reduce_scatter_coalesced": (1.5, reduce_scatter_coalesced), "send": (1.5, send),
    "send_recv": (1.5, send_recv), "vary": (0.7, plain), "invariant": (0.5, plain),
    "barrier": (0.5, plain),
}  # fmt: skip
"""Weights, and what makes shapes and arguments."""

ASYNC = {
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_list", "gather", "scatter",
    "reduce_scatter", "all_to_all", "ppermute", "shift",
}  # fmt: skip
TOKENS = {"send"}
NOT_RESOLVED = {"send", "send_recv", "barrier"}
"""Whose ranks must want gradients alike."""
MARKED = {
    "all_reduce", "reduce", "broadcast", "reduce_scatter", "ppermute", "shift",
    "all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced",
}  # fmt: skip
"""Where shm finds by itself that only some ranks want a gradient."""
ONE_WAY = {"vary", "invariant"}
"""Whose second derivatives follow another convention than the sum of losses."""


def selects(args: dict[str, Any]) -> bool:
    """Whether the result depends on which of two values is larger."""
    return args.get("op") in ("max", "min")
