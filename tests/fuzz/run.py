"""Runs models: many in one call of the ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

from fuzz.plan import Plan, operations, uses_nothing
from fuzz.train import Side, differences
from gradwire.ddp.buckets import assignment, packed
from gradwire.errors import CollectiveTimeoutError
from gradwire.testing import RankError, run_ranks

__all__ = ["run_batch"]

LR = 0.01
LIMIT = 180
"""Seconds that a case may take on a busy machine: what takes longer hangs."""


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        problems: Where ours is not as the naive average, or fails.
        torch: Where PyTorch's is not, or fails.
        invalid: The naive run fails by itself, or both classes refuse the case.
    """

    problems: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)
    invalid: str = ""


def suits_torch(plan: Plan) -> bool:
    """Whether PyTorch's class can be run: it ends in a hang or crash where ranks use other parts.

    With find_unused_parameters it refuses reentrant checkpoints, and parameters that only the loss
    uses, on the ranks that have them; a rank that uses none at all sends nothing.
    """
    kinds = {op.kind for op in operations(plan.ops)}
    return not plan.options.get("find_unused_parameters") or not (
        plan.loss or kinds & {"reentrant", "sparse"} or uses_nothing(plan)
    )


class _Case:
    """One rank's part."""

    def __init__(self, plan: Plan, control: dist.ProcessGroup, theirs: dist.ProcessGroup) -> None:
        self.plan, self.control, self.theirs = plan, control, theirs
        self.kinds = ["naive", "ours", *(["torch"] if suits_torch(plan) else [])]
        self.outcome = Outcome()
        self.broken = False

    def agreed(self, problem: str) -> str:
        """The first problem that any rank has."""
        problems: list[str] = [""] * self.plan.ranks
        dist.all_gather_object(problems, problem, group=self.control)
        return next((f"rank {r}: {p}" for r, p in enumerate(problems) if p), "")

    def attempt(self, what: object, kind: str) -> tuple[object, str]:
        """The result, or the error of whichever rank had one."""
        result, problem = None, ""
        try:
            result = what()  # type: ignore[operator]
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{kind}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        return result, self.agreed(problem)

    def run(self) -> Outcome:
        """All steps, or those until something is wrong."""
        made: list[Side] = []
        try:
            return self._run(made)
        finally:
            for side in made:
                side.close()

    def _run(self, made: list[Side]) -> Outcome:
        sides: dict[str, Side] = {}
        for kind in self.kinds:
            group = {"ours": dist.group.WORLD, "torch": self.theirs}.get(kind, self.control)
            side, problem = self.attempt(lambda k=kind, g=group: Side(self.plan, k, g), kind)
            if not problem:
                assert isinstance(side, Side)
                sides[kind] = side
                made.append(side)
            elif self.note(kind, problem):
                return self.outcome
        generator = torch.Generator().manual_seed(self.plan.seed * 16 + dist.get_rank())
        for number, step in enumerate(self.plan.steps):
            batches = [torch.randn(16, generator=generator) for _ in range(step.local + 2)]
            if self.step(sides, number, step, batches):
                break
            self.optimize(sides)
        for kind, side in sides.items():
            if changed := self.agreed(", ".join(side.changed())):
                self.note(kind, changed)
        return self.outcome

    def step(self, sides: dict[str, Side], number: int, step: object, batches: object) -> bool:
        """A step of all sides; whether to stop."""
        seen, found = {}, {}
        for kind, side in sides.items():
            seen[kind], problem = self.attempt(lambda s=side: s.step(number, step, batches), kind)
            if kind != "naive" and not problem:
                off = differences(self.plan, seen["naive"], seen[kind], sides["naive"].scale)
                problem = self.agreed(f"step {number}: {'; '.join(off)}" if off else "")
            if problem:
                found[kind] = problem
                if kind == "naive":
                    break
        refused = "got a gradient twice in one backward" in found.get("ours", "")
        if refused and ("torch" not in sides or "torch: " in found.get("torch", "")):
            # parameters in several reentrant checkpoints
            found = {"naive": f"both refuse: {found['ours'][:60]}"}
        for kind, problem in found.items():
            del sides[kind]
            if self.note(kind, problem):
                return True
        return (
            "ours" in sides and self.plan.hook is None and self.ranks_differ(sides["ours"], number)
        )

    def ranks_differ(self, side: Side, number: int) -> bool:
        """Whether gradients are not the same, to the bit, on all ranks."""
        digest = torch.tensor([side.digest(), -side.digest()])
        dist.all_reduce(digest, op=dist.ReduceOp.MAX, group=self.control)
        differ = bool(digest.sum())
        return differ and self.note("ours", f"step {number}: the ranks' gradients differ")

    def note(self, kind: str, problem: str) -> bool:
        """Whether to stop."""
        if kind == "naive":
            self.outcome.invalid = problem
        elif kind == "torch":
            self.outcome.torch.append(problem)
        else:
            self.outcome.problems.append(problem)
        return kind != "torch"

    def optimize(self, sides: dict[str, Side]) -> None:
        """A step of the naive copy, which the others follow."""
        with torch.no_grad():
            for name, p in sides["naive"].parameters.items():
                if p.grad is not None:
                    size = max(1.0, p.grad.to_dense().abs().max().item())
                    p -= LR / size * p.grad.to_dense()
                for side in sides.values():
                    if side.parameters[name] is not p:
                        side.parameters[name].copy_(p)


@contextlib.contextmanager
def _as_if_large(seed: int) -> Iterator[None]:
    """Treat gradients of a third of the cases as large, and of another as on an accelerator."""
    with contextlib.ExitStack() as stack:
        patch = lambda *given: stack.enter_context(mock.patch.object(*given))  # noqa: E731
        if seed % 3 == 1:
            patch(packed, "AT_ONCE_BYTES", 40)
            patch(assignment, "IN_PLACE_BYTES", 100)
        elif seed % 3 == 2:
            patch(packed, "CACHED", ())
            patch(packed, "MOVE_BYTES", 40)
            patch(assignment.BucketSet, "_on_cpu", False)
        yield


def _on_ranks(plans: Sequence[Plan], path: str) -> None:
    """On each rank: the first plans, up to one that leaves groups in doubt; outcomes go to a file.

    A case that hangs ends the process, with the threads' stacks on stderr.
    """
    control, theirs = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    if plans[0].device != "cpu":  # else copies of a model have different gradients on one rank
        torch.use_deterministic_algorithms(True, warn_only=True)
    with open(path, "ab", buffering=0) as file:
        for plan in plans:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            with _as_if_large(plan.seed):
                outcome = _Case(plan, control, theirs).run()
            faulthandler.cancel_dump_traceback_later()
            if dist.get_rank() == 0:
                pickle.dump(outcome, file)
            raised = any("torch: " in problem for problem in outcome.torch)
            if outcome.problems or raised or outcome.invalid:
                break


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first plans, up to one after which ranks have to be restarted."""
    with tempfile.NamedTemporaryFile() as results:
        ended = ""
        try:
            run_ranks(
                _on_ranks,
                plans[0].ranks,
                args=(plans, results.name),
                backend=backend,
                timeout=(LIMIT + 5.0) * len(plans),
            )
        except (CollectiveTimeoutError, RankError) as error:
            ended = f"{type(error).__name__}: {str(error)[:1500]}"
        outcomes = []
        while True:
            try:
                outcomes.append(pickle.load(results))
            except EOFError:
                break
    if ended and len(outcomes) < len(plans):
        outcomes.append(Outcome([ended]))
    return [
        "\n".join(found.problems) or (found.invalid and f"invalid: {found.invalid}")
        for found in outcomes
    ]
