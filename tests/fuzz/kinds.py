"""The kinds of cases: how each is drawn, run, and shown to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fuzz import (
    collectives_plan,
    collectives_run,
    groups,
    local_sgd,
    models_plan,
    models_run,
    programs,
    routes,
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Draws a case, runs cases of equally many ranks on a backend, and shows one to a person.

    `run_batch` tells what is wrong with the first ones, up to one after which ranks have to be
    restarted: "" if nothing, and "invalid: ..." if the case has no meaning.
    """

    draw: Callable[..., Any]
    run_batch: Callable[[Sequence[Any], str], list[str]]
    show: Callable[[Any], str] = repr

    def run(self, cases: Iterable[Any], backend: str) -> Iterator[tuple[Any, str]]:
        """Run cases, many in one call of the ranks; yield each with what is wrong."""
        by_ranks: dict[int, list[Any]] = {}
        for case in cases:
            by_ranks.setdefault(case.ranks, []).append(case)
        for waiting in by_ranks.values():
            while waiting:
                found = self.run_batch(waiting[:50], backend)
                yield from zip(waiting, found, strict=False)
                del waiting[: len(found)]


KINDS = {
    "models": Kind(models_plan.make_plan, models_run.run_batch, models_plan.shown),
    "small-models": Kind(models_plan.make_small_plan, models_run.run_batch, models_plan.shown),
    "programs": Kind(programs.make_plan, programs.run_batch),
    "routes": Kind(routes.make_plan, routes.run_batch),
    "groups": Kind(groups.make_plan, groups.run_batch),
    "collectives": Kind(collectives_plan.make_plan, collectives_run.run_batch),
    "local-sgd": Kind(local_sgd.make_plan, local_sgd.run_batch),
}
