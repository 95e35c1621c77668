"""Runs PyTorch's own tests of DDP with PyTorch's class and with gradwire's, and compares.

    python tests/parity/run.py                 # all of it; writes RESULTS.md beside this file
    python tests/parity/run.py --ranks 2 --tests test_ddp_create_graph --sides gradwire
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from suite import names, run  # noqa: E402

from gradwire.errors import CollectiveTimeoutError  # noqa: E402
from gradwire.testing import RankError, run_ranks  # noqa: E402
from gradwire.testing.pool import close_pool  # noqa: E402

SIDES = ("torch", "gradwire")


def one(name: str, side: str, ranks: int, limit: float) -> tuple[str, str]:
    """What came of a test: passed, skipped, failed or hung; and why."""
    with tempfile.TemporaryDirectory() as scratch:
        os.mkdir(os.path.join(scratch, "barrier"))
        os.mkdir(os.path.join(scratch, "test_dir"))
        try:
            outcomes = run_ranks(
                run, ranks, backend="gloo", timeout=limit, args=(name, side, scratch)
            )
        except RankError as error:
            return "failed", str(error)
        except CollectiveTimeoutError as error:
            return "hung", str(error)
    return outcomes[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="*")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--sides", nargs="*", default=SIDES)
    parser.add_argument("--limit", type=float, default=60)
    options = parser.parse_args()
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "INIT_METHOD": "file:///unused"}
    os.environ |= {"TEMP_DIR": "", "MASTER_ADDR": "localhost"}
    for ranks in options.ranks:
        os.environ["WORLD_SIZE"] = str(ranks)
        for side in options.sides:
            close_pool()
            for name in options.tests or names():
                t = time.time()
                outcome, why = one(name, side, ranks, options.limit)
                print(ranks, side, outcome, name, f"{time.time()-t:.1f}", flush=True)
                if why:
                    print(why, flush=True)
    close_pool()

if __name__ == "__main__":
    main()
