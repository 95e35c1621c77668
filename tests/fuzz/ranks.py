"""Many cases in one call of the ranks."""

from __future__ import annotations

import faulthandler
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.errors import CollectiveTimeoutError
from gradwire.testing import RankError, run_ranks

Run = Callable[[Sequence[Any]], Iterator[Any]]


def results_of_ranks(
    run: Run, cases: Sequence[Any], backend: str, limit: float = 60.0
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Run cases of equally many ranks, each for at most `limit` seconds on a busy machine.

    Returns:
        What `run` yields for each case on each rank, up to a case on which one of them raises or
        hangs, or after which they stop; and what is wrong with the next one, if anything.
    """
    ranks, ended = range(cases[0].ranks), list[str]()
    with tempfile.TemporaryDirectory() as place:
        try:
            options = {"backend": backend, "timeout": (limit + 5.0) * len(cases)}
            run_ranks(_on_rank, len(ranks), args=(run, cases, place, limit), **options)
        except (CollectiveTimeoutError, RankError) as error:
            ended = [f"{type(error).__name__}: {str(error)[:3000]}"]
        found = [*zip(*(_loaded(Path(place, str(rank))) for rank in ranks), strict=False)]
    return found, ended if len(found) < len(cases) else []


def _on_rank(run: Run, cases: Sequence[Any], place: str, limit: float) -> None:
    with Path(place, str(dist.get_rank())).open("ab", buffering=0) as file:
        results = run(cases)
        for _ in cases:
            faulthandler.dump_traceback_later(limit, exit=True)
            try:
                pickle.dump(next(results), file)
            except StopIteration:
                return
            finally:
                faulthandler.cancel_dump_traceback_later()


def _loaded(file: Path) -> Iterator[Any]:
    rest = io.BytesIO(file.read_bytes() if file.exists() else b"")
    while True:
        try:
            yield pickle.load(rest)
        except (EOFError, pickle.UnpicklingError):
            return
