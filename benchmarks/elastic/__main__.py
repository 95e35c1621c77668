"""`python -m benchmarks.elastic steps|recovery --out FILE`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic import recovery, steps
from benchmarks.elastic.trainers import trainer

BACKENDS = ("shm", "gloo")


def main() -> None:
    if sys.argv[1] == "_member":
        port, rank, backend, name, rounds, trees = sys.argv[2:]
        taken = steps.member(int(port), int(rank), backend, name, int(rounds), trees=bool(trees))
        print(json.dumps(taken), flush=True)
        os._exit(0)
    if sys.argv[1] == "_trainer":
        trainer(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "recovery"])
    parser.add_argument("--times", type=int, default=20, help="rounds, or kills of each contender")
    parser.add_argument("--only", nargs="+", help="models, or contenders")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="to the recoveries in --out")
    options = parser.parse_args()
    result = {
        "what": options.what,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "times": options.times,
        "results": _measure(options),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.what == "steps":
        return {
            f"{name}, {backend}": steps.measure(backend, name, options.times)
            for name in options.only or steps.MODELS
            for backend in options.backend
        }
    kinds = tuple(options.only or recovery.KINDS)
    for kind in kinds:
        if reason := recovery.missing(kind):
            print(f"{kind} is left out: {reason}", file=sys.stderr)
    here = tuple(k for k in kinds if not recovery.missing(k))
    earlier = json.loads(options.out.read_text())["results"] if options.add else None
    return recovery.measure(here, options.times, earlier)


if __name__ == "__main__":
    main()
