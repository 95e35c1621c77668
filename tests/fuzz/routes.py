"""Random programs whose forwards go through the wrapper, around it, or both.

Models have collectives inside, backwards within forward, and parameters that are frozen, renamed or
raise in backward. The reference is one process that runs all ranks' forwards in step: a forward is
a generator, which yields what ranks exchange.
"""

from __future__ import annotations

import copy
import random
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fuzz.ranks import results_of_ranks
from gradwire.collectives import all_gather, all_reduce
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm
from gradwire.errors import GradwireError

WIDTH = 4
Exchange = tuple[str, Tensor]


def blocking(state: Any, bucket: Any) -> Any:
    """A hook of the user that waits for its collective."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    future: Any = torch.futures.Future()
    future.set_result(buffer / dist.get_world_size())
    return future


HOOKS: dict[str, Any] = {"blocking": blocking, "all_reduce": "all_reduce", "bf16": "bf16"}
INNER = ("gradient", "graph", "energy", "codes", "backward")
AROUND = ("module", "module", "method", "layers", "functional")
EXCHANGES = ("sync", "gather", "reduce")
CHANGES = ("freeze", "freeze later", "prune", "nest", "evaluate", "copy", "write")


@dataclass(frozen=True)
class Backward:
    """A backward of all ranks: routes, numbers of samples and weights by rank.

    The ranks in `skip` leave a layer out; the rank `trap` raises at a place.
    """

    routes: tuple[str, ...]
    rows: tuple[int, ...]
    local: bool = False
    weighted: bool = False
    skip: tuple[int, ...] = ()
    trap: tuple[int, str] | None = None
    graph: bool = False


@dataclass(frozen=True)
class Step:
    """Changes with the ranks that make them, and backwards, of which some are `local`."""

    changes: tuple[tuple[str, tuple[int, ...]], ...]
    backwards: tuple[Backward, ...]
    zeros: bool = False


@dataclass(frozen=True)
class Plan:
    """`parts` are those of the model that not every model has; `inner` runs on some ranks."""

    seed: int
    ranks: int
    dtype: str
    default_dtype: str
    parts: tuple[str, ...]
    inner: tuple[int, ...]
    hook: str | None
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()


def make_plan(rng: random.Random) -> Plan:
    def chance(percent: int) -> bool:
        return rng.randrange(100) < percent

    def some(ranks: int) -> tuple[int, ...]:
        return tuple(r for r in range(ranks) if chance(50))

    ranks = rng.choice([2, 2, 2, 3])
    unused, static = rng.choice([(False, False)] * 3 + [(True, False)] * 2 + [(False, True)])
    parts = [part for part in EXCHANGES if chance(20)]
    parts += [rng.choice(INNER)] * chance(35)
    parts += [p for p in ("sparse", "tied", "hooked", "view", "autocast") if chance(12)]
    hook = rng.choice([None, None, None, *HOOKS])
    if "sparse" in parts and hook == "blocking":
        hook = None
    if "sync" in parts and {*parts} & {"gradient", "graph"}:
        parts = [part for part in parts if part != "tied"]  # whose gradient would need an exchange
    if "autocast" in parts:
        parts = [part for part in parts if part not in (*EXCHANGES, *INNER)]
    options = {
        "find_unused_parameters": unused,
        "static_graph": static,
        "gradient_as_bucket_view": chance(20) and "sparse" not in parts,
        "bucket_cap_mb": rng.choice([None, 1e-4, 2e-4]),
        "check_replicas": rng.choice([None, 1]),
    }
    through, around = ["through"], [*AROUND]
    if not {*parts} & {*EXCHANGES}:
        through.append("both")
        around.append("twice")
        if not {*parts} & {*INNER}:
            around += ["transformed", "checkpoint"]
    if "backward" in parts:  # is the rank's own within a forward of the wrapper alone
        through, around = ["through"], []
    weights = chance(30)
    if hook == "bf16" and not weights:  # nothing is sent by which ranks agree that all go around
        around = []
    places = {way: ["loss", "layer", "hook", "last hook"] for way in through}
    # a place that backward reaches after a gradient, or an output of the wrapper
    places |= {way: ["layer", "last hook"] for way in around}
    places |= {way: ["last hook"] for way in ("both", "twice")}

    def backward(last: bool, local: bool, ways: list[list[str]]) -> Backward:
        known = rng.choice(ways)
        drawn = [rng.choice(known)] * ranks if chance(40) else rng.choices(known, k=ranks)
        if "transformed" in drawn:  # whose forward broadcasts buffers
            drawn = ["transformed"] * ranks
        rows = [rng.randint(1, 4) for _ in range(ranks)] if weights or chance(20) else [3] * ranks
        rank = rng.randrange(ranks)
        return Backward(
            tuple(drawn),
            tuple(rows),
            local,
            weights,
            some(ranks) if unused and chance(50) else (),
            (rank, rng.choice(places[drawn[rank]]))
            # a backward within forward would raise in it, and leave the awaited one out
            if last and "transformed" not in drawn and "backward" not in parts and chance(12)
            else None,
            graph=not weights and chance(10),
        )

    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        ways = [way for way in (through, around) if way]
        changes = [(rng.choice(CHANGES), some(ranks))] if chance(40) and not static else []
        if not unused and {*parts} & {*EXCHANGES}:  # ranks with other buckets need the option
            changes = [(kind, tuple(range(ranks))) for kind, _ in changes]
        count = rng.choice([1, 1, 1, 2, 3])
        if static:
            local = [True] * (count - 1) + [False]
        else:
            local = [chance(70) or weights for _ in range(count - 1)] + [False]
        backwards = [backward(i == count - 1, own, ways) for i, own in enumerate(local)]
        if any("checkpoint" in each.routes for each in backwards):  # computes what was frozen again
            changes = [change for change in changes if change[0] != "freeze later"]
        if backwards[-1].trap:  # a frozen parameter would not reach it
            changes = [change for change in changes if "freeze" not in change[0]]
        steps.append(Step(tuple(changes), tuple(backwards), chance(20)))
    if steps[-1].backwards[-1].trap:
        steps.append(Step((), (replace(backward(False, False, [through]), weighted=False),)))
    return Plan(
        seed=rng.getrandbits(32),
        ranks=ranks,
        dtype="float32" if "autocast" in parts else rng.choice(["float64"] * 3 + ["float32"]),
        default_dtype=rng.choice(["float32", "float64", "bfloat16"]),
        parts=tuple(parts),
        inner=some(ranks),
        hook=hook,
        options=options,
        steps=tuple(steps),
    )


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("trap")


class Net(nn.Module):
    """The model of a rank; `forward` does at once what `run` yields."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        dtype = getattr(torch, plan.dtype)
        self.parts, self.whole, self.trapped, self.inside = plan.parts, True, "", False
        generator = torch.Generator().manual_seed(plan.seed)
        self.body, self.spare, self.head = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.norm = (SyncBatchNorm if "sync" in plan.parts else nn.Identity)(WIDTH, dtype=dtype)
        if "sparse" in plan.parts:
            self.table = nn.Embedding(5, WIDTH, sparse=True, dtype=dtype)
        if "tied" in plan.parts:
            self.spare.weight = self.body.weight
        with torch.no_grad():
            for p in self.parameters():
                drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(drawn.to(dtype) / 2)
        self.register_buffer("code", torch.eye(WIDTH, dtype=dtype))
        self.flipped = self.code.t()  # stays a view of the buffer
        self.learned = torch.zeros(WIDTH, dtype=dtype, requires_grad=True)  # no parameter
        if "hooked" in plan.parts:
            self.head.weight.register_hook(lambda g: 0.5 * g)

    def run(self, x: Tensor) -> Generator[Exchange, Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        if "sync" in self.parts and self.training:
            h = yield "sync", h
        if self.inside:
            h = self.adapted(h, x)
        if self.trapped == "layer":
            h = Trap.apply(h)
        if self.whole:
            h = h + torch.tanh(self.spare(h))
        if "sparse" in self.parts:
            h = h + self.table((x.detach().abs().sum(1) * 9).long() % 5)
        if "view" in self.parts:
            h = h @ self.flipped
        out = self.head(h)
        if "gather" in self.parts and self.training:
            every = yield "gather", out
            out = out + torch.softmax(out @ every.t(), 1) @ every
        if "reduce" in self.parts and self.training:
            total = yield "reduce", out.sum(0)
            out = out * torch.cos(total)
        return Trap.apply(out) if self.trapped == "loss" else out

    def adapted(self, h: Tensor, x: Tensor) -> Tensor:
        """Run the model's inner gradient, which is the rank's own."""
        if "gradient" in self.parts or "graph" in self.parts:
            weight = self.spare.weight
            inner = (self.spare(h) - x).square().mean()
            (g,) = torch.autograd.grad(
                inner, weight, retain_graph=True, create_graph="graph" in self.parts
            )
            return h - 0.5 * h @ g
        if "backward" in self.parts:
            bias = [*self.head.parameters()][-1]
            if not bias.requires_grad:
                return h
            kept = [p.grad for p in self.parameters()]
            self.zero_grad()
            (self.head(h.detach()) - x).square().mean().backward()
            g = bias.grad
            for p, was in zip(self.parameters(), kept, strict=True):
                p.grad = was
            return h - g
        if "energy" in self.parts:
            z = h.detach().requires_grad_()
            self.head(z).square().sum().backward(inputs=[z])
            return h - 0.1 * z.grad
        if "codes" in self.parts:
            (h.detach() - self.learned).square().mean().backward()
            with torch.no_grad():
                self.learned -= 0.1 * self.learned.grad
                self.learned.grad = None
            return h + self.learned.detach()
        return h

    def forward(self, x: Tensor) -> Tensor:
        running, answer = self.run(x), None
        while True:
            try:
                kind, h = running.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.exchange(kind, h)

    def exchange(self, kind: str, h: Tensor) -> Tensor:
        if kind == "gather":
            return all_gather(h, sizes="find")
        if kind == "reduce":
            return all_reduce(h)
        return self.norm(h)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def drive(nets: Sequence[Net], xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the forwards of all ranks in one process."""
    running = [net.run(x) for net, x in zip(nets, xs, strict=True)]
    answers: list[Any] = [None] * len(nets)
    while True:
        asked, ended = [], []
        for generator, answer in zip(running, answers, strict=True):
            try:
                asked.append(generator.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            return ended
        kinds, hs = zip(*asked, strict=True)
        if kinds[0] == "reduce":
            answers = [sum(hs)] * len(nets)
        elif kinds[0] == "gather":
            answers = [torch.cat(hs)] * len(nets)
        else:
            normed = nn.functional.batch_norm(torch.cat(hs), None, None, training=True)
            parts = normed.split([len(h) for h in hs])
            affine = [(net.norm.weight, net.norm.bias) for net in nets]
            answers = [h * a + b for h, (a, b) in zip(parts, affine, strict=True)]


class Trainer:
    """One rank's run of a program, with a plain model for each rank as the reference."""

    def __init__(self, plan: Plan, control: Any) -> None:
        self.plan, self.rank, self.control = plan, dist.get_rank(), control
        # exchanges within a model make its rounding larger
        self.tolerance = 1e-3 if plan.dtype == "float32" else 1e-5
        self.twins = [Net(plan) for _ in range(plan.ranks)]
        self.ddp = DistributedDataParallel(Net(plan), **plan.options)
        self.own = [*self.ddp.module.parameters()]
        self.theirs = [[*twin.parameters()] for twin in self.twins]
        names = [name for name, _ in self.ddp.module.named_parameters()]
        self.freezable = [i for i, name in enumerate(names) if name.startswith("head")]
        if plan.hook is not None:
            self.ddp.register_comm_hook(None, HOOKS[plan.hook])
        for rank, net in self.nets():
            net.inside = rank in plan.inner
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.changed: set[str] = set()

    def nets(self) -> list[tuple[int, Net]]:
        return [*enumerate(self.twins), (self.rank, self.ddp.module)]

    def parameters(self) -> list[tuple[int, list[nn.Parameter]]]:
        return [*enumerate(self.theirs), (self.rank, self.own)]

    def run(self) -> bool:
        """Run the steps; after an exception, the next is right, or an error on every rank.

        Return False if the group cannot be used any more.
        """
        wanted: list[str] = []
        outcomes: list[str] = []
        for step in self.plan.steps:
            trap = step.backwards[-1].trap
            raised: Exception | None = None
            try:
                self.step(step)
            except (GradwireError, ArithmeticError) as error:
                raised = error
            wanted.append("error" if trap else "either" if "error" in wanted else "right")
            outcomes.append("error" if raised else "right")
            for _, parameters in self.parameters():
                for p in parameters:
                    p.requires_grad_(True)
            if trap is None:  # else the next forward reports the exception
                every: list[list[str]] = [[] for _ in range(self.plan.ranks)]
                dist.all_gather_object(every, outcomes, group=self.control)
                alike = all(own == outcomes for own in every)
                pairs = zip(outcomes, wanted, strict=True)
                if not alike or any(w not in (have, "either") for have, w in pairs):
                    raise AssertionError(f"{every}, but {wanted}") from raised
                if raised:
                    return False
            self.optimize(discard=trap is not None)
        return True

    # ---- changes

    def change(self, kind: str, ranks: tuple[int, ...]) -> None:
        if kind in ("prune", "nest") and kind in self.changed:
            return
        self.changed.add(kind)
        if kind == "evaluate":
            x = torch.ones(2, WIDTH, dtype=getattr(torch, self.plan.dtype))
            self.ddp.eval()
            with torch.inference_mode():
                self.ddp.module.inside, kept = False, self.ddp.module.inside
                self.ddp(x)
                self.ddp.module.inside = kept
            self.ddp.train()
        elif kind == "copy" and not self.changed & {"prune"} and "hooked" not in self.plan.parts:
            memo: dict[int, Any] = {}
            self.ddp = copy.deepcopy(self.ddp, memo)
            self.own = [memo[id(p)] for p in self.own]
            for _, parameters in self.parameters():  # a copy of a parameter has no gradient
                for p in parameters:
                    p.grad = None
        for rank, net in self.nets():
            if kind == "freeze" and rank in ranks:
                self.freeze(rank)
            elif kind == "prune":
                prune.l1_unstructured(net.body, "weight", 0.5)
            elif kind == "nest":
                net.head = nn.Sequential(net.head, nn.Tanh())
            elif kind == "write":
                with torch.no_grad():
                    net.code.mul_(1.25)

    def freeze(self, rank: int) -> None:
        for of, parameters in self.parameters():
            if of == rank:
                for i in self.freezable:
                    parameters[i].requires_grad_(False)

    # ---- a step

    def step(self, step: Step) -> None:
        for _, parameters in self.parameters():
            for p in parameters:
                if step.zeros and p.grad is not None and not p.grad.is_sparse:
                    p.grad = p.grad.detach().zero_()
                else:
                    p.grad = None
        self.graph = False
        later: tuple[int, ...] = ()
        for kind, ranks in step.changes:
            if kind == "freeze later":
                later = ranks
            else:
                self.change(kind, ranks)
        total = 0
        for backward in step.backwards:
            last = backward is step.backwards[-1]
            total += sum(backward.rows)
            self.backward(backward, later if last else ())
            if not backward.local:
                self.check(total if backward.weighted else self.plan.ranks)
                total = 0

    def backward(self, backward: Backward, later: tuple[int, ...]) -> None:
        dtype = getattr(torch, self.plan.dtype)
        self.graph |= backward.graph  # bits of its gradients may differ, also if kept
        xs = [
            torch.randn(rows, WIDTH, generator=self.generator, dtype=torch.float64).to(dtype)
            for rows in backward.rows
        ]
        for rank, net in self.nets():
            net.whole = rank not in backward.skip
        rank, where = backward.trap or (None, "")
        trapped = rank == self.rank
        handles = []
        if trapped and "hook" in where:
            parameter = self.own[0 if where == "last hook" else -1]
            handles = [parameter.register_post_accumulate_grad_hook(raises)]
        elif trapped:
            self.ddp.module.trapped = where
        expected = self.reference(backward, xs)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.ddp.no_sync(enabled=backward.local))
                if backward.weighted:
                    self.ddp.weight(backward.rows[self.rank])
                with self.autocast():
                    loss = self.loss(backward.routes[self.rank], xs[self.rank])
                self.compare("loss", loss, expected[self.rank], self.tolerance)
                for rank in later:
                    self.freeze(rank)
                loss.backward(create_graph=backward.graph)
        finally:
            self.ddp.module.trapped = ""
            for handle in handles:
                handle.remove()
        factors = backward.rows if backward.weighted else [1] * self.plan.ranks
        sum(f * e for f, e in zip(factors, expected, strict=True)).backward()

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.plan.parts)

    def loss(self, route: str, x: Tensor) -> Tensor:
        net, module = self.ddp, self.ddp.module
        if route == "method":
            return module.loss(x)
        if route == "through":
            return net(x).square().mean()
        if route == "both":
            return net(x).square().mean() + module.loss(x.cos())
        if route == "twice":
            return module.loss(x) + module.loss(x.cos())
        if route == "transformed":
            torch.func.grad(lambda v: net(v).sin().sum())(x)
            torch.func.grad(lambda v: module(v).sin().sum())(x)
            return module.loss(x)
        calls: dict[str, Callable[[Tensor], Tensor]] = {
            "module": module,
            "layers": module.forward,
            "functional": lambda x: functional_call(module, dict(module.named_parameters()), x),
            "checkpoint": lambda x: checkpoint(module, x, use_reentrant=False),
        }
        return calls[route](x).square().mean()

    def reference(self, backward: Backward, xs: list[Tensor]) -> list[Tensor]:
        with self.autocast():
            outs = drive(self.twins, xs)
            losses = [out.square().mean() for out in outs]
            for rank, route in enumerate(backward.routes):
                if route in ("both", "twice"):
                    (out,) = drive([self.twins[rank]], [xs[rank].cos()])
                    losses[rank] = losses[rank] + out.square().mean()
        return losses

    def check(self, total: int) -> None:
        """Compare gradients with the mean over ranks, which the reference gets, too."""
        digest = 0
        for i, own in enumerate(self.own):
            parts = [parameters[i].grad for parameters in self.theirs]
            have = [part.to_dense() for part in parts if part is not None]
            name = f"gradient {i} of {tuple(own.shape)}"
            if (own.grad is None) != (not have):
                raise AssertionError(f"{name}: {own.grad} for {have}")
            if not have:
                continue
            want, got = sum(have) / total, own.grad.detach().to_dense()
            rough = self.plan.hook == "bf16" or "autocast" in self.plan.parts
            sizes = sum(part.detach().abs() for part in have).max().item() / total
            self.compare(name, got, want, 2e-2 if rough else self.tolerance, max(1.0, sizes))
            digest = zlib.crc32(got.contiguous().numpy().tobytes(), digest)
            for parameters in self.theirs:
                parameters[i].grad = want.clone()
        digests: list[int] = [0] * self.plan.ranks
        dist.all_gather_object(digests, digest, group=self.control)
        if len({*digests}) > 1 and not self.graph:
            raise AssertionError(f"gradients differ between ranks: {digests}")

    def compare(
        self, what: str, got: Tensor, want: Tensor, tolerance: float, size: float = 1.0
    ) -> None:
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance * size, msg=lambda text: f"{what}: {text}"
        )

    def optimize(self, *, discard: bool) -> None:
        for _, parameters in self.parameters():
            for p in parameters:
                p.grad = None if discard else p.grad
        with torch.no_grad():
            for i, p in enumerate(self.theirs[0]):
                if p.grad is not None:
                    p -= 0.1 * p.grad / max(1.0, p.grad.abs().max().item())
                for _, parameters in self.parameters():
                    parameters[i].copy_(p)


def raises(p: Tensor) -> None:
    raise ArithmeticError("trap")


def _on_ranks(plans: Sequence[Plan]) -> Iterator[None]:
    """Run programs, up to one after which the group cannot be used any more."""
    control = dist.new_group(backend="gloo")
    for plan in plans:
        torch.set_default_dtype(getattr(torch, plan.default_dtype))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                in_step = Trainer(plan, control).run()
        finally:
            torch.set_default_dtype(torch.float32)
        yield
        if not in_step:
            return


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first programs, up to one that fails."""
    found, ended = results_of_ranks(_on_ranks, plans, backend)
    return [""] * len(found) + ended
