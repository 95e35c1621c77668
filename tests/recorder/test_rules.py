"""Rules of the verdict on synthetic records: whom they name, and whom they must not name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from gradwire import errors
from gradwire.recorder.verdict import Kind, explain

SECOND = 1_000_000_000
FILE = "/home/me/train.py"


def call(number: int, at: float, *, line: int = 10, ended: float = 0, done: bool = True, size=4):
    return {
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_reduce",
        "op": "all_reduce",
        "time_created_ns": int(at * SECOND),
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": int(ended * SECOND) or None,
        "state": "completed" if done else "scheduled",
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "retired": done,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": FILE, "line": line}],
    }


def exit_call(line: int, code: int, text: str = "", file: object = FILE):
    lines = [{"name": "main", "filename": str(file), "line": line}]
    return {"how": "sys.exit", "code": code, "text": text, "lines": lines}


def error(at: float, kind="RuntimeError", message="bad", *, line=10, **more: Any):
    lines = [{"name": "step", "filename": FILE, "line": line}]
    fields = {"kind": "uncaught", "type": kind, "message": message, "parameters": ()}
    return fields | {"time": int(at * SECOND), "lines": lines} | more


class Run:
    def __init__(self, directory: Path, world: int) -> None:
        self.directory, self.world = directory, world
        self.groups: dict[str, list[int]] = {}

    def rank(self, rank: int, calls=(), events=(), *, taken: float = 20, **more: Any) -> None:
        extra = {"rank": rank, "world_size": self.world, "wall_ns": 0, "reason": "exit"}
        extra |= {"events": list(events), "taken_ns": int(taken * SECOND), "pid": 100 + rank}
        extra |= {"clock": "one", "threads": {}, "peers": {}, "messages": []} | more
        members = {"0": range(self.world)} | self.groups
        config = {name: {"desc": "", "ranks": str([*of])} for name, of in members.items()}
        record = {"version": "2.10", "pg_config": config, "entries": list(calls)}
        path = self.directory / f"rank_{rank}"
        path.write_bytes(pickle.dumps(record | {"gradwire": extra}))

    def start(self, rank: int, pid: int, **launch: str) -> None:
        launch = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"} | launch
        found = {"rank": rank, "pid": pid, "started": pid, "host": "me", "namespace": ""}
        text = json.dumps(found | {"launch": launch})
        (self.directory / f"process-me-{pid}.json").write_text(text)

    def exits(self, **codes: int) -> None:
        found = {rank[1:]: {"code": code, "time": 0} for rank, code in codes.items()}
        (self.directory / "exits-0.json").write_text(json.dumps(found))

    def says(self, kind: str, ranks: tuple[int, ...], *words: str):
        """Return the first finding, which has a kind or rule unless that is "", ranks and words."""
        found = explain(self.directory).findings[0]
        assert kind in ("", found.kind, found.rule)
        assert found.ranks == ranks, found
        assert all(text in found.summary for text in words), found.summary
        return found


@pytest.fixture
def run(tmp_path):
    return lambda world: Run(tmp_path, world)


STEPS = [call(n, n) for n in range(1, 4)]
LAST = call(4, 4, done=False)


@pytest.mark.parametrize(
    ("longer", "kind", "named", "said"),
    [
        ([False, True, False], Kind.MISMATCH, (1,), "one more call"),
        ([True, False, True], Kind.FINISHED, (1,), "did not call"),
        ([False, True], Kind.MISMATCH, (), "the records do not show which number is right"),
    ],
)
def test_minority_with_another_number_of_calls_is_named(run, longer, kind, named, said):
    run = run(len(longer))
    for rank, one_more in enumerate(longer):
        if one_more:
            run.rank(rank, [*STEPS, LAST], [error(4.1 + rank / 100, waited=True)])
        else:
            run.rank(rank, STEPS, taken=3.1)
    found = run.says(kind, named, said)
    assert found.confidence == ("likely" if named else "unclear")
    assert len(found.remedies) <= 3


def test_error_of_all_ranks_names_none(run):
    """A NaN of one rank comes to all of them."""
    run = run(3)
    for rank in range(3):
        failed = error(4 + rank / 100, "FloatingPointError", "not finite", raised=True)
        run.rank(rank, STEPS, [failed])
    run.says("", ())


def test_error_in_c_of_a_rank_that_did_not_wait_is_its_own(run):
    """As an operator's in backward, in the line of an earlier collective that has ended."""
    run = run(3)
    run.rank(0, [*STEPS, LAST], [error(6, waited=True)], taken=6)
    run.rank(1, STEPS, [error(3.5, message="shape")], taken=3.6)
    run.rank(2, [*STEPS, LAST], [error(6.1, waited=True)], taken=6.2)
    run.says(Kind.ERROR, (1,))


@pytest.mark.parametrize("ended", [3.5, 4.7])  # connections are closed before an end is noted
def test_error_in_c_after_another_ranks_end_is_no_cause(run, ended):
    run = run(3)
    run.rank(0, [*STEPS, LAST], [error(4.5)], taken=5)
    run.rank(1, STEPS, taken=4.8, ended_ns=int(ended * SECOND))
    run.rank(2, [*STEPS, LAST], [error(4.6)], taken=5)
    run.says("", (1,))


def test_finished_collective_is_not_reopened_by_an_error_of_python(run):
    run = run(2)
    run.rank(0, STEPS, [error(3.5, "ValueError", raised=True)], taken=4)
    run.rank(1, [*STEPS, LAST], [error(5, waited=True)], taken=6)
    run.says(Kind.ERROR, (0,))


def test_late_rank_is_found_by_the_times_of_calls(run):
    run = run(3)
    for rank, at in ((0, 4), (1, 12), (2, 4)):
        failing = call(4, at, done=False)
        run.rank(rank, [*STEPS, failing], [error(12.1 if rank == 1 else 9, waited=True)])
    run.says(Kind.MISSING, (1,), "8.0 s after ranks 0 and 2")


@pytest.mark.parametrize("code", [3, 1])
def test_exit_with_a_code_names_line_and_text(run, code):
    run = run(2)
    run.rank(0, [*STEPS, LAST], [error(4.5, waited=True)], taken=5)
    exit_ = exit_call(33, code, "no data")
    run.rank(1, STEPS, taken=3.6, ended_ns=int(3.5 * SECOND), exit=exit_)
    run.exits(r1=code)
    found = run.says("", (1,), "called sys.exit at train.py:33", "no data")
    assert found.places == [f"{FILE}:33"]


@pytest.mark.parametrize(("address", "named"), [("127.0.0.1", (1,)), ("10.0.0.1", ())])
def test_rank_that_was_never_started(run, address, named):
    """One of another host may write to another directory."""
    run = run(3)
    for rank in (0, 2):
        run.start(rank, 10 + rank, MASTER_ADDR=address)
        run.rank(rank, (), [error(5, "DistNetworkError")])
    run.says("start", named, "never started")


@pytest.mark.parametrize(("waits", "named"), [([0.5] * 6, (1,)), ([0] * 5 + [3], ())])
def test_one_long_wait_in_a_transfer_names_no_rank(run, waits, named):
    """The process that was waited for may have got no core once."""
    run = run(2)
    for rank in (0, 1):
        calls = []
        for number, wait in enumerate(waits):
            made = call(number + 1, number, ended=number + wait + 0.1)
            calls.append(made | {"waits_ns": {1: int(wait * SECOND)} if rank == 0 else {}})
        run.rank(rank, calls)
    run.says(Kind.SLOW_TRANSFER, named)


@pytest.mark.parametrize(("missing", "named"), [(1, (2,)), (2, ())])
def test_ranks_without_dumps_count_for_the_majority(run, missing, named):
    """The ranks of another host may have made the call of the few."""
    world = 3 + missing + 1
    run = run(world)
    for rank in range(world - missing):
        run.rank(rank, [call(1, 1), call(2, 2, size=9 if rank == 2 else 4, done=False)])
    run.says(Kind.MISMATCH, named, "(another size, number 2 of group 0)" if named else "")


@pytest.mark.parametrize(
    ("world", "failed", "named"), [(3, [1], (1,)), (3, [1, 2], ()), (2, [1], ())]
)
def test_ranks_that_differ_from_rank_0_may_be_right(run, world, failed, named):
    """C++ code compares models with rank 0's, and fails on those that differ from it."""
    run = run(world)
    for rank in range(world):
        own = error(2 + rank / 100, message=f"[{rank}]: params[0] does not match", waited=True)
        lost = error(3, "PeerLostError", "a rank was lost", waited=True)
        run.rank(rank, [call(1, 1, line=5)], [own if rank in failed else lost])
    run.says("", named, "does not match")


@pytest.mark.parametrize("how", ["recv", "wait"])  # a handle's wait may be for a message
def test_rank_that_waits_for_a_message_may_be_right(run, how):
    """Rank 2 did not send it."""
    run = run(3)
    line = [{"name": "step", "filename": FILE, "line": 30}]
    run.rank(0, STEPS, [error(9, "CollectiveTimeoutError", call=how, lines=line)])
    for rank in (1, 2):
        run.rank(rank, [*STEPS, LAST], [error(9.1, waited=True, call="all_reduce")])
    found = run.says("", ())
    assert "rank 0: CollectiveTimeoutError at train.py:30 in step" in found.details[0]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_interrupt_in_own_code_is_not_a_wait(run, all_ranks):
    """Ctrl-C reaches rank 1 alone, or all ranks, of which rank 2 was computing as well."""
    run, interrupt = run(3), error(5, "KeyboardInterrupt", line=5)
    lost = error(5, "KeyboardInterrupt" if all_ranks else "PeerLostError", call="all_reduce")
    for rank in range(3):
        waits = rank == 0 or (rank == 2 and not all_ranks)
        run.rank(rank, [*STEPS, LAST] if waits else STEPS, [lost if waits else interrupt], taken=9)
    if all_ranks:
        run.says(Kind.NOTHING, ())
    else:
        found = run.says(Kind.ERROR, (1,), "was interrupted by SIGINT at train.py:5 in step")
        assert "SIGINT" in found.remedies[0]


@pytest.mark.parametrize(("after", "kind", "named"), [(5, "missing", (1,)), (0.5, "unclear", ())])
def test_rank_that_sends_after_others_have_given_up(run, after, kind, named):
    """One that comes soon after may have waited as well."""
    run = run(3)
    for rank in range(3):
        own = error(10, "CollectiveTimeoutError", call="recv", line=5)
        if rank == 1:
            own = error(10 + after, "PeerLostError", call="send", line=8)
        run.rank(rank, (), [own], taken=10.2 if rank != 1 else 10 + after)
    run.says(kind, named)


def test_data_loader_error_within_a_collective(run):
    """Gloo's errors have the same type and line."""
    run = run(3)
    for rank in range(3):
        run.rank(rank, [*STEPS, LAST], [error(9, own=rank == 1)])
    run.says(Kind.ERROR, (1,))


def test_mismatch_found_by_the_ranks(run):
    """Only the errors show the disagreement; the recorded calls look alike."""
    run = run(3)
    text = "ranks disagree on all_gather's number of elements: rank 0 has 3 for rank 1"
    for rank in range(3):
        run.rank(rank, STEPS, [error(4, "MismatchError", text, line=5)])
    found = run.says(Kind.MISMATCH, (), text)
    assert found.places == [f"{FILE}:5"]


# -- what is no first cause, and what has no first ----------------------------------------------

STACK = [{"name": "save", "filename": FILE, "line": 44, "user": True}]


def test_end_of_a_wait_is_no_first_cause(run):
    """A root of a broadcast leaves at once: its later calls do not show that it was over."""
    run = run(3)
    root = call(4, 4, line=10) | {"op": "broadcast"}
    run.rank(0, [*STEPS, root], [error(9, call="broadcast", waited=True)], taken=9.1)
    run.rank(1, [*STEPS, root, call(5, 4.1, line=20)], [error(9.1, line=20, waited=True)])
    run.rank(2, [*STEPS, root], [error(9.1, waited=True)])
    run.says("unclear", ())


@pytest.mark.parametrize(("since", "kind", "named"), [(4.9, "error", (1,)), (0.5, "unclear", ())])
def test_error_of_a_call_that_had_not_waited_is_its_own(run, since, kind, named):
    """As of an interface that does not exist, in `init_process_group`."""
    run = run(3)
    own = error(5, call="init_process_group", waited=True, since=int(since * SECOND))
    for rank in range(3):
        run.rank(rank, (), [own] if rank == 1 else (), reason="exit" if rank == 1 else "request")
    run.exits(r1=1)
    run.says(kind, named)


@pytest.mark.parametrize("calls", [STEPS, ()])
@pytest.mark.parametrize("noted", [[0], [0, 1, 2]])
def test_ends_at_the_same_time_have_no_first(run, calls, noted):
    """As by `raise SystemExit(text)`; the launcher may not have seen all codes."""
    run = run(3)
    for rank in range(3):
        run.rank(rank, calls, taken=5.1, ended_ns=int((5 + rank / 100) * SECOND))
    run.exits(**{f"r{rank}": 1 for rank in noted})
    kind, named = (Kind.DIED, () if len(noted) > 1 else (0,)) if calls else (Kind.NOTHING, ())
    run.says(kind, named)


@pytest.mark.parametrize(
    ("members", "stand", "kind", "named"),
    [  # where each rank stands: in a group's collective, in other code ("."), killed ("x"), or
        # waiting for a message of the next rank (">")
        (("01", "01"), "ab", Kind.DEADLOCK, ()),
        (("012", "012"), "aba", Kind.DEADLOCK, (1,)),
        (("0123", "0123"), "aabb", Kind.DEADLOCK, ()),
        (("0123", "0123", "0123"), "aabc", Kind.DEADLOCK, ()),
        (("01", "12", "20"), "abc", Kind.DEADLOCK, ()),  # a ring
        (("012", "23", "301"), "aabc", Kind.DEADLOCK, ()),  # a ring
        (("012", "12"), "aab", Kind.DEADLOCK, ()),  # rank 0 is in one group only
        (("0123", "012"), "aaba", Kind.DEADLOCK, (2,)),
        (("012", "13", "02"), "abc.", Kind.DEADLOCK, ()),  # ranks 0 and 2, whatever rank 3 does
        (("0123", "0123"), "aab.", Kind.DEADLOCK, ()),
        (("01234", "01234"), "aab.a", Kind.DEADLOCK, (2,)),
        (("0123", "0123"), "aabx", Kind.DIED, (3,)),
        ((), ">>", Kind.DEADLOCK, ()),
        ((), ">>>", Kind.DEADLOCK, ()),
        (("01",), "a.", Kind.MISSING, (1,)),
        (("012",), "a.a", Kind.MISSING, (1,)),
        (("012",), "..a", Kind.MISSING, ()),  # rank 2 may have left out what the others do
        (("0123",), "a..a", Kind.MISSING, ()),
    ],
)
def test_ranks_that_wait_for_each_other(run, members, stand, kind, named):
    """Of these, only a minority is named."""
    run = run(len(stand))
    run.groups = {name: [*map(int, of)] for name, of in zip("abc", members, strict=False)}
    moment = {"time": int(9.05 * SECOND), "stack": STACK, "kernel": {}}
    for rank, at in enumerate(stand):
        frames = [{"name": "step", "filename": FILE, "line": 30}]
        message = {"op": "recv", "state": "scheduled", "peer": (rank + 1) % len(stand)}
        waits = call(1, 4 + rank / 100, done=False) | {"process_group": (at, "")}
        failed = error(9 + rank / 100, "CollectiveTimeoutError", line=30 if at == ">" else 10)
        run.rank(
            rank,
            [*STEPS, waits] if at in run.groups else STEPS,
            [] if at in ".x" else [failed],
            taken=4.5 if at == "x" else 9.2,
            moments=[moment] if at == "." else [],
            messages=[message | {"frames": frames}] if at == ">" else [],
        )
    run.exits(**{f"r{rank}": -9 for rank, at in enumerate(stand) if at == "x"})
    found = run.says(kind, named)
    assert found.confidence == ("unclear" if not named else found.confidence)
    assert kind != Kind.DEADLOCK or "wait for each other" in found.summary


@pytest.mark.parametrize("holder", [100, 0])
def test_arrival_just_after_a_failure_is_caused_by_it(run, holder):
    """Rank 0 holds a lock while it waits for ranks 1 and 2, which wait for the lock."""
    run = run(3)
    late = [*STEPS, call(4, 9.001)]
    kernel = {"call": "flock", "holder": holder, "file": "/tmp/lock"} if holder else {}
    moment = {"time": int(9.05 * SECOND), "stack": STACK, "kernel": kernel}
    run.rank(0, [*STEPS, call(4, 4)], [error(9, waited=True)], taken=9.1)
    for rank in (1, 2):
        run.rank(rank, late, [error(9.01, waited=True)], moments=[moment])
    found = run.says(*((Kind.DEADLOCK, (0,)) if holder else (Kind.MISSING, ())))
    assert f"{FILE}:44" in found.places
    if holder:  # rank 2 got the lock when rank 0 had given up
        moment["kernel"] = kernel | {"holder": 102}
        run.rank(1, late, [error(9.01, waited=True)], moments=[moment])
        run.says(Kind.DEADLOCK, (0,))


def test_error_after_others_gave_up_is_no_cause(run):
    run = run(2)
    run.rank(0, [*STEPS, call(4, 4)], [error(9, waited=True)], taken=9.1)
    moment = {"time": int(9.05 * SECOND), "stack": STACK, "kernel": {}}
    run.rank(1, STEPS, [error(9.5, "KeyError", raised=True)], moments=[moment])
    run.says(Kind.MISSING, (1,), "train.py:44 in save")


def test_wait_that_ended_long_ago_was_handled(run):
    """All ranks made more calls together since."""
    run = run(2)
    more = [call(n, n + 10) for n in range(5, 8)]
    run.rank(0, [*STEPS, call(4, 4), *more], [error(9, "CollectiveTimeoutError")])
    own = error(18, "KeyError", raised=True)
    run.rank(1, [*STEPS, call(4, 9.1), *more], [own], taken=18.1)
    run.says(Kind.ERROR, (1,))


def test_ranks_that_ran_are_alive_while_another_one_imports(run, tmp_path):
    run(2).rank(0, (), reason="request", taken=5, since_ns=int(4.5 * SECOND))
    (found,) = explain(tmp_path, live=True).findings
    assert (found.kind, found.ranks) == (Kind.NOTHING, ())


# -- the page "When something goes wrong" ------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "debug.md"
BASES = {"DistributedError", "GradwireError"}  # never raised themselves


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(" `") for cell in cells[1:] for name in cell.split(",")}


def test_debug_page_lists_all_verdicts():
    kinds = {value for name, value in vars(Kind).items() if name.isupper()}
    assert first_column("Verdicts") == kinds


def test_debug_page_lists_all_errors():
    assert first_column("Errors") == set(errors.__all__) - BASES
