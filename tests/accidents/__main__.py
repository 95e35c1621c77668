"""Draw accidents, stage them, and print a table of what is said about them.

    python -m tests.accidents --seed 0 --count 150
    python -m tests.accidents --seed 0 --only 17,42 --keep /tmp/accidents    # two of these again

With --hosts, each is explained once more as if some ranks were on another host, whose clock differs
or whose dumps are lost.

"right": the verdict names the rank at fault, the kind and the line; "partly": the rank; "unclear":
no rank; "WRONG": an innocent rank. Beside it, what torchrun's "Root Cause" names in the same runs,
and torch's analyzer of flight records (torchfrtrace). The exit code is 1 if a verdict is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from tests.accidents.accidents import ACCIDENTS, DDP, PROGRAM, QUICK
from tests.accidents.staging import (
    Become,
    Run,
    be_reaper,
    explain_again,
    free_port,
    kill_all,
    stage,
)

OPS = {
    "all_reduce": "dist.all_reduce(torch.ones(5))",
    "all_gather": "dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(3))",
    "all_gather_object": "dist.all_gather_object([None] * size, {'loss': loss.item()})",
    "async": "dist.all_reduce(torch.ones(5), async_op=True).wait()",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(torch.ones(4), 0)",
    "differentiable": "collectives.all_reduce(loss.detach())",
    "none": "",
    "reduce_scatter": "collectives.reduce_scatter(torch.ones(size, 2))",
}
WRAPS = {
    "gradwire": "gradwire.DistributedDataParallel(model)",
    "none": "model",
    "torch": "torch.nn.parallel.DistributedDataParallel(model)",
}
BUSY = 2
RESULTS = ("right", "partly", "unclear", "WRONG")


@dataclass(frozen=True)
class Case:
    number: int
    accident: str
    world: int
    bad: int
    at: int
    op: str
    backend: str
    wrapper: str
    load: int = 0
    seconds: int = 10

    def source(self, port: int) -> str:
        accident = ACCIDENTS[self.accident]
        slots = accident.slots | {"metric": OPS[self.op]}
        lines = []
        for line in PROGRAM.splitlines():
            slot = re.fullmatch(r"( *)(.*)\{(\w+)\}(.*)", line)
            if slot and slot[3] in slots:
                text = f"{slot[2]}{slots[slot[3]]}{slot[4]}"
                lines += indent(text, slot[1]).splitlines()
            else:
                lines.append(line)
        values = asdict(self) | {"port": port, "steps": accident.steps, "wrap": WRAPS[self.wrapper]}
        values |= {"ddp": self.wrapper in DDP, "name": self.accident}
        text = "\n".join(lines) + "\n"
        for name, value in values.items():
            text = text.replace("{" + name + "}", str(value))
        return text


def draw(seed: int, count: int, names: Sequence[str] = ()) -> list[Case]:
    """Draw accidents: each kind about equally often, with everything else at random."""
    cases: list[Case] = []
    chosen = list(names) or list(ACCIDENTS)
    while len(cases) < count:
        rng = random.Random(f"{seed}/{len(cases)}")
        if len(cases) % len(chosen) == 0:
            rng.shuffle(chosen)
        accident = ACCIDENTS[chosen[len(cases) % len(chosen)]]
        world = rng.choice([2, 3, 3, 4])
        bad = rng.randrange(world) if accident.bad is None else accident.bad
        case = Case(
            len(cases),
            accident.name,
            world,
            bad,
            rng.randrange(1, accident.steps - 1),
            rng.choice(list(OPS)),
            rng.choice(list(accident.backends)),
            rng.choice(list(accident.wrappers)),
            rng.choice([0, 0, 0, BUSY]),
        )
        cases.append(case)
    return cases


def put_on_two_hosts(case: Case, dumps: Path) -> None:
    """Move some ranks' dumps to another host, with another clock, or lose them."""
    rng = random.Random(f"hosts/{case.number}")
    away = set(range(rng.randrange(1, case.world), case.world))
    skew = rng.choice([0, 30_000_000, -30_000_000, 5_000_000_000, -(10**12)])
    lost = rng.random() < 0.5
    for path in dumps.glob("rank_*"):
        record = pickle.loads(path.read_bytes())
        extra, is_away = record["gradwire"], int(path.name[5:]) in away
        for name in ("peers", "peers_alive_ns"):
            extra[name] = {r: v for r, v in extra[name].items() if (r in away) == is_away}
        if is_away:
            extra["clock"] = "another"
            extra["peers_alive_ns"] = {r: v + skew for r, v in extra["peers_alive_ns"].items()}
            for found in (extra, *record["entries"]):
                for name in found.keys() & _TIMES:
                    found[name] = found[name] and found[name] + skew
        path.write_bytes(pickle.dumps(record, protocol=2))
    for path in dumps.iterdir() if lost else ():
        if not path.name.startswith("exits") and any(
            re.search(rf"[_-]{rank}(\.|$)", path.name) for rank in away
        ):
            path.unlink()
    exits = dumps / "exits-0.json"
    if lost and exits.exists():
        codes = json.loads(exits.read_text())
        exits.write_text(json.dumps({r: c for r, c in codes.items() if int(r) not in away}))


_TIMES = {"ended_ns", "taken_ns", "time_created_ns", "wall_ns"}
_TIMES |= {"time_discovered_completed_ns", "time_discovered_started_ns"}


def judge(case: Case, run: Run, program: str) -> dict[str, Any]:
    accident = ACCIDENTS[case.accident]
    guilty = accident.ranks(case.bad, case.world)
    first = (run.verdict.get("findings") or [{"kind": "no verdict", "ranks": [], "summary": ""}])[0]
    named = set(first["ranks"])
    if accident.nobody and named == set(range(case.world)):
        named = set()
    text = " ".join(map(str, [first["summary"], *first.get("details", ()), first.get("places")]))
    lines = accident.lines(program)
    kind = not accident.kinds or first["kind"] in accident.kinds
    told = re.search(accident.words, text) and (
        not lines or any(re.search(rf"train\.py:{line}\b", text) for line in lines)
    )
    over = accident.harmless and run.code == 0
    if first["kind"] in ("unclear", "nothing", "no verdict"):
        result = "right" if over or (accident.nobody and first["kind"] == "unclear") else "unclear"
    elif not named <= guilty:
        result = "WRONG"
    elif not named and not (accident.nobody or (accident.sides and case.world == 2)):
        result = "unclear"
    else:
        result = "right" if kind and told else "partly"
    return {
        **asdict(case),
        "result": result,
        "guilty": sorted(guilty),
        "kind": first["kind"],
        "ranks": sorted(named),
        "torchrun": _rate(run.torchrun, guilty),
        "torchfrtrace": _rate(run.analyzer, guilty),
        "code": run.code,
        "summary": first["summary"],
    }


def _rate(named: set[int], guilty: set[int]) -> str:
    said = "+".join(map(str, sorted(named)))
    return f"{said} {'right' if named <= guilty else 'WRONG'}" if named else "-"


def run_all(
    cases: Sequence[Case], folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Stage accidents, some at a time, and yield their results as they come."""
    read, write = os.pipe()
    for part in range(options.at_once):
        if os.fork() == 0:
            os.close(read)
            _work(cases[part :: options.at_once], folder, write, options)
    os.close(write)
    with os.fdopen(read) as results:
        for line in results:
            yield json.loads(line)


def _work(cases: Sequence[Case], folder: Path, results: int, options: argparse.Namespace) -> None:
    be_reaper()
    worker = os.getpid()
    try:
        for case in cases:
            program, place = case.source(free_port()), folder / str(case.number)
            shutil.rmtree(place, ignore_errors=True)
            run = stage(program, place, case.world, load=case.load)
            found = judge(case, run, program)
            if options.hosts:
                put_on_two_hosts(case, place / "dumps")
                run.verdict = explain_again(place)
                again = judge(case, run, program)
                # a busy machine may slow down any rank
                slow = again["kind"] == "slow transfer"
                found["on two hosts"] = "unclear" if slow else again["result"]
            os.write(results, (json.dumps(found) + "\n").encode())
            if options.keep:
                (place / "truth.json").write_text(json.dumps(found, indent=2))
            else:
                shutil.rmtree(place)
    finally:
        if os.getpid() == worker:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def show(found: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'':24}" + "".join(f"{name:>9}" for name in (*RESULTS, "of")))
    for by in ("", "backend", "wrapper", "load", "accident"):
        groups: dict[str, list[str]] = {}
        for each in found:
            groups.setdefault(f"{by} {each[by]}" if by else "all", []).append(each["result"])
        for name, results in sorted(groups.items()):
            counts = Counter(results)
            cells = [*(counts[result] or "" for result in RESULTS), len(results)]
            print(f"{name.removeprefix('accident '):24}" + "".join(f"{cell:>9}" for cell in cells))
    for other in ("torchrun", "torchfrtrace"):
        counts = Counter(each[other].partition(" ")[2] or "names none" for each in found)
        print(f"{other}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.accidents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--kinds", help="names of accidents, with commas", default="")
    parser.add_argument("--only", help="numbers of those to stage, with commas", default="")
    parser.add_argument("--quick", action="store_true", help="one of each family instead")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the programs and dumps")
    parser.add_argument("--hosts", action="store_true", help="explain it on two hosts as well")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        cases = [
            Case(n, name, 3, 1, 2, "all_reduce", ("gloo", "shm")[n % 2], "gradwire", seconds=4)
            for n, name in enumerate(QUICK)
        ]
    else:
        cases = draw(options.seed, options.count, [*filter(None, options.kinds.split(","))])
    wanted = options.only.split(",")
    return [case for case in cases if not options.only or str(case.number) in wanted]


def main() -> int:
    options = _options()
    cases = _cases(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    be_reaper()
    gc.freeze()  # each fork's end would visit the objects of PyTorch's modules
    owner = os.getpid()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="gradwire-accidents-"))
    found = []
    try:
        for each in run_all(cases, folder, options):
            found.append(each)
            print(json.dumps(each) if options.json else _row(each), flush=True)
    finally:
        if os.getpid() == owner:
            kill_all()
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
    if not options.json:
        show(found)
    wrong = any("WRONG" in (each["result"], each.get("on two hosts")) for each in found)
    return int(wrong or len(found) < len(cases))


def _row(each: dict[str, Any]) -> str:
    fields = ("backend", "wrapper", "op", "world", "bad", "load")
    cells = [each["number"], each["result"], each["accident"], *(each[name] for name in fields)]
    widths = (4, 8, 26, 5, 9, 18, 2, 2, 2)
    text = " ".join(f"{cell!s:{width}}" for cell, width in zip(cells, widths, strict=True))
    said = f"{each['kind']} {each['ranks']}; torchrun {each['torchrun']}; {each['torchfrtrace']}"
    return f"{text} {said}: {' '.join(each['summary'].split())[:150]}"


if __name__ == "__main__":
    try:
        code = main()
    except Become as fork:
        become = fork.main
    else:
        sys.exit(code)
    while True:
        try:
            become()
        except Become as fork:
            become = fork.main
        else:
            break
