"""A model as a case of the fuzzer: how it is drawn, wrapped and trained; and its code.

The state `h` has R rows and C columns. What goes in is a batch `x` of 16 numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

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
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Op:
    """A line of a model's forward, or a few; `skip` has the (rank, step) that leave it out."""

    kind: str
    params: tuple[Param, ...] = ()
    skip: tuple[tuple[int, int], ...] = ()
    body: tuple[Op, ...] = ()
    flag: bool = False


@dataclass(frozen=True)
class Step:
    """A training step with `local` backwards in `no_sync` first; "again" is a second backward.

    `frozen` are names of parameters with a rank: frozen there in the last forward and backward.
    """

    zero: str = "none"
    local: int = 0
    form: str = "once"
    frozen: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """A case: the shape of the state that runs through the model, the operations, and the rest.

    `loss` has parameters used outside the wrapper; `hooks` name parameters, with "scale", "note" or
    "after" (post-accumulate); `flat_grads` are views of a buffer of the user's; `containers` is
    the seed of those around inputs and outputs of ours.
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
    for op in ops:
        yield op
        yield from operations(op.body)


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
        if loss and self.unused:
            # A rank whose forward uses no parameter has no output at which a second backward would
            # begin. Its gradients from the loss begin one around the wrapper, which is an error.
            steps = tuple(replace(s, form="once") if s.form == "again" else s for s in steps)
        seed = rng.getrandbits(32)
        if seed % 6 == 0:
            steps = (steps[0], *(replace(s, frozen=self.frozen(ops, seed)) for s in steps[1:]))
        return Plan(
            seed, self.ranks, (rows, cols), self.dtype, ops, loss, self.hooks(ops), options,
            self.hook, steps, self.chance(0.05) and not options.get(VIEW),
            seed if self.chance(0.3) else None,
        )  # fmt: skip

    def step(self, number: int) -> Step:
        zero = "none" if number == 0 else self.rng.choice(["none"] * 4 + ["zeros"] * 3 + ["keep"])
        form = self.rng.choice(["once"] * 5 + ["again", "two"])
        return Step(zero, self.rng.choice([0, 0, 0, 1, 2]), "once" if self.static else form)

    def frozen(self, ops: tuple[Op, ...], seed: int) -> tuple[tuple[str, int], ...]:
        rng = random.Random(seed)  # other draws stay as they are
        undefined = {p for op in operations(ops) if op.kind == "none" for p in op.params}
        names = sorted({p.name for p in params_in(ops) if p not in undefined})
        # a backward that reaches no parameter is not reduced
        chosen = rng.sample(names, rng.choice([1, 1, 2])) if len(names) > 3 else []
        alone = rng.randrange(self.ranks)
        ranks = rng.choice([[*range(self.ranks)], [alone]])
        return tuple((name, rank) for name in chosen for rank in ranks)

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
        weights = [weight for weight, *_ in KINDS.values()]
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
        wanted = KINDS[kind][1].split()
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
        kind = self.rng.choice([*IN_LOSS])
        return Op(kind, (self.rng.choice(self.known),))


VIEW = "gradient_as_bucket_view"
KINDS: dict[str, tuple[float, str, str | tuple[str, str]]] = {
    "mul": (2, "rc", "h = h * {0}"),
    "row": (1, "c", "h = h * {0}"),
    "scalar": (0.5, "0", "h = h * {0}"),
    "flat": (2, "s", "h = (h.reshape(-1) + {0}).view(R, C)"),
    "flat2": (2, "rc s", "h = h + ({0}.view(-1) + {1}.view(-1)).view(R, C)"),
    "same2": (2, "rc rc", "h = h + ({0}.view(-1) + {1}.view(-1)).view(R, C)"),
    "stack": (2, "h h", "h = h + torch.stack([{0}, {1}]).view(R, C)"),
    "cat": (1, "h H", "h = h + torch.cat([{0}, {1}])"),
    "mixed": (1, "s h H", "h = h + ({0} + torch.cat([{1}, {2}]).view(-1)).view(R, C)"),
    "batch1": (2, "rc", "h = (h.unsqueeze(0) + {0}.unsqueeze(0)).squeeze(0)"),
    "conj": (2, "rc", ('h = h + {0}.conj()', 'h = h * {0}.conj()')),
    "neg": (1, "rc", "h = h + torch._neg_view({0})"),
    "imag": (1, "rc", "h = h + {0}.conj().imag.to(h.dtype)"),
    "expand": (1, "1c", "h = h + {0}.expand(R, C)"),
    "expand_rows": (1, "r1", "h = h + {0}.expand(R, C)"),
    "transpose": (2, "cr", "h = h + {0}.t()"),
    "slice": (1, "+", "h = h + {0}[1:-1]"),
    "slice_cols": (1, "c+", "h = h + {0}[:, :C]"),
    "part": (1, "h", "h = torch.cat([h[: R // 2] + {0}, h[R // 2 :]])"),
    "linear": (2, "cc c", "h = F.linear(h, 0.3 * {0}, {1})"),
    "large": (2, "w", (
        'h = h + F.linear(x.view(2, 8).to(h.dtype), {0}).mean()',
        'h = h + (x.view(2, 8).to(h.dtype) @ {0}.t()).sum() / R',
    )),
    "conv": (1, "3", "h = F.conv1d(h.t().unsqueeze(0), 0.2 * {0}, padding=1)[0].t()"),
    "embedding": (1, "10",
        'h = h + F.embedding((x.detach() * 9).long().view(-1) % 10, {0}).mean(0)'),
    "sparse": (0.5, "", "h = h + self.{name}((x.detach() * 9).long().view(-1) % 10).mean(0)"),
    "norm": (1, "c c", "h = F.layer_norm(h, (C,), {0}, {1})"),
    "cast": (1.5, "rc", "h = h + as_like(h, like(h, {0}) * {0})"),
    "none": (0.7, "rc", "h = GivesNone.apply(h, {0})"),
    "saved": (1, "rc",
        "h = GivesSaved.apply(h, {0}, self.remember('saved', h.detach() + 1), {flag})"),
    "same_for_both": (1, "rc rc", "h = SameForBoth.apply(h, {0}, {1})"),
    "same_gradient": (1, "rc rc", "h = SameGradient.apply(h, {0}, {1}, {flag})"),
    "spare": (0.5, "rc", "pass"),
    "tanh": (1, "", "h = torch.tanh(h)"),
    "fork": (1, "",
        'h = h.view(-1).view(R, C) + 0.5 * h if h.is_contiguous() else h + h.t().t()'),
    "reshape": (1, "", ('h = h.t().contiguous().t()', 'h = torch.cat(h.chunk(2))')),
    "watch": (2, "", "self.watch('{name}', h)"),
    "hook": (0.5, "", "h.requires_grad and h.register_hook(lambda g: g * 1.5)"),
}  # fmt: skip
"""Weight, shapes of the parameters, and the line of code, or two for the flag."""
IN_LOSS = {
    "square": "loss = loss + 0.1 * {0}.abs().square().sum()",
    "conj_square": "loss = loss + 0.1 * ({0}.conj() * 3).abs().square().sum()",
    "view_square": "loss = loss + 0.1 * {0}.view(-1).abs().square().sum()",
}


def make_plan(rng: random.Random) -> Plan:
    return _Maker(rng, small=False).plan()


def make_small_plan(rng: random.Random) -> Plan:
    """Draw a case with two ranks, and parameters that do not travel in place."""
    return _Maker(rng, small=True).plan()


class Base(nn.Module):
    """A model that remembers activations, and gradients that pass, without copying them.

    What is written behind autograd's back shows in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []

    def watch(self, label: str, h: Tensor) -> None:
        if h.requires_grad:
            self.seen.append((f"activation {label}", h.detach()))
            h.register_hook(self.note(f"gradient {label}"))

    def note(self, label: str) -> Callable[[Tensor], None]:
        def hook(g: Tensor) -> None:
            self.seen.append((label, g))

        return hook

    def remember(self, label: str, t: Tensor) -> Tensor:
        self.seen.append((label, t))
        return t


class GivesNone(torch.autograd.Function):
    """Uses a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, p: Tensor) -> Tensor:
        return h + p.abs().max() * 0.1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class GivesSaved(torch.autograd.Function):
    """The gradient is a tensor that others hold, or an alias of it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, p: Tensor, buffer: Tensor, alias: bool) -> Tensor:
        ctx.buffer, ctx.alias = buffer, alias
        return h + p * buffer

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        buffer = ctx.buffer
        return g, buffer.detach() if ctx.alias else buffer, None, None


class SameForBoth(torch.autograd.Function):
    """Two inputs get one tensor as their gradient, which is no one else's."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return h + 2 * (a + b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        both = g * 2
        return g, both, both


class SameGradient(torch.autograd.Function):
    """All inputs get the incoming gradient itself, or aliases of it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, b: Tensor, alias: bool) -> Tensor:
        ctx.alias = alias
        return h + a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.alias:
            return g, g.detach(), g.view(g.shape), None
        return g, g, g, None


def like(h: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return h.real.to(p.dtype) if h.is_complex() and not p.is_complex() else h.to(p.dtype)


def as_like(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (value.real if value.is_complex() and not h.is_complex() else value).to(h.dtype)


class _Writer:
    def __init__(self) -> None:
        self.count = 0

    def ops(self, ops: tuple[Op, ...], indent: str) -> list[str]:
        lines = [line for op in ops for line in self.op(op, indent)]
        return lines or [f"{indent}pass"]

    def op(self, op: Op, indent: str) -> list[str]:
        if op.skip:
            return [f"{indent}if at not in {set(op.skip)}:", *self._plain(op, indent + "    ")]
        return self._plain(op, indent)

    def _plain(self, op: Op, indent: str) -> list[str]:
        self.count += 1
        n = self.count
        if op.kind == "residual":
            return [
                f"{indent}r{n} = h", *self.ops(op.body, indent), f"{indent}h = 0.5 * (h + r{n})",
            ]  # fmt: skip
        if op.kind in ("checkpoint", "reentrant"):
            return [
                f"{indent}def part{n}(h):",
                *self.ops(op.body, indent + "    "),
                f"{indent}    return h",
                f"{indent}h = checkpoint(part{n}, h, use_reentrant={op.kind == 'reentrant'})",
            ]
        given = IN_LOSS.get(op.kind) or KINDS[op.kind][2]
        line = given if isinstance(given, str) else given[op.flag]
        names = [f"self.{p.name}" for p in op.params]
        name = op.params[0].name if op.kind == "sparse" else str(n)
        return [indent + line.format(*names, name=name, flag=op.flag)]


def code_of(plan: Plan) -> str:
    writer = _Writer()
    forward = writer.ops(plan.ops, "        ")
    declared = [
        f"        self.{p.name} = parameters[{p.name!r}]  # {p.shape}, {p.dtype}"
        for p in dict.fromkeys(params_in(plan.ops))
    ]
    loss = [line.replace("self.", "parameters.") for line in writer.ops(plan.loss, "    ")]
    lines = [
        f"R, C = {plan.shape}",
        "class Model(Base):",
        "    def __init__(self, parameters):",
        "        super().__init__()",
        *declared,
        "",
        "    def forward(self, h, x, at):",
        *forward,
        "        return h",
        "",
        "def extra(loss, parameters):",
        *loss,
        "    return loss",
    ]
    return "\n".join(lines)


def shown(plan: Plan) -> str:
    return f"{code_of(plan)}\n\n{plan!r}"


def build(plan: Plan) -> tuple[nn.Module, Any, dict[str, nn.Parameter]]:
    """The model, the loss's addition, and the parameters by name."""
    generator = torch.Generator().manual_seed(plan.seed)
    parameters: dict[str, Any] = {}
    for p in dict.fromkeys([*params_in(plan.ops), *params_in(plan.loss)]):
        parameters[p.name] = _parameter(p, generator, plan.device)
    space: dict[str, Any] = {
        piece.__name__: piece for piece in (Base, GivesNone, GivesSaved, SameForBoth, SameGradient)
    }
    space |= {"torch": torch, "F": nn.functional, "like": like, "as_like": as_like}
    space["checkpoint"] = torch.utils.checkpoint.checkpoint
    exec(compile(code_of(plan), f"<model {plan.seed}>", "exec"), space)
    flat = {n: m.weight if isinstance(m, nn.Module) else m for n, m in parameters.items()}
    return space["Model"](parameters), space["extra"], flat


def _parameter(p: Param, generator: torch.Generator, device: str) -> nn.Module | nn.Parameter:
    dtype = getattr(torch, p.dtype)
    value = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        value = torch.complex(value, torch.randn(p.shape, generator=generator, dtype=value.dtype))
    value = (0.7 + 0.3 * value).to(device, dtype)
    if p.name.startswith("e"):
        return nn.Embedding(*p.shape, sparse=True, _weight=value)
    return nn.Parameter(value)
