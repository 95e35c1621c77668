"""A benchmark, as the command knows it: cases with names, and a function that measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.busy import busy
from benchmarks.options import Options
from benchmarks.results import CaseResult, Result

__all__ = ["Benchmark", "Case", "size_text"]


class Case(Protocol):
    """Each benchmark's cases are a class of its own; all have a name."""

    @property
    def name(self) -> str:
        """Name of the case in tables and for `--only`."""


def size_text(nbytes: int) -> str:
    """Return a size as it appears in a case's name: "4 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Benchmark(Generic[C]):
    """A benchmark and its cases.

    Args:
        name: The command, and the name of the results' file.
        about: One line for the command's help and the table's title.
        cases: In the table's order.
        measure: Launches the ranks and measures these cases.
        rounds: Default number of rounds.
        one_process: True if it runs in a single process that uses all cores.
        over_hosts: True if its ranks run on several simulated hosts.
        own_worlds: True if each case has its own number of processes.
        verdict: Function that summarizes the results in a sentence under the table.
        in_full: Benchmark that `--all` runs instead, each case with its own number of ranks.
    """

    name: str
    about: str
    cases: Sequence[C]
    measure: Callable[[Sequence[C], Options], list[CaseResult]]
    rounds: int
    one_process: bool = False
    over_hosts: bool = False
    own_worlds: bool = False
    verdict: Callable[[Sequence[CaseResult]], str] | None = None
    in_full: Benchmark[Any] | None = None

    def run(self, options: Options) -> Result:
        """Measures the cases that the options name, or all."""
        cases = [case for case in self.cases if not options.only or case.name in options.only]
        with busy(options.busy):
            return Result.of(self.name, options, self.measure(cases, options))
