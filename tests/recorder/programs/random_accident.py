"""Stage random accidents, and check the verdict on each.

    python random_accident.py DIRECTORY FIRST COUNT [ACCIDENT...]

prints a line of JSON per accident.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # imported before forking, like the following modules, to save time
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from random_programs import Case, draw
from staging import Ranks

import gradwire  # noqa: F401
from gradwire.errors import ArgumentError
from gradwire.recorder.files import load
from gradwire.recorder.verdict import explain

SECONDS = 3
LIMIT = 20.0


def run(case: Case, directory: Path) -> dict:
    """Stage an accident and judge the verdict."""
    program = directory.with_suffix(".py")
    program.write_text(case.source)

    def again(rank, calls):
        """End this job and begin another with the same names."""
        for _ in range(calls):
            dist.all_reduce(torch.ones(2))
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(directory / "store-2"), case.world)
        dist.init_process_group(
            case.backend,
            store=store,
            rank=rank,
            world_size=case.world,
            timeout=timedelta(seconds=SECONDS),
        )

    def main(rank):
        names = {"again": again}
        exec(compile(case.source, str(program), "exec"), names)
        names["main"](rank)

    seen = []

    def over(ranks):
        failed = any(code for code in ranks.codes.values())
        alone = set(ranks.left) <= {case.culprit}
        if failed or alone:
            seen.append(time.monotonic())
        # like a launcher: end the other ranks when one has failed; else wait for the timeout
        patience = 0 if case.launched and failed else SECONDS if alone else 3 * SECONDS
        return bool(seen) and time.monotonic() > seen[0] + patience

    ranks = Ranks(main, directory, case.world, case.backend, timedelta(seconds=SECONDS))
    ranks.wait(over, LIMIT)
    if ranks.left and not any(ranks.codes.values()):
        (directory / "request").write_text("as a user asks for dumps of what hangs")
    if case.launched:
        exits = {
            r: {"code": c, "time": time.time_ns(), "oom_killed": False}
            for r, c in ranks.codes.items()
            if c
        }
        if exits:
            (directory / "exits-0.json").write_text(json.dumps(exits))
        (directory / "request").write_text("the launcher ends the ranks")
        time.sleep(0.3)
    ranks.collect()
    ranks.kill()
    put_on_two_hosts(case, directory)
    return judge(case, directory, not ranks.killed and not any(ranks.codes.values()))


def put_on_two_hosts(case: Case, directory: Path) -> None:
    """Move some ranks' dumps to another host with another clock."""
    for path in directory.glob("rank_*"):
        record, rank = load(path), int(path.name[5:])
        away = rank in case.away
        extra = record["gradwire"]
        for name in ("peers", "peers_alive_ns"):
            extra[name] = {r: v for r, v in extra[name].items() if (r in case.away) == away}
        if away:
            extra["clock"] = "another"
            shift(record, case.skew)
        path.write_bytes(pickle.dumps(record, protocol=2))
    for rank in case.away if case.lost else ():
        for path in directory.glob(f"*[_-]{rank}*"):
            if not path.name.startswith("exits"):
                path.unlink()
    exits = directory / "exits-0.json"
    if case.lost and exits.exists():
        codes = json.loads(exits.read_text())
        exits.write_text(json.dumps({r: c for r, c in codes.items() if int(r) not in case.away}))


def shift(record, by: int) -> None:
    """Shift all wall-clock times."""
    for entry in record["entries"]:
        for name, value in entry.items():
            if name.startswith("time_") and name.endswith("_ns") and value:
                entry[name] = value + by
    extra = record["gradwire"]
    extra["wall_ns"] += by
    extra["taken_ns"] += by
    extra["peers_alive_ns"] = {r: at + by for r, at in extra["peers_alive_ns"].items()}


def judge(case: Case, directory: Path, well: bool) -> dict:
    """Return the verdict and a judgement: right, wrong or unsaid.

    "missed" is a verdict that nothing failed where something did, and nothing of it is lost.
    """
    verdict = explain(directory)
    first = verdict.findings[0]
    named = set(first.ranks)
    if verdict.healthy:
        # a busy machine may slow down any rank, but a different clock must not
        calm = named <= case.allowed or first.kind == "slow transfer" or not case.skew
        result = ("right" if calm else "wrong") if well else "unsaid" if case.lost else "missed"
    elif not named:
        result = "unsaid" if not well else "wrong"
    elif first.kind == "deadlock":
        result = "right" if case.allowed & named else "wrong"
    else:
        result = "right" if named <= case.allowed else "wrong"
    return {
        "seed": case.seed,
        "accident": case.accident,
        "backend": case.backend,
        "world": case.world,
        "culprit": case.culprit,
        "hosts": [case.away, case.skew / 1e9, case.lost] if case.away else "",
        "launched": case.launched,
        "result": result,
        "kind": first.kind,
        "ranks": first.ranks,
        "summary": first.summary,
        "also": [[f.kind, f.ranks] for f in verdict.findings[1:]],
    }


def main() -> None:
    place, first, count, *names = sys.argv[1:]
    os.makedirs(place, exist_ok=True)
    for seed in range(int(first), int(first) + int(count)):
        case = draw(seed, names)
        directory = Path(place) / str(seed)
        shutil.rmtree(directory, ignore_errors=True)
        try:
            found = run(case, directory)
        except ArgumentError as error:
            result = "unsaid" if case.lost else "missed"
            found = {"seed": seed, "accident": case.accident, "result": result}
            found["summary"] = str(error)
        except Exception as error:
            found = {"seed": seed, "accident": case.accident, "result": "broken"}
            found["summary"] = repr(error)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
