"""Runs the fuzzer by hand; see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import collectives_plan, collectives_run, collectives_shrink, local_sgd
from fuzz.collectives_plan import Plan
from fuzz.groups import make_groups_plan, run_groups_plan
from fuzz.plan import make_plan
from fuzz.programs import make_program, run_programs
from fuzz.run import run_many, run_one
from fuzz.shrink import shown, shrink
from gradwire.testing.pool import close_pool

STEP = 40


def main() -> int:
    """Runs what the command line asks for; 1 if ours failed anywhere."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, shrunk if it fails")
    parser.add_argument("--whole", action="store_true", help="with --seed: do not shrink")
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    parser.add_argument("--device", default="cpu", help="of models, collectives and LocalSGD: cuda")
    parser.add_argument("--stop-after", type=int, default=20, help="failures")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's class out: faster")
    parser.add_argument("--collectives", type=int, help="programs of collectives, not models")
    parser.add_argument("--collectives-seed", type=int, help="as --seed, of these")
    parser.add_argument("--local-sgd", type=int, help="runs of LocalSGD, not models")
    parser.add_argument("--groups", type=int, help="programs with wrappers in several groups")
    parser.add_argument("--programs", type=int, help="programs around the wrapper, not models")
    arguments = parser.parse_args()
    if arguments.programs is not None:
        return max(many_wrapped(arguments, backend) for backend in arguments.backends)
    if arguments.local_sgd is not None:
        return max(many_local_sgd(arguments, backend) for backend in arguments.backends)
    if arguments.groups is not None:
        return max(many_groups(arguments, backend) for backend in arguments.backends)
    if arguments.collectives_seed is not None:
        return max(one_program(arguments, b) for b in arguments.backends)
    if arguments.collectives is not None:
        return max(many_programs(arguments, backend) for backend in arguments.backends)
    if arguments.seed is not None:
        return max(one(arguments, backend) for backend in arguments.backends)
    return max(many(arguments, backend) for backend in arguments.backends)


def one(arguments: argparse.Namespace, backend: str) -> int:
    """A seed; 1 if it fails."""
    plan = replace(make_plan(arguments.seed), device=arguments.device)
    outcome = run_one(plan, backend)
    print(f"{backend} {plan.seed}:", outcome.problems or outcome.invalid or "as the naive average")
    if outcome.torch:
        print("PyTorch's class:", *outcome.torch)
    if not outcome.problems:
        return 0
    if not arguments.whole:
        plan = shrink(plan, lambda p: bool(run_one(p, backend).problems))
        print(*run_one(plan, backend).problems, sep="\n")
    print(shown(plan, backend))
    return 1


def many(arguments: argparse.Namespace, backend: str) -> int:
    """Many seeds; 1 if one fails."""
    ran, failed, invalid, torchs = 0, 0, Counter[str](), 0
    began = time.monotonic()
    for first in range(arguments.first, arguments.first + arguments.models, STEP):
        seeds = range(first, min(first + STEP, arguments.first + arguments.models))
        plans = (replace(make_plan(seed), device=arguments.device) for seed in seeds)
        tally = run_many(plans, backend, with_torch=not arguments.no_torch)
        ran, failed = ran + tally.ran, failed + len(tally.failed)
        invalid.update(tally.invalid)
        torchs += len(tally.torch)
        for seed, problems in tally.failed.items():
            print(f"FAILED --seed {seed} --backends {backend}: {problems[0][:300]}", flush=True)
        for seed, problem in tally.torch.items():
            print(f"torch differs: {seed}: {problem[:160]}", flush=True)
        rate = ran / (time.monotonic() - began)
        print(
            f"{backend}: to seed {seeds[-1]}: {ran} ran, {failed} failed, "
            f"{sum(invalid.values())} invalid, torch's differs in {torchs}; {rate:.1f} a second",
            flush=True,
        )
        if failed >= arguments.stop_after:
            break
    for reason, count in invalid.items():
        print(f"invalid: {count}: {reason}")
    return int(failed > 0)


def program_plan(arguments: argparse.Namespace, backend: str, seed: int) -> Plan:
    """The collectives' case of a seed; on one GPU, NCCL has one rank."""
    return collectives_plan.make_plan(seed, alone=backend == "nccl", device=arguments.device)


def one_program(arguments: argparse.Namespace, backend: str) -> int:
    """A seed of the collectives; 1 if it fails."""
    seed, whole = arguments.collectives_seed, arguments.whole
    plan = program_plan(arguments, backend, seed)
    problems = collectives_run.run_one(plan, backend)
    print(f"{backend} {seed}:", *(problems or ["as the reference"]), sep="\n")
    if problems and not whole:
        plan = collectives_shrink.shrink(plan, lambda p: bool(collectives_run.run_one(p, backend)))
        print("smaller:", *collectives_run.run_one(plan, backend), sep="\n")
    print(collectives_shrink.shown(plan, backend))
    return int(bool(problems))


def many_programs(arguments: argparse.Namespace, backend: str) -> int:
    """Many seeds of the collectives; 1 if one fails."""
    ran, failed, began = 0, 0, time.monotonic()
    last = arguments.first + arguments.collectives
    for first in range(arguments.first, last, 5 * STEP):
        seeds = range(first, min(first + 5 * STEP, last))
        plans = (program_plan(arguments, backend, seed) for seed in seeds)
        tally = collectives_run.run_many(plans, backend)
        ran, failed = ran + tally.ran, failed + len(tally.failed)
        for seed, problems in tally.failed.items():
            print(f"FAILED --collectives-seed {seed} --backends {backend}: {problems[0][:300]}")
        rate = ran / (time.monotonic() - began)
        summary = f"{backend}: to seed {seeds[-1]}: {ran} ran, {failed} failed; {rate:.1f} a second"
        print(summary, flush=True)
        if failed >= arguments.stop_after:
            break
    return int(failed > 0)


def many_local_sgd(arguments: argparse.Namespace, backend: str) -> int:
    """Many runs of LocalSGD; 1 if one fails."""
    failed, last = 0, arguments.first + arguments.local_sgd
    for first in range(arguments.first, last, STEP):
        seeds = range(first, min(first + STEP, last))
        plans = (replace(local_sgd.make_plan(s), device=arguments.device) for s in seeds)
        problems = local_sgd.run_many(plans, backend)
        for seed, found in problems.items():
            print(f"FAILED local_sgd seed {seed} on {backend}: {found[0][-300:]}")
        failed += len(problems)
        ran = seeds[-1] + 1 - arguments.first
        print(f"{backend}: to seed {seeds[-1]}: {ran} ran, {failed} failed", flush=True)
    return int(failed > 0)


def many_groups(arguments: argparse.Namespace, backend: str) -> int:
    """Many seeds of wrappers in several groups; 1 if one fails."""
    failed, began = 0, time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.groups):
        if problems := run_groups_plan(make_groups_plan(seed), backend):
            failed += 1
            print(f"FAILED {backend} --groups 1 --first {seed}: {problems[0][:600]}", flush=True)
        if failed >= arguments.stop_after:
            break
    taken = time.monotonic() - began
    print(
        f"{backend}: {seed + 1 - arguments.first} ran, {failed} failed; {taken:.0f} s", flush=True
    )
    return int(failed > 0)


def many_wrapped(arguments: argparse.Namespace, backend: str) -> int:
    """Run many programs around the wrapper; return 1 if one fails."""
    failed, last = 0, arguments.first + arguments.programs
    for first in range(arguments.first, last, STEP):
        seeds = range(first, min(first + STEP, last))
        for seed, found in run_programs(map(make_program, seeds), backend).items():
            failed += 1
            print(f"FAILED --programs 1 --first {seed} --backends {backend}: {found[:900]}")
        print(f"{backend}: to seed {seeds[-1]}: {failed} failed", flush=True)
        if failed >= arguments.stop_after:
            break
    return int(failed > 0)


if __name__ == "__main__":
    status = main()
    close_pool()
    sys.exit(status)
