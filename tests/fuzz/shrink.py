"""Makes a failing case small: leaves out what it fails without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from fuzz.plan import BODIES, Op, Plan, Step, params_in
from fuzz.source import code_of

__all__ = ["shown", "shrink", "shrink_by"]

T = TypeVar("T")


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, attempts: int = 150) -> Plan:
    """The smallest plan found that still fails.

    Args:
        plan: One that fails.
        fails: Whether a plan does.
        attempts: How many plans to try at most.
    """
    return shrink_by(lambda p: filter(_is_valid, simpler(p)), plan, fails, attempts)


def shrink_by(
    simpler: Callable[[T], Iterable[T]], plan: T, fails: Callable[[T], bool], attempts: int
) -> T:
    """The same for plans of any kind, from what makes simpler ones of one."""
    again = True
    while again and attempts > 0:
        again = False
        for smaller in simpler(plan):
            attempts -= 1
            if attempts <= 0:
                break
            if fails(smaller):
                plan, again = smaller, True
                break
    return plan


def _is_valid(plan: Plan) -> bool:
    """Whether there are parameters, and all are used where they have to be."""
    tolerant = plan.options.keys() & {"find_unused_parameters", "static_graph"}
    whole = any(params_in(plan.ops)) and all(
        any(params_in(op.body)) for op in plan.ops if op.kind == "inner"
    )
    return whole and bool(tolerant or not _may_skip(plan.ops))


def _may_skip(ops: tuple[Op, ...]) -> bool:
    return any(op.skip or op.kind == "spare" or _may_skip(op.body) for op in ops)


def simpler(plan: Plan) -> Iterator[Plan]:
    """Plans with something less."""
    for n in range(1, len(plan.steps)):
        yield replace(plan, steps=plan.steps[:n])
    for ops in _less(plan.ops):
        if ops:
            yield replace(plan, ops=ops)
    for loss in _less(plan.loss):
        yield replace(plan, loss=loss)
    if plan.hooks:
        yield replace(plan, hooks=())
    if plan.hook is not None:
        yield replace(plan, hook=None)
    if plan.wrap != "one":
        yield replace(plan, wrap="one")
    if plan.flat_grads:
        yield replace(plan, flat_grads=False)
    for name in plan.options:
        yield replace(plan, options={k: v for k, v in plan.options.items() if k != name})
    if plan.ranks > 2:
        yield replace(plan, ranks=2)
    for i, step in enumerate(plan.steps):
        for plain in (replace(step, local=0), replace(step, form="once"), Step()):
            if plain != step:
                yield replace(plan, steps=(*plan.steps[:i], plain, *plan.steps[i + 1 :]))


def _less(ops: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    """With one operation less, or one that is less."""
    if len(ops) > 2:
        yield ops[: len(ops) // 2]
        yield ops[len(ops) // 2 :]
    for i, op in enumerate(ops):
        rest = ops[:i], ops[i + 1 :]
        yield (*rest[0], *rest[1])
        if op.kind in BODIES:
            yield (*rest[0], *op.body, *rest[1])
        if op.skip:
            yield (*rest[0], replace(op, skip=()), *rest[1])
        for body in _less(op.body):
            if body:
                yield (*rest[0], replace(op, body=body), *rest[1])


def shown(plan: Plan, backend: str) -> str:
    """A case as a person reads it."""
    rest = replace(plan, ops=(), loss=())
    return f"{code_of(plan)}\n\n{backend}: {rest!r}"
