"""Run drawn cases by hand.

python tests/fuzz models --count 1000 --backends gloo shm
python tests/fuzz collectives --first 4711 --count 1     # one seed again, and its case
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.kinds import KINDS
from gradwire.testing.ranks import POOL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    parser.add_argument("--device", default="cpu", help="of all but programs and groups: cuda")
    arguments = parser.parse_args()
    return max(run(arguments, backend) for backend in arguments.backends)


def run(arguments: argparse.Namespace, backend: str) -> int:
    kind, began = KINDS[arguments.kind], time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.count)
    worlds = {"worlds": [1]} if backend == "nccl" else {}  # collectives, on one GPU
    cases = [kind.draw(random.Random(seed), **worlds) for seed in seeds]
    if arguments.device != "cpu":
        cases = [replace(case, device=arguments.device) for case in cases]
    seed_of = {id(case): seed for case, seed in zip(cases, seeds, strict=True)}
    ran, failed = 0, 0
    for case, problem in kind.run(cases, backend):
        ran += not problem.startswith("invalid")
        if problem and not problem.startswith("invalid"):
            failed += 1
            print(f"FAILED --first {seed_of[id(case)]} on {backend}: {problem[:900]}", flush=True)
            print(kind.show(case) if arguments.count == 1 else "", flush=True)
    seconds = time.monotonic() - began
    print(f"{backend}: {ran} ran, {failed} failed; {seconds:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    status = main()
    POOL.close()
    sys.exit(status)
