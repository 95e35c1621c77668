"""Makes a failing program small, and shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.collectives_plan import Plan, Step
from fuzz.shrink import shrink_by

__all__ = ["shown", "shrink"]


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, attempts: int = 150) -> Plan:
    """The smallest program found that still fails; as `fuzz.shrink.shrink`."""
    return shrink_by(_simpler, plan, fails, attempts)


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Programs with something less."""
    for i in range(len(plan.steps)):
        yield _without(plan, i)
    for plain in (replace(plan, twice=False), replace(plan, by_grad=False)):
        if plain != plan:
            yield plain
    if len(plan.leaves) > 1:
        yield _with_one_leaf(plan)
    for i, step in enumerate(plan.steps):
        for plainer in _plainer(step, plan):
            if plainer != step:
                yield replace(plan, steps=(*plan.steps[:i], plainer, *plan.steps[i + 1 :]))


def _without(plan: Plan, i: int) -> Plan:
    """Without a step; those after it take what it took."""
    gone = plan.steps[i]

    def renamed(step: Step) -> Step:
        return replace(step, given=gone.given) if step.given == gone.number else step

    return replace(plan, steps=(*plan.steps[:i], *map(renamed, plan.steps[i + 1 :])))


def _with_one_leaf(plan: Plan) -> Plan:
    count = len(plan.leaves)
    steps = [replace(step, given=0) if step.given < count else step for step in plan.steps]
    # Numbers of registers stay; those of the leaves that are gone name nothing.
    return replace(plan, leaves=plan.leaves[:1], steps=tuple(steps))


def _plainer(step: Step, plan: Plan) -> Iterator[Step]:
    yield replace(step, layouts=("plain",) * len(step.layouts))
    yield replace(step, post="none")
    yield replace(step, checkpoint="")
    yield replace(step, late=False)
    yield replace(step, asynchronous=False, late=False)
    if step.losses:
        yield replace(step, losses=())
        if not plan.twice:
            yield replace(step, losses=("weights",) * len(step.losses))
    if len(step.members) in (0, plan.ranks):
        yield replace(step, members=())


def shown(plan: Plan, backend: str) -> str:
    """A program as a person reads it."""
    lines = [f"# {backend}, {plan.ranks} ranks; checks={plan.checks}, seed {plan.seed}"]
    for i, leaf in enumerate(plan.leaves):
        shapes = leaf.shapes[0] if len({*leaf.shapes}) == 1 else f"by rank: {[*leaf.shapes]}"
        wanted = "" if all(leaf.wanted) else f", requires_grad by rank: {[*leaf.wanted]}"
        lines.append(f"v{i} = {leaf.dtype} of shape {shapes}{wanted}")
    lines += [line for step in plan.steps for line in _lines(step)]
    kinds = {s.number: s.losses for s in plan.steps if s.losses}
    lines.append("loss: " + ", ".join(f"v{n} ({' '.join(kind)})" for n, kind in kinds.items()))
    by = "torch.autograd.grad" if plan.by_grad else "backward"
    lines.append(f"gradients by {by}{', twice' if plan.twice else ''}")
    return "\n".join(lines)


def _lines(step: Step) -> Iterator[str]:
    shapes = step.shapes[0] if len({*step.shapes}) == 1 else f"by rank: {[*step.shapes]}"
    layouts = step.layouts[0] if len({*step.layouts}) == 1 else f"by rank: {[*step.layouts]}"
    args = "".join(f", {name}={value!r}" for name, value in step.args.items())
    group = f", group={[*step.members]}" if step.members else ""
    start = ", async_op=True" * step.asynchronous
    yield f"x = v{step.given} as {step.dtype} of shape {shapes}, layout {layouts}"
    late = "  # waited for where it is used" * step.late
    inside = f"  # in a checkpoint ({step.checkpoint})" if step.checkpoint else ""
    yield f"v{step.number} = {step.post}({step.op}(x{args}{group}{start})){late}{inside}"
