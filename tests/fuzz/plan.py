"""A case of the fuzzer: a model, how it is wrapped, and how it is trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

__all__ = [
    "BODIES",
    "Op",
    "Param",
    "Plan",
    "Step",
    "make_plan",
    "operations",
    "params_in",
    "uses_nothing",
]

COMPLEX = ("complex64",)
BODIES = ("residual", "checkpoint", "reentrant")
SIZES = (
    (5, 4), (32, 4), (127, 8), (128, 8), (129, 8), (250, 8),  # 80 B … 4 KiB … 8 KB
    (1023, 8), (1024, 8), (2500, 8),  # 32 KiB, 80 KB
    (8192, 8), (32768, 8), (32769, 8),  # 256 KiB, 1 MiB
)  # fmt: skip
LARGE = ((131071, 8), (131072, 8), (150000, 8))  # 4 MiB, 4.8 MB
CAPS = (None, None, 1e-4, 5e-3, 0.05, 1.0)
HOOKS = (None, None, None, "all_reduce", "bf16", "fp16", "torch_allreduce", "torch_bf16")


@dataclass(frozen=True)
class Param:
    """A parameter of a model: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Op:
    """A line of a model's forward, or a few.

    Attributes:
        kind: What it does; see `source`.
        params: What it uses.
        skip: (rank, step) in which it is left out.
        body: The operations inside.
        flag: One of two forms.
    """

    kind: str
    params: tuple[Param, ...] = ()
    skip: tuple[tuple[int, int], ...] = ()
    body: tuple[Op, ...] = ()
    flag: bool = False


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        zero: What is done with the gradients before: "none", "zeros" or "keep".
        local: How many backwards come first in `no_sync`.
        form: "once"; "again": a second backward through the same graph; "two": two forwards.
    """

    zero: str = "none"
    local: int = 0
    form: str = "once"


@dataclass(frozen=True)
class Plan:
    """A case.

    Attributes:
        shape: Of the state that runs through the model.
        ops: Its forward.
        loss: What the loss adds, with parameters used outside the wrapper.
        hooks: Parameters' names with "scale", "note", "after" (post-accumulate).
        options: For both classes.
        hook: The communication hook.
        flat_grads: Gradients are views of a buffer of the user's.
        containers: Seed of the containers around inputs and outputs of ours.
        device: Of parameters and inputs.
    """

    seed: int
    ranks: int = 2
    shape: tuple[int, int] = (5, 4)
    dtype: str = "float32"
    ops: tuple[Op, ...] = ()
    loss: tuple[Op, ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    hook: str | None = None
    steps: tuple[Step, ...] = (Step(),)
    flat_grads: bool = False
    containers: int | None = None
    device: str = "cpu"


def operations(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Operations and those inside."""
    for op in ops:
        yield op
        yield from operations(op.body)


def uses_nothing(plan: Plan) -> bool:
    """Whether there is a rank that uses no parameter in some step."""

    def used(ops: tuple[Op, ...], at: tuple[int, int]) -> bool:
        here = [op for op in ops if at not in op.skip and op.kind != "spare"]
        return any(op.params or used(op.body, at) for op in here)

    every = product(range(plan.ranks), range(len(plan.steps)))
    return not all(used(plan.ops, at) for at in every)


def params_in(ops: tuple[Op, ...]) -> Iterator[Param]:
    """The parameters of operations and of those inside; shared ones as often as they are used."""
    for op in ops:
        yield from op.params
        yield from params_in(op.body)


class _Maker:
    def __init__(self, rng: random.Random, small: bool) -> None:
        self.rng, self.small, self.count = rng, small, 0
        self.known: list[Param] = []

    def chance(self, p: float) -> bool:
        return self.rng.randrange(100) < 100 * p  # hypothesis draws integers evenly

    def plan(self) -> Plan:
        rng = self.rng
        sizes = SIZES[:6] if self.small else LARGE if self.chance(0.08) else SIZES
        rows, cols = rng.choice(sizes)
        self.rows, self.cols = rows, cols
        kinds = ("float32",) * 6 + ("float64", "bfloat16", "complex64", "complex64")
        self.dtype = rng.choice(kinds)
        self.hook = rng.choice(HOOKS)
        if self.hook == "fp16" and rows > 2500:
            self.hook = "bf16"
        unused, static = rng.choice([(False, False)] * 4 + [(True, False)] * 3 + [(False, True)])
        self.unused, self.static = unused, static
        self.steps = tuple(self.step(i) for i in range(rng.choice([2, 2, 3, 4])))
        self.ranks = 3 if not self.small and self.chance(0.1) else 2
        count = rng.choice([1, 2, 2, 3, 4, 6] if rows * cols > 100_000 else [1, 2, 3, 5, 8])
        ops = tuple(self.op(depth=0) for _ in range(count))
        if not [*params_in(ops)]:
            ops = (*ops, self.leaf("mul"))
        if self.hook == "torch_bf16" and any(p.dtype in COMPLEX for p in params_in(ops)):
            self.hook = "torch_allreduce"  # PyTorch's casts drop imaginary parts
        loss = tuple(self.in_loss() for _ in range(rng.choice([0, 0, 0, 1])))
        options = self.options()
        loss = tuple(op for op in loss if {*op.params} <= {*params_in(ops)} and op.params)
        steps = self.steps
        if any(op.kind == "reentrant" for op in operations(ops)):
            # two forwards would give two gradients of one parameter in one backward
            steps = tuple(replace(s, form="once") if s.form == "two" else s for s in steps)
        seed = rng.getrandbits(32)
        return Plan(
            seed, self.ranks, (rows, cols), self.dtype, ops, loss, self.hooks(ops), options,
            self.hook, steps, self.chance(0.05) and not options.get(VIEW),
            seed if self.chance(0.3) else None,
        )  # fmt: skip

    def step(self, number: int) -> Step:
        zero = "none" if number == 0 else self.rng.choice(["none"] * 4 + ["zeros"] * 3 + ["keep"])
        form = self.rng.choice(["once"] * 5 + ["again", "two"])
        return Step(zero, self.rng.choice([0, 0, 0, 1, 2]), "once" if self.static else form)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.unused:
            options["find_unused_parameters"] = True
        if self.static:
            options["static_graph"] = True
        if self.chance(0.25):
            options[VIEW] = True
        if cap := self.rng.choice(CAPS):
            options["bucket_cap_mb"] = cap
        elif self.chance(0.1):
            options["bucket_cap_mb_list"] = [1e-4, 0.01, 1.0]
        return options

    def hooks(self, ops: tuple[Op, ...]) -> tuple[tuple[str, str], ...]:
        names = sorted({p.name for p in params_in(ops)})
        return tuple(
            (name, self.rng.choice(["scale", "note", "after"]))
            for name in names
            if self.chance(0.1)
        )

    def param(self, shape: tuple[int, ...], dtype: str | None = None) -> Param:
        dtype = dtype or self.dtype
        alike = [p for p in self.known if p.shape == shape and p.dtype == dtype]
        if alike and self.chance(0.25):
            return self.rng.choice(alike)
        made = Param(f"p{self.count}", shape, dtype)
        self.count += 1
        self.known.append(made)
        return made

    def op(self, depth: int) -> Op:
        rng = self.rng
        if depth < 2 and self.chance(0.2):
            kind = rng.choice(BODIES)
            before = list(self.known)
            if kind == "reentrant" and self.unused:
                kind = "checkpoint"  # both refuse the other
            if kind == "reentrant":  # what is used there is used nowhere else
                self.known = []
            body = tuple(self.op(depth + 1) for _ in range(rng.choice([1, 1, 2, 3])))
            if kind == "reentrant":
                body = tuple(b for b in body if b.kind not in BODIES) or (self.leaf("mul"),)
                body = tuple(replace(b, skip=()) for b in body)
                self.known = before
            return Op(kind, body=body, skip=self.skip())
        weights = [w for w, _ in KINDS.values()]
        kind = rng.choices([*KINDS], weights=weights)[0]
        if kind == "spare" and not (self.unused or self.static):
            kind = "mul"
        if kind == "none" and self.static:
            kind = "flat2"
        if kind == "sparse" and (self.hook is not None or self.dtype in (*COMPLEX, "bfloat16")):
            kind = "norm"
        if self.dtype in COMPLEX and kind in ("conv", "embedding", "norm", "imag", "tanh"):
            kind = "conj"
        return self.leaf(kind)

    def leaf(self, kind: str) -> Op:
        r, c = self.rows, self.cols
        shapes: dict[str, tuple[int, ...]] = {
            "rc": (r, c), "s": (r * c,), "c": (c,), "0": (), "h": (r // 2, c), "H": (r - r // 2, c),
            "1c": (1, c), "r1": (r, 1), "cr": (c, r), "+": (r + 2, c), "c+": (r, c + 1),
            "cc": (c, c), "w": (r * c // 8, 8), "3": (c, c, 3), "10": (10, c),
        }  # fmt: skip
        kind = "cat" if kind == "stack" and r % 2 else kind
        wanted = KINDS[kind][1]
        other = self.rng.choice(["float64", "float32", "complex64"])
        dtype = {"cast": other, "imag": "complex64"}.get(kind)
        params = tuple(self.param(shapes[s], dtype) for s in wanted)
        if kind == "sparse":
            params = (Param(f"e{self.count}", (10, c), self.dtype),)
            self.count += 1
        return Op(kind, params, self.skip(), flag=self.chance(0.5))

    def skip(self) -> tuple[tuple[int, int], ...]:
        if not self.unused or self.chance(0.7):
            return ()
        ranks = self.rng.choice([[0], [1], [0, 1, 2]])
        steps = self.rng.sample(range(len(self.steps)), self.rng.choice([1, len(self.steps)]))
        return tuple((rank, step) for rank in ranks for step in sorted(steps))

    def in_loss(self) -> Op:
        if not self.known:
            return Op("square", ())
        kind = self.rng.choice(["square", "conj_square", "view_square"])
        return Op(kind, (self.rng.choice(self.known),))


VIEW = "gradient_as_bucket_view"
KINDS: dict[str, tuple[float, tuple[str, ...]]] = {
    "mul": (2, ("rc",)), "row": (1, ("c",)), "scalar": (0.5, ("0",)), "flat": (2, ("s",)),
    "flat2": (2, ("rc", "s")), "same2": (2, ("rc", "rc")), "stack": (2, ("h", "h")),
    "cat": (1, ("h", "H")), "mixed": (1, ("s", "h", "H")), "batch1": (2, ("rc",)),
    "conj": (2, ("rc",)), "neg": (1, ("rc",)), "imag": (1, ("rc",)), "expand": (1, ("1c",)),
    "expand_rows": (1, ("r1",)), "transpose": (2, ("cr",)), "slice": (1, ("+",)),
    "slice_cols": (1, ("c+",)), "part": (1, ("h",)), "linear": (2, ("cc", "c")),
    "large": (2, ("w",)), "conv": (1, ("3",)), "embedding": (1, ("10",)), "sparse": (0.5, ()),
    "norm": (1, ("c", "c")), "cast": (1.5, ("rc",)), "none": (0.7, ("rc",)), "saved": (1, ("rc",)),
    "same_for_both": (1, ("rc", "rc")), "same_gradient": (1, ("rc", "rc")), "spare": (0.5, ("rc",)),
    "tanh": (1, ()), "fork": (1, ()), "reshape": (1, ()), "watch": (2, ()), "hook": (0.5, ()),
}  # fmt: skip
"""Weights, and the shapes of the parameters."""


def make_plan(rng: random.Random, *, small: bool = False) -> Plan:
    """Draw a case; a small one has two ranks, and parameters that do not travel in place."""
    return _Maker(rng, small).plan()
