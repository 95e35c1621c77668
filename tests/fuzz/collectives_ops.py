"""The collectives' table: how each op is drawn, what it gives, and how it is called.

What it gives is a formula on a list of tensors, one for each rank, in plain torch operations, which
autograd differentiates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from fuzz.containers import plain, wrapped
from gradwire import collectives

Shape = tuple[int, ...]
Made = tuple[tuple[Shape, ...], dict[str, Any]]
Ranks = list[Tensor]
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int64", "int32", "bool")


@dataclass(frozen=True)
class Step:
    """A collective on register `given`, what is done before and after; `number` is its result's.

    `members` are the group's global ranks, in the order in which it was made; () is the default.
    `shapes` and `layouts` have an entry for each of them. The result of a `late` one is waited for
    where it is used. `checkpoint` is "", "plain" or "reentrant"; `losses` has each rank's way to
    use the result, or is () if no loss does.
    """

    number: int
    op: str
    given: int
    members: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: str
    layouts: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    late: bool = False
    post: str = "none"
    checkpoint: str = ""
    losses: tuple[str, ...] = ()


@dataclass
class Case:
    rng: random.Random
    world: int
    dtype: str
    twice: bool
    by_grad: bool
    checks: bool | None

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def reduction(self) -> str:
        if self.dtype == "bool":
            return self.rng.choice(["band", "bor", "bxor", "max", "min"])
        names = ["sum", "product"]
        if self.dtype in INTEGERS:
            return self.rng.choice([*names, "max", "min", "band", "bor", "bxor"])
        names += ["sum", "avg"]
        return self.rng.choice(names if self.dtype in COMPLEX else [*names, "max", "min"])

    def reducing(self) -> dict[str, Any]:
        args: dict[str, Any] = {"op": self.reduction()}
        return args | ({"as_enum": True} if self.chance(0.2) else {})

    def root(self) -> dict[str, Any]:
        return {"root": self.rng.randrange(self.world), "by": self.rng.choice(["global", "group"])}

    def sizes(self, least: int = 0) -> list[int]:
        if self.chance(0.3):
            return [max(least, self.rng.choice([1, 2, 3]))] * self.world
        return [max(least, self.rng.choice([0, 1, 1, 2, 3, 5])) for _ in range(self.world)]

    def alike(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,) * self.world

    def plain(self) -> Made:
        return self.alike(shape(self.rng)), {}

    def uneven(self, least: int = 0) -> tuple[list[int], int, tuple[Shape, ...]]:
        """Sizes, the dim, and shapes that differ there."""
        whole = shape(self.rng, self.rng.choice([1, 1, 2, 3]))
        dim = self.rng.randrange(len(whole))
        sizes = self.sizes(least)
        return sizes, dim, tuple(with_size(whole, dim, size) for size in sizes)

    def named(self, dim: int, dims: int) -> int:
        """A dim, counted from either end."""
        return dim - dims if dims and self.chance(0.3) else dim


def shape(rng: random.Random, dims: int | None = None) -> Shape:
    """Of any tensor: mostly small, sometimes empty, seldom large."""
    dims = rng.choice([0, 1, 1, 2, 2, 3]) if dims is None else dims
    if dims == 2 and rng.random() < 0.04:
        return rng.choice([(257, 33), (64, 1025), (3, 40_001)])
    return tuple(rng.choice([0, 1, 1, 2, 3, 3, 4, 5]) if rng.random() < 0.3 else
                 rng.choice([1, 2, 3, 4]) for _ in range(dims))  # fmt: skip


def with_size(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


class Call:
    """A step on a rank: its tensor in its shape and layout, the group and the rank's last token.

    `meta_grad` is what a stand-in without data has for requires_grad.
    """

    def __init__(
        self, step: Step, x: Tensor, group: Any, token: Tensor | None, meta_grad: bool
    ) -> None:
        self.step, self.x, self.group = step, x, group
        self.token, self.meta_grad = token, meta_grad
        self.args, self.rank = step.args, group.rank()
        self.common: dict[str, Any] = {"group": group}
        if step.asynchronous:
            self.common["async_op"] = True

    def __call__(self, *given: Any, **more: Any) -> Any:
        """The collective's result: a tensor, some in a tuple or pytree, or a handle."""
        return getattr(collectives, self.step.op)(*given, **more, **self.common)

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

    def meta(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="meta", requires_grad=self.meta_grad)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype; of complex numbers the real part, where that is real."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def bystander(x: Tensor) -> Tensor:
    """A step's result on a rank outside its group."""
    y = x * 0.5 if x.is_floating_point() or x.is_complex() else x.clone()
    return y.contiguous()


# -- reductions and broadcast ----------------------------------------------------------------------


def reduced(xs: Sequence[Tensor], op: str) -> Tensor:
    if op == "avg":
        return torch.stack([*xs]).mean(0)
    if op in ("max", "min"):
        return getattr(torch.stack([*xs]), f"a{op}")(0)
    pairwise = {
        "sum": torch.add, "product": torch.mul,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    return fold(pairwise[op], xs)


def only_at_root(whole: Tensor, xs: Ranks, step: Step) -> Ranks:
    return [whole if r == step.args["root"] else torch.zeros_like(whole) for r in range(len(xs))]


def draw_all_reduce(case: Case) -> Made:
    args = case.reducing()
    if args["op"] in ("sum", "avg") and not case.twice and case.chance(0.15):
        args["invariant"] = case.dtype not in INTEGERS
    return case.alike(shape(case.rng)), args


def all_reduce(xs: Ranks, step: Step) -> Ranks:
    total = reduced(xs, step.args["op"])
    if not step.args.get("invariant"):
        return [total] * len(xs)
    # Each rank's cotangent is whole already: it goes to the rank's own part alone.
    share = 1 / len(xs) if step.args["op"] == "avg" else 1
    return [total.detach() + (x - x.detach()) * share for x in xs]


def draw_broadcast(case: Case) -> Made:
    receivers = ["tensor", "tensor"]
    if not (case.twice or case.by_grad):
        receivers.append("meta")
        if case.checks is True:
            receivers += ["shape", "none"]
    return case.alike(shape(case.rng)), case.root() | {"receivers": case.rng.choice(receivers)}


def call_broadcast(c: Call) -> Any:
    x: Any = c.x
    if not c.at_root():
        stand_ins = {"tensor": c.x, "meta": c.meta(c.x), "shape": tuple(c.x.shape), "none": None}
        x = stand_ins[c.args["receivers"]]
    return c(x, **c.root("src"))


# -- gathering and scattering ----------------------------------------------------------------------


def draw_all_gather(case: Case) -> Made:
    form = case.rng.choice(["even", "even", "stack", "sizes", "find"])
    if form in ("even", "stack"):
        own = shape(case.rng)
        dims = len(own) + (form == "stack")
        dim = case.rng.randrange(dims or 1)
        return case.alike(own), {"form": form, "dim": case.named(dim, dims)}
    sizes, dim, shapes = case.uneven()
    return shapes, {"form": form, "dim": case.named(dim, len(shapes[0])), "sizes": sizes}


def draw_gather(case: Case) -> Made:
    shapes, args = draw_all_gather(case)
    return shapes, args | case.root()


def joined(xs: Ranks, step: Step) -> Tensor:
    if step.args["form"] == "stack":
        return torch.stack(xs, step.args["dim"])
    return torch.cat([x if x.dim() else x.reshape(1) for x in xs], step.args["dim"])


def draw_all_gather_list(case: Case) -> Made:
    form = case.rng.choice(["even", "sizes", "find"])
    if form == "even":
        return case.alike(shape(case.rng)), {"form": form}
    sizes = case.sizes()
    rest = shape(case.rng, case.rng.choice([0, 1, 2]))
    return tuple((size, *rest) for size in sizes), {"form": form, "sizes": sizes}


def pieces_of(x: Tensor, step: Step) -> tuple[Tensor, ...]:
    if step.args.get("numbers") or step.args["form"] == "numbers":
        return x.unbind()
    return x.split(step.args["sizes"], step.args["dim"])


def draw_scatter(case: Case) -> Made:
    sizes, dim, shapes = case.uneven()
    form = case.rng.choice(["tensor", "list"])
    if case.chance(0.4):
        sizes = [sizes[0]] * case.world
    if form == "list" and case.chance(0.15):
        sizes, dim, numbers, whole = [1] * case.world, 0, True, (case.world,)
    else:
        numbers, whole = False, with_size(shapes[0], dim, sum(sizes))
    args = {"form": form, "dim": case.named(dim, len(whole)), "sizes": sizes, "numbers": numbers}
    likes = ["tensor"] if case.twice or case.by_grad else ["none", "tensor", "meta"]
    receivers = ["tensor"] if case.twice or case.by_grad else ["none", "tensor"]
    args |= {"like": case.rng.choice(["none", *likes]), "receivers": case.rng.choice(receivers)}
    return case.alike(whole), args | case.root()


def call_scatter(c: Call) -> Any:
    pieces = pieces_of(c.x, c.step)
    whole = [*pieces] if c.args["form"] == "list" else c.x
    own = pieces[c.rank]
    like = {"none": None, "tensor": own, "meta": c.meta(own)}[c.args["like"]]
    xs = whole if c.at_root() or c.args["receivers"] == "tensor" else None
    sizes = None if c.args["numbers"] else c.args["sizes"]
    return c(xs, dim=c.args["dim"], sizes=sizes, like=like, **c.root("src"))


def draw_reduce_scatter(case: Case) -> Made:
    sizes, dim, shapes = case.uneven()
    form = case.rng.choice(["even", "sizes", "list", "numbers"])
    if form == "even":
        sizes = [sizes[0]] * case.world
    if form == "numbers":
        sizes, dim, shapes = [1] * case.world, 0, ((1,),)
    whole = with_size(shapes[0], dim, sum(sizes))
    args = {"form": form, "dim": case.named(dim, len(whole)), "sizes": sizes}
    return case.alike(whole), args | case.reducing()


def call_reduce_scatter(c: Call) -> Any:
    dim, form = c.args["dim"], c.args["form"]
    if form in ("list", "numbers"):
        return c([*pieces_of(c.x, c.step)], c.op(), 0 if form != "list" else dim)
    sizes = {} if form == "even" else {"sizes": c.args["sizes"]}
    return c(c.x, c.op(), dim, **sizes)


def draw_all_to_all(case: Case) -> Made:
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


def all_to_all(xs: Ranks, step: Step) -> Any:
    dim, splits = step.args["dim"], step.args["splits"]
    cut = [x.split(row, dim) for x, row in zip(xs, splits, strict=True)]
    came = [[pieces[r] for pieces in cut] for r in range(len(xs))]
    if step.args["form"] == "list":
        return came
    if step.args["form"] == "numbers":
        return [[piece.reshape(()) for piece in pieces] for pieces in came]
    return [torch.cat(pieces, step.args.get("concat_dim", dim)) for pieces in came]


def call_all_to_all(c: Call) -> Any:
    form, splits = c.args["form"], c.args["splits"]
    received = {"output_splits": [row[c.rank] for row in splits]}
    if form in ("list", "numbers"):
        pieces = [*(c.x.unbind() if form == "numbers" else c.x.split(splits[c.rank]))]
        return c(pieces, **received if c.args["given"] else {})
    given = {"split_dim": c.args["dim"]}
    if form in ("splits", "both", "dims_splits"):
        given["input_splits"] = splits[c.rank]
    if form in ("both", "output"):
        given |= received
    if "concat_dim" in c.args:
        given["concat_dim"] = c.args["concat_dim"]
    return c(c.x, **given)


# -- between pairs of ranks ------------------------------------------------------------------------


def draw_ppermute(case: Case) -> Made:
    count = case.rng.randrange(case.world + 1)
    sources = case.rng.sample(range(case.world), count)
    targets = case.rng.sample(range(case.world), count)
    return case.alike(shape(case.rng)), {"pairs": [*zip(sources, targets, strict=True)]}


def ppermute(xs: Ranks, step: Step) -> Ranks:
    came = {target: xs[source] for source, target in step.args["pairs"]}
    return [came.get(r, torch.zeros_like(x)) for r, x in enumerate(xs)]


def draw_shift(case: Case) -> Made:
    args = {"k": case.rng.choice([1, -1, 2, -3, 0, 5]), "wrap": case.chance(0.5)}
    return case.alike(shape(case.rng)), args


def shift(xs: Ranks, step: Step) -> Ranks:
    sources = [r - step.args["k"] for r in range(len(xs))]
    if step.args["wrap"]:
        return [xs[s % len(xs)] for s in sources]
    return [xs[s] if 0 <= s < len(xs) else torch.zeros_like(xs[0]) for s in sources]


def draw_halo_exchange(case: Case) -> Made:
    widths = case.rng.choice([1, (1, 0), (0, 2), (2, 1), 0])
    least = widths if isinstance(widths, int) else max(widths)
    _, dim, shapes = case.uneven(least)
    dim = case.named(dim, len(shapes[0]))
    return shapes, {"widths": widths, "dim": dim, "wrap": case.chance(0.5)}


def halo_exchange(xs: Ranks, step: Step) -> Ranks:
    widths, dim, world = step.args["widths"], step.args["dim"], len(xs)
    before, behind = (widths, widths) if isinstance(widths, int) else widths

    def edge(rank: int, first: bool, width: int) -> Tensor:
        x = xs[rank % world]
        part = x.narrow(dim, 0 if first else x.shape[dim] - width, width)
        return part if step.args["wrap"] or 0 <= rank < world else torch.zeros_like(part)

    return [
        torch.cat([edge(r - 1, False, before), x, edge(r + 1, True, behind)], dim)
        for r, x in enumerate(xs)
    ]


def draw_send(case: Case) -> Made:
    ranks = range(case.world)
    every = [(a, b) for a in ranks for b in ranks if a != b]
    moves = [case.rng.choice(every) for _ in range(case.rng.choice([1, 2, 3]))] if every else []
    return case.alike(shape(case.rng)), {"moves": moves}


def send(xs: Ranks, step: Step) -> Any:
    return [
        [*(xs[a] for a, b in step.args["moves"] if b == r), bystander(x)] for r, x in enumerate(xs)
    ]


def call_send(c: Call) -> Any:
    came = []
    if c.x.requires_grad:  # the sender's backward continues to x, and so must that of other ranks
        nothing = c.x.abs().reshape(-1)[:0].sum().float()
        c.token = nothing if c.token is None else c.token + nothing
    for source, target in c.args["moves"]:
        if c.rank == source:
            c.token = collectives.send(c.x, group_dst=target, token=c.token, **c.common)
        elif c.rank == target:
            y, c.token = collectives.recv(c.x, group_src=source, token=c.token, **c.common)
            came.append(y)
    return [*came, bystander(c.x)]


def draw_send_recv(case: Case) -> Made:
    shapes, args = draw_ppermute(case)
    return shapes, {"pairs": [(a, b) for a, b in args["pairs"] if a != b]}


def send_recv(xs: Ranks, step: Step) -> Ranks:
    moving = {rank for pair in step.args["pairs"] for rank in pair}
    moved = ppermute(xs, step)
    return [moved[r] if r in moving else bystander(x) for r, x in enumerate(xs)]


def call_send_recv(c: Call) -> Any:
    there, back = dict(c.args["pairs"]), {b: a for a, b in c.args["pairs"]}
    if c.rank not in there and c.rank not in back:
        return bystander(c.x)
    return c(c.x, group_dst=there.get(c.rank), group_src=back.get(c.rank))


# -- trees -----------------------------------------------------------------------------------------


def tree_of(x: Tensor, step: Step) -> dict[str, Any]:
    """The tensors of a coalesced step, which are made of one."""
    tree: dict[str, Any] = {"a": x, "b": [x * 2 if x.dtype != torch.bool else ~x]}
    if step.op == "reduce_scatter_coalesced":
        tree["b"].append(x.flatten(1)[:, :1] if x.dim() > 1 else x * 3)
    elif step.op != "all_gather_coalesced":
        tree["b"].append(x.reshape(-1)[:1].sum().to(x.dtype))
    if step.args["mixed"]:
        complex_one = x.is_complex() and step.args.get("op") not in ("max", "min")
        other = torch.complex128 if complex_one else torch.float64
        tree["c"] = cast(x, torch.float64).to(other) * 0.5
    return tree


def draw_all_gather_coalesced(case: Case) -> Made:
    own = shape(case.rng, case.rng.choice([1, 2]))
    args = {"mixed": case.dtype not in INTEGERS and case.chance(0.4)}
    args["unused"] = not case.twice and case.chance(0.3)
    args["containers"] = case.rng.randrange(1 << 16)
    return case.alike(own), args


def draw_all_reduce_coalesced(case: Case) -> Made:
    shapes, args = draw_all_gather_coalesced(case)
    return shapes, args | {"op": case.reduction()}


def draw_reduce_scatter_coalesced(case: Case) -> Made:
    shapes, args = draw_all_reduce_coalesced(case)
    return case.alike((case.world * case.rng.choice([0, 1, 2]), *shapes[0][1:])), args


def coalesced(of_leaf: Callable[[Ranks, Step], Ranks]) -> Callable[[Ranks, Step], list[Ranks]]:
    """The formula for a tree, of that for a leaf."""

    def of_tree(xs: Ranks, step: Step) -> list[Ranks]:
        trees = [_pytree.tree_leaves(tree_of(x, step)) for x in xs]
        leaves = [of_leaf([*leaf], step) for leaf in zip(*trees, strict=True)]
        return [[leaf[r] for leaf in leaves] for r in range(len(xs))]

    return of_tree


def call_coalesced(c: Call) -> Any:
    given: dict[str, Any] = {"op": c.args["op"]} if "op" in c.args else {}
    return plain(c(wrapped(tree_of(c.x, c.step), c.args["containers"], c.rank), **given))


# -- types of values ---------------------------------------------------------------------------


def vary(xs: Ranks, step: Step) -> Ranks:
    if not (xs[0].is_floating_point() or xs[0].is_complex()):
        return xs
    others = fold(torch.add, [x - x.detach() for x in xs])
    return [x.detach() + others for x in xs]


def call_invariant(c: Call) -> Any:
    op = "bor" if c.x.dtype == torch.bool else "sum"
    return c(collectives.all_reduce(c.x, op, **c.common))


@dataclass(frozen=True)
class Op:
    """Weight among drawn ops, makers of shapes and arguments, the formula, the call, and marks.

    async: It takes async_op. marked: shm finds by itself that only some ranks want a gradient.
    not resolved: Ranks must want gradients alike. one way: Its second derivatives follow another
    convention than the sum of losses. same: All ranks have the same result.
    """

    weight: float
    draw: Callable[[Case], Made]
    formula: Callable[[Ranks, Step], Any]
    call: Callable[[Call], Any]
    marks: str = ""

    def has(self, mark: str) -> bool:
        return mark in self.marks.split(", ")


def on_x(c: Call) -> Any:
    return c(c.x)


OPS = {
    "all_reduce": Op(
        4, draw_all_reduce, all_reduce,
        lambda c: c(c.x, c.op(), invariant=c.args.get("invariant", False)), "async, marked, same",
    ),
    "reduce": Op(
        2, lambda case: (case.alike(shape(case.rng)), case.reducing() | case.root()),
        lambda xs, step: only_at_root(reduced(xs, step.args["op"]), xs, step),
        lambda c: c(c.x, op=c.op(), **c.root("dst")), "async, marked",
    ),
    "broadcast": Op(
        2, draw_broadcast, lambda xs, step: [xs[step.args["root"]]] * len(xs), call_broadcast,
        "async, marked, same",
    ),
    "all_gather": Op(
        3, draw_all_gather, lambda xs, step: [joined(xs, step)] * len(xs),
        lambda c: c(c.x, c.args["dim"], **c.sizes()), "async, same",
    ),
    "all_gather_list": Op(
        2, draw_all_gather_list, lambda xs, step: [xs] * len(xs), lambda c: c(c.x, **c.sizes()),
        "async, same",
    ),
    "gather": Op(
        2, draw_gather, lambda xs, step: only_at_root(joined(xs, step), xs, step),
        lambda c: c(c.x, dim=c.args["dim"], **c.sizes(), **c.root("dst")), "async",
    ),
    "scatter": Op(
        3, draw_scatter, lambda xs, step: [*pieces_of(xs[step.args["root"]], step)], call_scatter,
        "async",
    ),
    "reduce_scatter": Op(
        4, draw_reduce_scatter,
        lambda xs, step: [*pieces_of(reduced(xs, step.args["op"]), step)], call_reduce_scatter,
        "async, marked",
    ),
    "all_to_all": Op(4, draw_all_to_all, all_to_all, call_all_to_all, "async"),
    "ppermute": Op(
        2, draw_ppermute, ppermute, lambda c: c(c.x, c.args["pairs"]), "async, marked"
    ),
    "shift": Op(
        1, draw_shift, shift, lambda c: c(c.x, c.args["k"], wrap=c.args["wrap"]), "async, marked"
    ),
    "halo_exchange": Op(
        2, draw_halo_exchange, halo_exchange,
        lambda c: c(c.x, c.args["widths"], c.args["dim"], wrap=c.args["wrap"]),
    ),
    "all_reduce_coalesced": Op(
        1.5, draw_all_reduce_coalesced, coalesced(all_reduce), call_coalesced, "marked, same"
    ),
    "all_gather_coalesced": Op(
        1.5, draw_all_gather_coalesced, coalesced(lambda xs, _: [torch.cat(xs)] * len(xs)),
        call_coalesced, "marked, same",
    ),
    "reduce_scatter_coalesced": Op(
        1.5, draw_reduce_scatter_coalesced,
        coalesced(lambda xs, step: [*reduced(xs, step.args["op"]).tensor_split(len(xs))]),
        call_coalesced, "marked",
    ),
    "send": Op(1.5, draw_send, send, call_send, "token, not resolved"),
    "send_recv": Op(1.5, draw_send_recv, send_recv, call_send_recv, "not resolved"),
    "vary": Op(0.7, Case.plain, vary, on_x, "one way"),
    "invariant": Op(
        0.5, Case.plain,
        lambda xs, _: [reduced(xs, "sum" if xs[0].dtype != torch.bool else "bor")] * len(xs),
        call_invariant, "one way, same",
    ),
    "barrier": Op(0.5, Case.plain, lambda xs, _: xs, on_x, "not resolved"),
}  # fmt: skip
