"""Runs models, many in one call of the ranks: two copies of each, trained side by side.

Each step's gradients, outputs, activations and what hooks saw are compared with those of the naive
copy, whose gradients share memory with nothing. Then both go on from the naive copy's weights.
"""

from __future__ import annotations

import contextlib
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fuzz.containers import plain, wrapped
from fuzz.models_plan import VIEW, Plan, Step, build, operations
from fuzz.ranks import results_of_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.buckets import assignment, bucket

EPS = {"fp16": 1e-3, "bf16": 8e-3, "torch_bf16": 8e-3}
Seen = list[tuple[str, "Tensor | None"]]


class Boxed(nn.Module):
    """A model whose inputs and outputs are in containers; an input is an output, too."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        super().__init__()
        self.module, self.seed = module, seed

    def forward(self, value: Any, at: tuple[int, int]) -> Any:
        given = plain(value)
        h = self.module(given["h"], given["x"], at)
        return wrapped({"h": h, "given": [value, 3]}, self.seed + 1, number_of(at))


def number_of(at: tuple[int, int]) -> int:
    """Return a number of the rank and the step: dicts are filled in other orders."""
    return at[0] * 100 + at[1]


class Side:
    """A copy of the model under "naive" or "ours"."""

    def __init__(self, plan: Plan, kind: str, group: Any) -> None:
        self.plan, self.kind, self.group = plan, kind, group
        self.model, self.extra, self.parameters = build(plan)
        self.boxed = plan.containers if kind == "ours" else None
        module = self.model if self.boxed is None else Boxed(self.model, self.boxed)
        self.net = self._wrapped(module) if kind == "ours" else module
        self.named = _Named(self.parameters)
        self.scale: dict[str, float] = {}
        self.touched: set[str] = set()
        self.noted: Seen = []
        self.kept: list[tuple[str, Tensor, Tensor]] = []
        self.flat: dict[torch.dtype, Tensor] = {}
        self._register()
        if plan.flat_grads:
            self._make_flat()

    def _wrapped(self, module: nn.Module) -> nn.Module:
        net = DistributedDataParallel(module, process_group=self.group, **self.plan.options)
        theirs = {
            "torch_allreduce": default_hooks.allreduce_hook,
            "torch_bf16": default_hooks.bf16_compress_hook,
        }
        if self.plan.hook is not None:
            net.register_comm_hook(None, theirs.get(self.plan.hook, self.plan.hook))
        return net

    def _register(self) -> None:
        noted, touched = self.noted, self.touched
        for name, what in self.plan.hooks:
            p = self.parameters[name]
            if what == "scale":
                p.register_hook(lambda g: None if g is None else g * 0.75)
            elif what == "note":
                p.register_hook(lambda g, name=name: noted.append((f"incoming {name}", g)))
            else:
                p.register_post_accumulate_grad_hook(
                    lambda p, name=name: noted.append(
                        (f"local {name}", None if p.grad is None else p.grad.clone())
                    )
                )
        if self.kind == "naive":
            for name, p in self.parameters.items():
                p.register_hook(_private)
                p.register_post_accumulate_grad_hook(
                    lambda p, name=name: None if p.grad is None else touched.add(name)
                )

    def close(self) -> None:
        """Let go of all that a cycle through hooks, which Python does not see, would keep."""
        self.model.seen.clear()
        self.model.__dict__.clear()
        self.net.__dict__.clear()
        self.noted.clear()
        self.kept.clear()
        self.parameters.clear()

    def _make_flat(self) -> None:
        for dtype in {p.dtype for p in self.parameters.values()}:
            own = [p for p in self.parameters.values() if p.dtype == dtype]
            flat = self.flat[dtype] = own[0].new_zeros(sum(p.numel() for p in own))
            for p, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
                p.grad = part.view(p.shape)

    def step(self, number: int, step: Step, batches: list[Tensor]) -> Seen:
        self._zero(step)
        self.noted.clear()
        self.model.seen.clear()
        at, observed = (dist.get_rank(), number), Seen()
        feeds = [b.to(self.plan.device, copy=True).requires_grad_() for b in batches]
        for x in feeds[: step.local]:
            with nullcontext() if self.kind == "naive" else self.net.no_sync():
                self._loss(x, at, observed).backward()
        frozen = [self.parameters[n] for n, rank in step.frozen if rank == dist.get_rank()]
        for p in frozen:
            p.requires_grad_(False)
        x = feeds[step.local]
        loss = self._loss(x, at, observed)
        if step.form == "two":
            loss = loss + self._loss(feeds[-1], at, observed)
        loss.backward(retain_graph=step.form == "again")
        self._reduce()
        if step.form == "again":
            loss.backward()
            self._reduce()
        for p in frozen:
            p.requires_grad_(True)
        observed += [(f"grad of batch {i}", x.grad) for i, x in enumerate(feeds)]
        observed += self.model.seen + self.noted
        observed += [(f"flat {dtype}", flat) for dtype, flat in self.flat.items()]
        return observed + [(f"grad of {n}", p.grad) for n, p in self.parameters.items()]

    def _zero(self, step: Step) -> None:
        zero = "zeros" if self.flat and step.zero == "none" else step.zero
        if zero == "none" and not self.plan.options.get(VIEW):
            grads = [(n, p.grad) for n, p in self.parameters.items()]
            self.kept += [(n, g, g.clone()) for n, g in grads if g is not None]
        if zero != "keep":
            for name, p in self.parameters.items():
                if zero == "none" or p.grad is None or name.startswith("e"):  # sparse
                    p.grad = None
                else:
                    p.grad.zero_()

    def _loss(self, x: Tensor, at: tuple[int, int], observed: Seen) -> Tensor:
        rows, cols = self.plan.shape
        start = x[torch.arange(rows * cols) % 16].view(rows, cols)
        start = start.to(getattr(torch, self.plan.dtype))
        if self.boxed is None:
            h = self.net(start, x, at)
        else:
            h = plain(self.net(wrapped({"h": start, "x": x}, self.boxed, number_of(at)), at))["h"]
        h = h / (1 + h.abs())
        observed.append(("output", h.detach()))
        loss = h.abs().square().sum().double()
        return self.extra(loss, self.named).float()

    def _reduce(self) -> None:
        if self.kind == "naive":
            reduce_naively(self)

    def changed(self) -> list[str]:
        """Gradients of earlier steps that were kept and are no longer what they were."""
        return [
            f"kept grad of {n}"
            for n, g, was in self.kept
            if not torch.equal(_dense(g), _dense(was))
        ]

    def digest(self) -> int:
        number = 0
        for p in self.parameters.values():
            if p.grad is not None:
                flat = _dense(p.grad.detach()).resolve_conj().resolve_neg().contiguous()
                number = zlib.crc32(flat.view(-1).view(torch.uint8).cpu().numpy().tobytes(), number)
        return number


class _Named:
    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.__dict__.update(parameters)


def _private(g: Tensor | None) -> Tensor | None:
    """A gradient in memory of its own, so that nothing is aliased, accumulated or not."""
    return None if g is None else g.resolve_conj().resolve_neg().clone()


def _dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def reduce_naively(side: Side) -> None:
    """The mean over ranks of what each rank has, one parameter at a time."""
    size = dist.get_world_size()
    options = side.plan.options
    tolerant = options.get("find_unused_parameters") or options.get("static_graph")
    frozen = {name for step in side.plan.steps for name, _ in step.frozen}
    for name, p in side.parameters.items():
        have = torch.tensor([name in side.touched], dtype=torch.int32)
        dist.all_reduce(have, group=side.group)
        mine = torch.zeros_like(p) if p.grad is None else _dense(p.grad.detach())
        real = torch.view_as_real(mine.resolve_conj()) if mine.is_complex() else mine
        scale = real.abs().max().double().view(1)
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=side.group)
        side.scale[name] = max(scale.item(), side.scale.get(name, 0.0))
        if (tolerant or name in frozen) and not have.item():
            continue
        total = real.clone().contiguous()
        dist.all_reduce(total, group=side.group)
        total /= size
        mean = torch.view_as_complex(total) if mine.is_complex() else total
        with torch.no_grad():
            if p.grad is None or p.grad.is_sparse:
                p.grad = mean.clone()
            else:
                p.grad.copy_(mean)
    side.touched.clear()


def differences(plan: Plan, wanted: Seen, got: Seen, scale: dict[str, float]) -> list[str]:
    found = []
    for (label, want), (also, have) in zip(wanted, got, strict=False):
        name = label.split()[-1]
        if label != also or (want is None) != (have is None):
            found.append(f"{label}: {_short(want)}, but {also}: {_short(have)}")
        elif want is not None and have is not None:
            problem = _compare(plan, _dense(want.detach()), _dense(have.detach()), scale.get(name))
            if problem:
                found.append(f"{label}: {problem}")
    if len(wanted) != len(got):
        found.append(f"{len(got)} observations, not {len(wanted)}")
    return found


def _compare(plan: Plan, want: Tensor, have: Tensor, scale: float | None) -> str:
    if want.shape != have.shape or want.dtype != have.dtype:
        return f"{want.dtype} {tuple(want.shape)}, but {have.dtype} {tuple(have.shape)}"
    if not want.numel():
        return ""
    eps = max(torch.finfo(want.dtype).eps, EPS.get(plan.hook or "", 0.0))
    scale = max(want.abs().max().item(), scale or 0.0)
    off = (want - have).abs().max().item()
    if off <= 8 * eps * scale + (1e-6 if plan.hook == "fp16" else 0.0):
        return ""
    want, have = want.reshape(-1), have.reshape(-1)
    at = (want - have).abs().argmax()
    return f"{have[at].item():.6g} for {want[at].item():.6g} (scale {scale:.3g})"


def _short(t: Tensor | None) -> str:
    return "None" if t is None else f"tensor of {tuple(t.shape)}"


LR = 0.01
LIMIT = 180  # seconds


class _Case:
    def __init__(self, plan: Plan, control: dist.ProcessGroup) -> None:
        self.plan, self.control = plan, control

    def agreed(self, problem: str) -> str:
        """The first problem that any rank has."""
        problems: list[str] = [""] * self.plan.ranks
        dist.all_gather_object(problems, problem, group=self.control)
        return next((f"rank {r}: {p}" for r, p in enumerate(problems) if p), "")

    def attempt(self, what: Callable[[], Any], kind: str) -> tuple[Any, str]:
        """The result, or the error of whichever rank had one."""
        result, problem = None, ""
        try:
            result = what()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{kind}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        return result, self.agreed(problem)

    def run(self) -> str:
        """Run the steps; return what is wrong, or "invalid: ..." if the naive run fails."""
        with contextlib.ExitStack() as made:
            sides = []
            for kind, group in (("naive", self.control), ("ours", dist.group.WORLD)):
                side, problem = self.attempt(partial(Side, self.plan, kind, group), kind)
                if problem:
                    return f"invalid: {problem}" if kind == "naive" else problem
                sides.append(side)
                made.callback(side.close)
            return self._run(*sides)

    def _run(self, naive: Side, ours: Side) -> str:
        generator = torch.Generator().manual_seed(self.plan.seed * 16 + dist.get_rank())
        for number, step in enumerate(self.plan.steps):
            batches = [torch.randn(16, generator=generator) for _ in range(step.local + 2)]
            if problem := self.step(naive, ours, number, step, batches):
                return problem
            self.optimize(naive, ours)
        return self.agreed(", ".join(naive.changed() + ours.changed()))

    def step(self, naive: Side, ours: Side, number: int, step: Step, batches: list[Tensor]) -> str:
        """A step of both sides; return what is wrong."""
        wanted, problem = self.attempt(lambda: naive.step(number, step, batches), "naive")
        if problem:
            return f"invalid: {problem}"
        seen, problem = self.attempt(lambda: ours.step(number, step, batches), "ours")
        if "got a gradient twice in one backward" in problem and "reentrant" in self.kinds():
            return f"invalid: PyTorch's class refuses it, too: {problem}"
        if not problem:
            off = differences(self.plan, wanted, seen, naive.scale)
            problem = self.agreed(f"step {number}: {'; '.join(off)}" if off else "")
        if not problem and self.plan.hook is None and self.ranks_differ(ours):
            problem = f"step {number}: the ranks' gradients differ"
        return problem

    def kinds(self) -> set[str]:
        return {op.kind for op in operations(self.plan.ops)}

    def ranks_differ(self, side: Side) -> bool:
        """Whether gradients are not the same, to the bit, on all ranks."""
        digest = torch.tensor([side.digest(), -side.digest()])
        dist.all_reduce(digest, op=dist.ReduceOp.MAX, group=self.control)
        return bool(digest.sum())

    def optimize(self, naive: Side, ours: Side) -> None:
        with torch.no_grad():
            for name, p in naive.parameters.items():
                if p.grad is not None:
                    size = max(1.0, p.grad.to_dense().abs().max().item())
                    p -= LR / size * p.grad.to_dense()
                ours.parameters[name].copy_(p)


@contextlib.contextmanager
def _as_if_large(seed: int) -> Iterator[None]:
    """Treat gradients of a third of the cases as large, and of another as on an accelerator."""
    with contextlib.ExitStack() as stack:
        patch = lambda *given: stack.enter_context(mock.patch.object(*given))  # noqa: E731
        if seed % 3 == 1:
            patch(bucket, "AT_ONCE_BYTES", 40)
            patch(assignment, "IN_PLACE_BYTES", 100)
        elif seed % 3 == 2:
            patch(bucket, "AT_ONCE_BYTES", 1 << 60)
            patch(assignment.BucketSet, "_on_cpu", False)
        yield


def _on_ranks(plans: Sequence[Plan]) -> Iterator[str]:
    """Run plans up to one that leaves groups in doubt."""
    control = dist.new_group(backend="gloo")
    if plans[0].device != "cpu":  # else copies of a model have different gradients on one rank
        torch.use_deterministic_algorithms(True, warn_only=True)
    for plan in plans:
        with _as_if_large(plan.seed):
            problem = _Case(plan, control).run()
        yield problem
        if problem:
            return


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first plans, up to one after which ranks have to be restarted."""
    problems, ended = results_of_ranks(_on_ranks, plans, backend, LIMIT)
    return [problem for problem, *_ in problems] + ended
