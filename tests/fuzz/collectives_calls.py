"""How a step calls its collective, on one rank of its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz import collectives_local as local
from fuzz.collectives_plan import Step
from fuzz.containers import plain, wrapped
from gradwire import collectives

__all__ = ["Call", "call"]


class Call:
    """A step on a rank.

    Args:
        step: The step.
        x: This rank's tensor, in its shape and layout.
        group: The group.
        token: The rank's last token.
        meta_grad: What a stand-in without data has for requires_grad.
    """

    def __init__(
        self, step: Step, x: Tensor, group: Any, token: Tensor | None, meta_grad: bool
    ) -> None:
        self.step, self.x, self.group = step, x, group
        self.token, self.meta_grad = token, meta_grad
        self.args = step.args
        self.rank = group.rank()
        self.common: dict[str, Any] = {"group": group}
        if step.asynchronous:
            self.common["async_op"] = True

    def op(self) -> Any:
        name = self.args["op"]
        return getattr(dist.ReduceOp, name.upper()) if self.args.get("as_enum") else name

    def root(self, name: str) -> dict[str, int]:
        root = self.args["root"]
        if self.args["by"] == "group":
            return {f"group_{name}": root}
        return {name: dist.get_global_rank(self.group, root)}

    def at_root(self) -> bool:
        return bool(self.rank == self.args["root"])

    def sizes(self) -> dict[str, Any]:
        form = self.args["form"]
        if form == "stack":
            return {"stack": True}
        return {} if form == "even" else {"sizes": "find" if form == "find" else self.args["sizes"]}


def all_reduce(c: Call) -> Any:
    invariant = c.args.get("invariant", False)
    return collectives.all_reduce(c.x, c.op(), invariant=invariant, **c.common)


def reduce(c: Call) -> Any:
    return collectives.reduce(c.x, op=c.op(), **c.root("dst"), **c.common)


def broadcast(c: Call) -> Any:
    x: Any = c.x
    if not c.at_root():
        x = {
            "tensor": c.x,
            "meta": torch.empty_like(c.x, device="meta", requires_grad=c.meta_grad),
            "shape": tuple(c.x.shape),
            "none": None,
        }[c.args["receivers"]]
    return collectives.broadcast(x, **c.root("src"), **c.common)


def all_gather(c: Call) -> Any:
    return collectives.all_gather(c.x, c.args["dim"], **c.sizes(), **c.common)


def all_gather_list(c: Call) -> Any:
    return collectives.all_gather_list(c.x, **c.sizes(), **c.common)


def gather(c: Call) -> Any:
    return collectives.gather(c.x, dim=c.args["dim"], **c.sizes(), **c.root("dst"), **c.common)


def scatter(c: Call) -> Any:
    pieces = local.pieces_of(c.x, c.step)
    whole = [*pieces] if c.args["form"] == "list" else c.x
    own = pieces[c.rank]
    like = {
        "none": None,
        "tensor": own,
        "meta": torch.empty_like(own, device="meta", requires_grad=c.meta_grad),
    }[c.args["like"]]
    xs = whole if c.at_root() or c.args["receivers"] == "tensor" else None
    return collectives.scatter(
        xs, dim=c.args["dim"], sizes=None if c.args["numbers"] else c.args["sizes"],
        like=like, **c.root("src"), **c.common,
    )  # fmt: skip


def reduce_scatter(c: Call) -> Any:
    dim, form = c.args["dim"], c.args["form"]
    if form in ("list", "numbers"):
        pieces = [*local.pieces_of(c.x, c.step)]
        return collectives.reduce_scatter(pieces, c.op(), 0 if form != "list" else dim, **c.common)
    sizes = {} if form == "even" else {"sizes": c.args["sizes"]}
    return collectives.reduce_scatter(c.x, c.op(), dim, **sizes, **c.common)


def all_to_all(c: Call) -> Any:
    form, splits, dim = c.args["form"], c.args["splits"], c.args["dim"]
    received = [row[c.rank] for row in splits]
    if form in ("list", "numbers"):
        own = splits[c.rank]
        pieces = [*(c.x.unbind() if form == "numbers" else c.x.split(own))]
        given = {"output_splits": received} if c.args["given"] else {}
        return collectives.all_to_all(pieces, **given, **c.common)
    given = {"split_dim": dim}
    if form in ("splits", "both", "dims_splits"):
        given["input_splits"] = splits[c.rank]
    if form in ("both", "output"):
        given["output_splits"] = received
    if "concat_dim" in c.args:
        given["concat_dim"] = c.args["concat_dim"]
    return collectives.all_to_all(c.x, **given, **c.common)


def ppermute(c: Call) -> Any:
    return collectives.ppermute(c.x, c.args["pairs"], **c.common)


def shift(c: Call) -> Any:
    return collectives.shift(c.x, c.args["k"], wrap=c.args["wrap"], **c.common)


def halo_exchange(c: Call) -> Any:
    args = c.args
    return collectives.halo_exchange(
        c.x, args["widths"], args["dim"], wrap=args["wrap"], **c.common
    )


def coalesced(c: Call) -> Any:
    given: dict[str, Any] = {"op": c.args["op"]} if "op" in c.args else {}
    seed = c.args["containers"]
    tree = wrapped(local.tree_of(c.x, c.step), seed, c.rank)
    return plain(getattr(collectives, c.step.op)(tree, **given, **c.common))


def send(c: Call) -> Any:
    came = []
    for source, target in c.args["moves"]:
        if c.rank == source:
            c.token = collectives.send(c.x, group_dst=target, token=c.token, **c.common)
        elif c.rank == target:
            y, c.token = collectives.recv(c.x, group_src=source, token=c.token, **c.common)
            came.append(y)
    return [*came, local.bystander(c.x)]


def send_recv(c: Call) -> Any:
    there, back = dict(c.args["pairs"]), {b: a for a, b in c.args["pairs"]}
    if c.rank not in there and c.rank not in back:
        return local.bystander(c.x)
    return collectives.send_recv(
        c.x, group_dst=there.get(c.rank), group_src=back.get(c.rank), **c.common
    )


def vary(c: Call) -> Any:
    return collectives.vary(c.x, **c.common)


def invariant(c: Call) -> Any:
    op = "bor" if c.x.dtype == torch.bool else "sum"
    total = collectives.all_reduce(c.x, op, **c.common)
    return collectives.invariant(total, **c.common)


def barrier(c: Call) -> Any:
    return collectives.barrier(c.x, **c.common)


CALLS: dict[str, Callable[[Call], Any]] = {
    f.__name__: f
    for f in (
        all_reduce, reduce, broadcast, all_gather, all_gather_list, gather, scatter, reduce_scatter,
        all_to_all, ppermute, shift, halo_exchange, send, send_recv, vary, invariant, barrier,
    )
}  # fmt: skip


def call(c: Call) -> Any:
    """The collective's result: a tensor, some in a tuple or pytree, or a handle."""
    return coalesced(c) if c.step.op.endswith("coalesced") else CALLS[c.step.op](c)
