"""Random programs around the wrapper, held against one process that computes every rank's part.

A program mixes plain steps with transforms of torch.func, evaluation on one rank, edits of buffers
and batches that all ranks leave out. The model has parameters of subclasses of Tensor and a batch
norm. Containers around inputs and outputs are drawn in `models`, collectives within the model in
`routes`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.testing._internal.subclasses import WrapperSubclass

from fuzz.ranks import results_of_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.hooks import GradBucket
from gradwire.hooks.bucket import as_real
from gradwire.hooks.interface import after, chain

WIDTH, BATCH = 5, 3


def halves(state: Any, bucket: GradBucket) -> Any:
    """The mean in two collectives, of which the second begins when the first has ended."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return hooks.all_reduce(None, bucket)
    flat = as_real(bucket).buffer().div_(dist.get_world_size())
    parts = flat.tensor_split(2)

    def send(which: int) -> Any:
        work = dist.all_reduce(parts[which], async_op=True)
        return after(work, lambda: flat, flat.device)

    return chain(flat.device, send(0), lambda _: send(1), lambda _: buffer)


HOOKS: dict[str, Any] = {"all_reduce": hooks.all_reduce, "halves": halves, "half": hooks.bf16}
ERRORS = {"half": 2e-2}
EDITS = ("none", "deleted", "new", "expanded", "inference", "written")


class Named(Tensor):
    """A class of its own, and no more."""


SUBCLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "named": lambda t: t.as_subclass(Named),
    "wrapper": WrapperSubclass,
}


@dataclass(frozen=True)
class Action:
    """A part of a program: `kind` is a method of `Trainer`.

    `what` is the transform, edit or mode, or a backward's form: "two" forwards, a "penalty" that
    has a transform's result in the loss, or "both". `rank` acts alone; `local` backwards are in
    `no_sync`; the ranks in `unused` leave a layer out.
    """

    kind: str
    what: str = ""
    rank: int | None = None
    zero: str = "none"
    local: int = 0
    weights: tuple[tuple[int, ...], ...] | None = None
    unused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    dtype: str = "float64"
    default_dtype: str = "float32"
    subclass: str = "plain"
    norm: str = "none"
    hook: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()


def make_plan(rng: random.Random) -> Program:
    unused, static = rng.choice([(False, False)] * 3 + [(True, False)] * 2 + [(False, True)])
    options: dict[str, Any] = {
        "find_unused_parameters": unused,
        "static_graph": static,
        "gradient_as_bucket_view": rng.randrange(100) < 30,
        "bucket_cap_mb": rng.choice([None, None, 1e-4, 2e-4]),
        "check_replicas": rng.choice([None, None, 0, 1, 2]),
        "broadcast_buffers": rng.randrange(100) < 80,
        "sync_buffers_in_eval": rng.randrange(100) < 50,
        "lazy_bucket_allocation": rng.randrange(100) < 20,
    }
    program = Program(
        seed=rng.getrandbits(32),
        ranks=rng.choice([2, 2, 2, 3]),
        dtype=rng.choice(["float64", "float64", "float32", "float32", "bfloat16"]),
        default_dtype=rng.choice(["float32", "float64", "bfloat16"]),
        subclass=rng.choice(["plain", "named", "wrapper"]),
        norm=rng.choice(["none", "batch"]),
        hook=rng.choice([None, None, None, *HOOKS]),
        options=options,
    )
    if program.dtype == "bfloat16":  # a rounding more or less would show
        program = replace(program, norm="none", hook=None)
    actions = [draw_action(rng, program) for _ in range(rng.randint(3, 9))]
    reduced = [a for a in actions if a.kind == "step" or (a.kind == "skip" and a.rank is None)]
    if program.hook and not (reduced and reduced[0].weights):
        # a hook sums no weights later if it did not so in its first backward
        actions = [replace(action, weights=None) for action in actions]
    return replace(program, actions=(*actions, Action("step")))


def draw_action(rng: random.Random, program: Program) -> Action:
    some = tuple(r for r in range(program.ranks) if rng.randrange(100) < 50)
    unused = some if program.options["find_unused_parameters"] else ()
    alone = rng.choice([None, *range(program.ranks)])
    kind = rng.choice(["step"] * 5 + ["transform"] * 3 + ["evaluate", "edit", "edit", "skip"])
    if kind == "transform":
        name = rng.choice([*TRANSFORMS])
        return Action(kind, name, None if name == "functional_call" else alone)
    if kind == "evaluate":
        if program.options["sync_buffers_in_eval"] and program.options["broadcast_buffers"]:
            alone = None
        return Action(kind, rng.choice(["eval", "inference", "train"]), alone)
    if kind == "edit":
        return Action(kind, rng.choice(EDITS))
    if kind == "skip":
        return Action(kind, rank=alone, unused=unused)
    local = rng.choice([0, 0, 0, 1, 2])
    zero = rng.choice(["none", "none", "none", "zeros", "keep"])
    weights = None
    if program.dtype != "bfloat16" and rng.randrange(100) < 35:
        scale = rng.choice([1, 1, 1000])
        drawn = [
            [rng.randint(0, 4) * scale for _ in range(local + 1)] for _ in range(program.ranks)
        ]
        weights = tuple(map(tuple, drawn))
    if weights is not None and zero == "keep":
        zero = "none"
    forms = ["", "", "", "two"]
    # with `half`, nothing is sent by which ranks agree on a penalty alone, as on what goes around
    if program.norm == "none" and program.dtype != "bfloat16" and program.hook != "half":
        forms += ["penalty", "both"]
    form = "" if program.options["static_graph"] else rng.choice(forms)
    return Action(kind, form, None, zero, local, weights, unused)


class Net(nn.Module):
    """Layers with buffers that may be missing, and one layer that may be left out."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        dtype = getattr(torch, program.dtype)
        generator = torch.Generator().manual_seed(program.seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2

        self.first = nn.Parameter(SUBCLASSES[program.subclass](drawn(WIDTH, WIDTH)))
        self.second, self.third = (nn.Linear(WIDTH, n, dtype=dtype) for n in (WIDTH, 2))
        with torch.no_grad():
            for p in (*self.second.parameters(), *self.third.parameters()):
                p.copy_(drawn(*p.shape))
        norm = nn.Identity if program.norm == "none" else nn.BatchNorm1d
        self.norm = norm(WIDTH, dtype=dtype)
        self.register_buffer("gain", torch.full((WIDTH,), 1.5, dtype=dtype))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25, dtype=dtype))

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        single = x.dim() == 1
        h = self.norm((x.unsqueeze(0) if single else x) @ self.first)
        for name in ("gain", "shift"):
            buffer = self._buffers.get(name)
            if buffer is not None:
                h = torch.tanh(h) * buffer if name == "gain" else h + buffer
        out = self.third(torch.tanh(self.second(h)) if whole else h)
        return out[0] if single else out


def penalty(call: Any, x: Tensor) -> Tensor:
    return grad(lambda v: call(v).sin().sum())(x).square().mean()


TRANSFORMS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "grad": lambda f, call, x: grad(f)(x),
    "jvp": lambda f, call, x: jvp(call, (x,), (x.cos(),)),
    "vmap": lambda f, call, x: vmap(call)(x),
    "vmap_grad": lambda f, call, x: vmap(grad(f))(x),
    "jacrev": lambda f, call, x: jacrev(call)(x),
    "hessian": lambda f, call, x: hessian(f)(x[0]),
    "hvp": lambda f, call, x: jvp(grad(f), (x,), (x.cos(),)),
    "hvp_reverse": lambda f, call, x: grad(lambda v: (grad(f)(v) * x.cos()).sum())(x),
    "functional_call": lambda f, call, x: None,
    "functional_grad": lambda f, call, x: None,
    "functional_hvp": lambda f, call, x: None,
}
"""The last ones take parameters; see `of_parameters`."""


def of_parameters(module: nn.Module, name: str, x: Tensor) -> Any:
    own = {n: p.detach() for n, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, parameters, (x,)).square().sum()

    if name == "functional_call":
        with torch.no_grad():
            return loss({n: 2 * p for n, p in own.items()})
    if name == "functional_grad":
        return grad(loss)(own)
    return jvp(grad(loss), (own,), ({n: p.cos() for n, p in own.items()},))


class Trainer:
    """One rank's run of a program, with a plain model for each rank as the reference."""

    def __init__(self, program: Program) -> None:
        self.program, self.rank = program, dist.get_rank()
        self.net = Net(program)
        self.ddp = DistributedDataParallel(self.net, **program.options)
        if program.hook is not None:
            self.ddp.register_comm_hook(None, HOOKS[program.hook])
        self.twins = [Net(replace(program, subclass="plain")) for _ in range(program.ranks)]
        self.generator = torch.Generator().manual_seed(program.seed)
        self.synced_next, self.count = True, 0
        self.size = 0.0  # of what the next value to compare was computed from
        self.wrong: list[str] = []

    def run(self) -> None:
        for number, action in enumerate(self.program.actions):
            getattr(self, action.kind)(action)
            self.compare_buffers()
            if self.wrong:
                what = f"action {number} ({action.kind} {action.what})"
                raise AssertionError("\n".join([what, *self.wrong]))

    def batches(self) -> list[Tensor]:
        shape, dtype = (BATCH, WIDTH), getattr(torch, self.program.dtype)
        drawn = torch.randn(
            self.program.ranks, *shape, generator=self.generator, dtype=torch.float64
        )
        return list(drawn.to(dtype))

    # ---- the reference

    def sync_buffers(self) -> None:
        for twin in self.twins[1:]:
            for name, buffer in list(self.twins[0].named_buffers()):
                owner, _, last = name.rpartition(".")
                module = twin.get_submodule(owner)
                if module._buffers.get(last) is not None:
                    module._buffers[last] = buffer.clone()

    def expect_forward(self, *, syncing: bool, grads: bool = True) -> None:
        options = self.program.options
        in_eval = options["sync_buffers_in_eval"]
        if options["broadcast_buffers"] and self.synced_next and (grads or in_eval):
            self.sync_buffers()
        if grads or in_eval:
            self.synced_next = syncing

    def reference(self, xs: list[Tensor], unused: tuple[int, ...]) -> list[Tensor]:
        pairs = zip(self.twins, xs, strict=True)
        return [twin(x, rank not in unused) for rank, (twin, x) in enumerate(pairs)]

    # ---- actions

    def step(self, action: Action) -> None:
        """Backwards in `no_sync`, one that is reduced, and the optimizer's step."""
        self.reset(action.zero)
        for i in range(action.local + 1):
            syncing, weights = i == action.local, None
            if action.weights is not None:
                weights = [own[i] for own in action.weights]
            with ExitStack() as stack:
                stack.enter_context(self.ddp.no_sync(enabled=not syncing))
                if weights is not None:
                    self.ddp.weight(weights[self.rank])
                self.backward(action, syncing, weights)
        self.check_gradients(action)
        self.optimize()

    def backward(self, action: Action, syncing: bool, weights: list[int] | None) -> None:
        losses, expected = [], []
        whole = self.rank not in action.unused
        if action.what in ("penalty", "both"):
            xs = self.batches()
            losses.append(penalty(lambda x: self.ddp(x, whole), xs[self.rank]))
            of_twins = enumerate(zip(self.twins, xs, strict=True))
            one = lambda r, t, x: penalty(lambda v: t(v, r not in action.unused), x)  # noqa: E731
            expected.append([one(r, t, x) for r, (t, x) in of_twins])
            self.compare("penalty", losses[0], expected[0][self.rank])
        for _ in range({"two": 2, "penalty": 0}.get(action.what, 1)):
            xs = self.batches()
            self.expect_forward(syncing=syncing)
            outs = self.reference(xs, action.unused)
            out = self.ddp(xs[self.rank], whole)
            self.compare("output", out, outs[self.rank])
            losses.append(out.square().mean())
            expected.append([o.square().mean() for o in outs])
        sum(losses).backward()
        factors = [1] * self.program.ranks if weights is None else weights
        sum(f * e for row in expected for f, e in zip(factors, row, strict=True)).backward()

    def transform(self, action: Action) -> None:
        """A transform through the wrapper, beside the same through the module."""
        xs = self.batches()
        if action.rank not in (None, self.rank):
            return
        x, name = xs[self.rank], action.what
        if name == "functional_call":  # without gradients, and not in a transform
            self.evaluate(Action("evaluate", "eval"))
        modes = [m for m in self.ddp.modules() if m.training]
        self.ddp.train(self.program.norm == "none")
        try:
            alone = self.apply_transform(self.ddp.module, name, x)
        except Exception:  # PyTorch cannot transform this module
            alone = None
        got = self.apply_transform(self.ddp, name, x) if alone is not None else None
        for m in modes:
            m.training = True
        leaves = torch.utils._pytree.tree_leaves
        for a, b in zip(leaves(got), leaves(alone), strict=True):
            if isinstance(a, Tensor):
                self.compare(name, a, b)

    def apply_transform(self, module: nn.Module, name: str, x: Tensor) -> Any:
        if name.startswith("functional"):
            return of_parameters(module, name, x)
        return TRANSFORMS[name](lambda v: module(v).sin().sum(), module, x)

    def evaluate(self, action: Action) -> None:
        """A forward without gradients, on one rank or all."""
        xs = self.batches()
        mode = torch.inference_mode if action.what == "inference" else torch.no_grad
        for module in (self.ddp, *self.twins):
            module.train(action.what == "train")
        with torch.no_grad():
            self.expect_forward(syncing=False, grads=False)
        for rank, twin in enumerate(self.twins):
            if action.rank in (None, rank):
                with torch.no_grad():
                    want = twin(xs[rank])
                if rank == self.rank:
                    with mode():
                        self.compare("evaluation", self.ddp(xs[rank]), want)
        for module in (self.ddp, *self.twins):
            module.train()

    def edit(self, action: Action) -> None:
        """Change a buffer of all ranks, with other values on each."""
        self.count += 1
        name = "shift" if action.what == "inference" or self.count % 2 else "gain"
        for rank, twin in enumerate(self.twins):
            modules = [twin, self.net] if rank == self.rank else [twin]
            for module in modules:
                value = 1 + 0.5 * rank + 0.1 * self.count
                edit_buffer(module, name, action.what, value, module is twin)

    def skip(self, action: Action) -> None:
        """A forward whose backward all ranks leave out, if any of them asks for it."""
        self.reset("none")
        xs, losses = self.batches(), []
        self.expect_forward(syncing=True)
        outs = self.reference(xs, action.unused)
        out = self.ddp(xs[self.rank], self.rank not in action.unused)
        self.compare("output", out, outs[self.rank])
        if self.ddp.skip_if_any(action.rank == self.rank) != (action.rank is not None):
            self.wrong.append("skip_if_any is not what any rank asked for")
        if action.rank is None:
            losses = [o.square().mean() for o in outs]
            sum(losses).backward()
            out.square().mean().backward()
            self.check_gradients(action)
            self.optimize()

    # ---- gradients and parameters

    def reset(self, zero: str) -> None:
        for module in (self.net, *self.twins):
            for p in module.parameters():
                if zero == "none" or (zero == "zeros" and p.grad is None):
                    p.grad = None
                elif zero == "zeros":
                    p.grad.zero_()

    def expected(self, index: int, action: Action) -> Tensor | None:
        size = self.program.ranks
        own = [[*t.parameters()][index] for t in self.twins]
        grads = [p.grad for p in own]
        if all(g is None for g in grads):
            return None
        total = 1.0 if action.weights is None else sum(map(sum, action.weights)) / size
        parts = [torch.zeros_like(own[0]) if g is None else g for g in grads]
        parts = [part.double() / total if total else torch.zeros_like(part) for part in parts]
        self.size = max(part.abs().max().item() for part in parts)
        return sum(parts) / size

    def check_gradients(self, action: Action) -> None:
        """Compare gradients with the mean over ranks, and give the twins the mean."""
        named = [*self.net.named_parameters()]
        for index, (name, p) in enumerate(named):
            want = self.expected(index, action)
            self.compare(f"gradient of {name}", p.grad, want)
            for twin in self.twins:
                own = [*twin.parameters()][index]
                own.grad = None if want is None else want.to(own.dtype).clone()

    def optimize(self) -> None:
        with torch.no_grad():
            for p, *others in zip(
                *(t.parameters() for t in self.twins), self.net.parameters(), strict=True
            ):
                if p.grad is not None:
                    p -= 0.1 * p.grad / max(1.0, p.grad.abs().max().item())
                for other in others:
                    other.copy_(p)

    # ---- comparison

    def compare(self, what: str, got: Tensor | None, want: Tensor | None) -> None:
        if got is None or want is None:
            if got is not want:
                self.wrong.append(f"{what}: {got} for {want}")
            return
        got = got.a if isinstance(got, WrapperSubclass) else got.as_subclass(Tensor)
        want = want.a if isinstance(want, WrapperSubclass) else want.as_subclass(Tensor)
        got, want = got.detach().double(), want.detach().double()
        eps = 16 * torch.finfo(getattr(torch, self.program.dtype)).eps
        if what.startswith("gradient"):
            eps = max(eps, ERRORS.get(self.program.hook or "", 0.0))
        size = max(1e-2, self.size, want.abs().max().item())
        self.size = 0.0
        if got.shape != want.shape or not ((got - want).abs() <= eps * size * WIDTH).all():
            self.wrong.append(f"{what}: {got.tolist()} for {want.tolist()}"[:400])

    def compare_buffers(self) -> None:
        own = dict(self.net.named_buffers())
        want = dict(self.twins[self.rank].named_buffers())
        if own.keys() != want.keys():
            self.wrong.append(f"buffers {sorted(own)} for {sorted(want)}")
        for name in own.keys() & want.keys():
            self.compare(f"buffer {name}", own[name], want[name])


def edit_buffer(module: nn.Module, name: str, edit: str, value: float, is_twin: bool) -> None:
    """Change a buffer; the twin's is dense and in memory of its own."""
    dtype = next(iter(module.parameters())).dtype
    buffer = module._buffers.get(name)
    if edit == "none" and name in module._buffers:
        setattr(module, name, None)
    elif edit == "deleted":
        module._buffers.pop(name, None)
    elif edit == "written" and buffer is None:
        pass
    elif edit == "written" and not (is_twin or buffer.is_inference()) and buffer.is_contiguous():
        buffer.fill_(value)
    else:
        with torch.inference_mode(edit == "inference" and not is_twin):
            new = torch.full((WIDTH,), value, dtype=dtype)
            if edit == "expanded" and not is_twin:
                new = new[:1].clone().expand(WIDTH)
            module.register_buffer(name, new)


def _on_ranks(programs: Sequence[Program]) -> Iterator[None]:
    before = torch.get_default_dtype()
    for program in programs:
        torch.set_default_dtype(getattr(torch, program.default_dtype))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Trainer(program).run()
        finally:
            torch.set_default_dtype(before)
        yield


def run_batch(programs: Sequence[Program], backend: str) -> list[str]:
    """What is wrong with the first programs, up to one that fails."""
    found, ended = results_of_ranks(_on_ranks, programs, backend)
    return [""] * len(found) + ended
