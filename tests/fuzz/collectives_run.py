"""Runs programs: many in one call of the ranks, each held against its reference."""

from __future__ import annotations

import faulthandler
import importlib
import io
import math
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz.collectives_plan import Plan, Step
from fuzz.collectives_program import Groups, Seen, run_program, same_bits
from fuzz.collectives_reference import Reference, reference
from gradwire.errors import CollectiveTimeoutError
from gradwire.testing import RankError, run_ranks

__all__ = ["run_batch"]

LIMIT = 20
"""Seconds that a program may take on a busy machine: what takes longer hangs."""
EPS = {
    "float64": 1e-12, "complex128": 1e-12, "float32": 1e-5, "complex64": 1e-5,
    "float16": 2e-2, "bfloat16": 0.1,
}  # fmt: skip
SAME_ON_ALL = {
    "all_reduce", "all_gather", "all_gather_list", "broadcast", "all_reduce_coalesced",
    "all_gather_coalesced", "invariant",
}  # fmt: skip


def _on_ranks(plans: Sequence[Plan], checks: Sequence[bool | None], place: str) -> None:
    """On each rank: the plans; what was seen of each goes to a file of the rank's."""
    groups = Groups()
    if any(step.checkpoint for plan in plans for step in plan.steps):
        importlib.import_module("torch._dynamo")  # as the first checkpoint does, for seconds
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*is deprecated.*")
    with Path(place, str(dist.get_rank())).open("ab", buffering=0) as file:
        for plan, check in zip(plans, checks, strict=True):
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                seen = run_program(plan, groups, check)
            except Exception as error:
                found = traceback.extract_tb(error.__traceback__)[-1]
                note = f"{type(error).__name__}: {error} ({found.filename}:{found.lineno})"
                pickle.dump(note, file)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
            pickle.dump(seen, file)


def _checks(plan: Plan, backend: str) -> bool | None:
    """Whether ranks compare; on Gloo they do where gradients are not wanted on all."""
    # A leaf that wants none anywhere will do: in a subgroup it may meet one that does.
    uneven = not all(all(leaf.wanted) for leaf in plan.leaves)
    return True if uneven and backend == "gloo" else plan.checks


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first plans, up to one that ends the ranks' call."""
    ended = ""
    with tempfile.TemporaryDirectory() as place:
        checks = [_checks(plan, backend) for plan in plans]
        try:
            run_ranks(
                _on_ranks,
                plans[0].ranks,
                args=(plans, checks, place),
                backend=backend,
                timeout=(LIMIT + 5.0) * len(plans),
            )
        except (CollectiveTimeoutError, RankError) as error:
            ended = f"{type(error).__name__}: {str(error)[:3000]}"
        seen = [[*_loaded(Path(place, str(rank)))] for rank in range(plans[0].ranks)]
    problems = []
    for plan, own in zip(plans, zip(*seen, strict=False), strict=False):
        raised = [f"rank {r}: {what}" for r, what in enumerate(own) if isinstance(what, str)]
        problems.append("\n".join(raised or differences(plan, own, reference(plan))))
        if raised:
            return problems
    if ended and len(problems) < len(plans):
        reported = [
            f"rank {r}: {own[len(problems)]}"
            for r, own in enumerate(seen)
            if len(own) > len(problems) and isinstance(own[len(problems)], str)
        ]
        problems.append("\n".join([*reported, ended]))
    return problems


def _loaded(file: Path) -> Iterator[Seen | str]:
    rest = io.BytesIO(file.read_bytes() if file.exists() else b"")
    while True:
        try:
            yield pickle.load(rest)
        except (EOFError, pickle.UnpicklingError):
            return


def differences(plan: Plan, seen: Sequence[Seen], expected: Reference) -> Iterator[str]:
    """What is not as it should be, forward first."""
    eps = max(EPS.get(kind, 0) for kind in _dtypes(plan))
    # Gradients of repeated numbers are added up one by one.
    sizes = [math.prod(shape) for step in plan.steps for shape in step.shapes]
    eps *= 1 + max(sizes, default=0) / 500
    for rank, own in enumerate(seen):
        yield from (f"rank {rank}: {what}" for what in own.wrong)
    for step in plan.steps:
        yield from _in_step(step, seen, expected, eps)
    for name, order in (("grads", 1), ("second", 2)):
        for index, wanted in enumerate(getattr(expected, name)):
            for rank, g in enumerate(wanted):
                got = getattr(seen[rank], name)
                off = _off(got[index] if got else None, g, eps * expected.scales[order] * order**3)
                if off:
                    yield f"{name} of leaf {index} on rank {rank}: {off}"


def _dtypes(plan: Plan) -> set[str]:
    return {leaf.dtype for leaf in plan.leaves} | {step.dtype for step in plan.steps}


def _in_step(step: Step, seen: Sequence[Seen], expected: Reference, eps: float) -> Iterator[str]:
    members = step.members or range(len(seen))
    for rank, wanted in enumerate(expected.results[step.number]):
        if wanted is None:
            continue
        got = seen[rank].results[step.number]
        if len(got) != len(wanted):
            yield f"step {step.number}, {step.op} on rank {rank}: {len(got)} results"
            continue
        for y, z in zip(got, wanted, strict=True):
            off = _off(y, z, eps * expected.scales[0])
            if off:
                yield f"step {step.number}, {step.op} on rank {rank}: {off}"
    if step.op in SAME_ON_ALL and not step.args.get("invariant"):
        first, *others = (seen[rank].results[step.number] for rank in members)
        if any(not same_bits(y, z) for own in others for y, z in zip(first, own, strict=True)):
            yield f"step {step.number}, {step.op}: ranks have different bits"


def _off(got: Tensor | None, wanted: Tensor | None, tolerance: float) -> str:
    """How a tensor differs, None and zeros being the same."""
    if got is None or wanted is None:
        there = got if wanted is None else wanted
        big = there is not None and there.numel() and there.abs().max().item() > tolerance
        return f"{got} for {wanted}" if big else ""
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)} for {tuple(wanted.shape)}"
    if not (got.is_floating_point() or got.is_complex()):
        return "" if torch.equal(got, wanted.to(got.dtype)) else f"{got} for {wanted}"
    if got.is_complex() != wanted.is_complex():
        return f"{got.dtype} for {wanted.dtype}"
    equal = torch.isclose(got.to(wanted.dtype), wanted, 0, tolerance, equal_nan=True)
    return "" if equal.all() else f"{got} for {wanted} (to {tolerance:.1e})"
