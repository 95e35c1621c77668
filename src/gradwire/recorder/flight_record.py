"""Dumps in the format of torch's flight recorder, which torch's analyzer `torchfrtrace` reads.

Gloo and NCCL record their own collectives. A dump takes these entries from torch and adds what
gradwire knows of them (parameters, waits), so that no collective occurs twice. Data that torch's
format lacks is under the key "gradwire" and in additional keys of entries.
"""

from __future__ import annotations

import time
from math import prod
from typing import Any

import torch
from torch.storage import _dtype_to_storage_type_map

from gradwire._processes import wait_until
from gradwire._torch import analysed_backend, torchs_flight_records
from gradwire.recorder import recording as r
from gradwire.recorder.files import loads
from gradwire.recorder.groups import GroupInfo, in_this_world, known_groups
from gradwire.recorder.lines import is_users, read_line
from gradwire.recorder.recording import Entry, Shapes, ring

VERSION = "2.10"  # version of torch's format
Record = dict[str, Any]

_NAMES = {  # names that all versions of the analyzer accept
    "all_gather_single": "_all_gather_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "reduce_scatter_single": "_reduce_scatter_base",
}


def await_gloos_ends(timeout: float = 0.2) -> None:
    """Wait up to `timeout` seconds until Gloo has recorded the ends of completed collectives."""

    # Gloo's threads record an end after `wait()` has returned, up to 10 ms later on busy cores.
    # Without this wait, a rank that just left a collective would appear to be in it. Collectives
    # without an end after the timeout count as running.
    def all_ended() -> bool:
        return all(
            entry["retired"] or not entry["profiling_name"].startswith("gloo:")
            for data in torchs_flight_records(stacks=False)
            for entry in loads(data).get("entries", ())
        )

    wait_until(all_ended, timeout, pause=0.005)


def flight_record() -> Record:
    """Return the records of this process as plain containers and scalars."""
    groups = known_groups()
    # offset to the wall clock, which torch's entries use
    wall = time.time_ns() - time.perf_counter_ns()
    own, messages = _own_entries(groups, wall)
    on_shm = {entry["process_group"][0] for entry in own}
    theirs = _torchs_entries(groups, on_shm)
    references = {info.reference: info.name for info in groups.values()}
    _add_buckets([*own, *theirs], references, wall)
    # ends of collectives that gradwire has waited for
    ends = {(references.get(ref), number): at + wall for ref, number, at in list(ring.ends)}
    for entry in theirs:
        at = ends.get((entry["process_group"][0], entry["collective_seq_id"]))
        entry["time_discovered_completed_ns"] = at or entry.get("time_discovered_completed_ns")
    entries = sorted([*own, *theirs], key=lambda entry: entry["time_created_ns"])
    dropped = min((int(entry["record_id"]) for entry in theirs), default=0)  # by torch's ring
    first = ring.recorded - len(own) + dropped
    for number, entry in enumerate(entries, first):
        entry["record_id"] = number
    return {
        "version": VERSION,
        "pg_config": {
            name: {"name": name, "desc": info.desc, "ranks": str(info.ranks)}
            for name, info in groups.items()
        },
        "pg_status": {},
        "comm_lib_version": "",
        "entries": entries,
        "gradwire": {"wall_ns": wall, "messages": messages},
    }


def _own_entries(groups: dict[str, GroupInfo], wall: int) -> tuple[list[Record], list[Record]]:
    """Return the collectives and messages on shm."""
    collectives, messages = [], []
    recorded = list(ring.entries)
    latest: dict[str, object] = {}  # names are reused for new groups
    for entry in recorded:
        info = entry[r.GROUP].find_name()
        if info is not None:
            latest[info.name] = entry[r.GROUP]
    for entry in recorded:
        info = entry[r.GROUP].find_name()
        if info is None or latest[info.name] is not entry[r.GROUP] or not in_this_world(info):
            continue
        groups.setdefault(info.name, info)
        made = _entry(entry, info, wall)
        if (peer := entry[r.PEER]) is None:
            collectives.append(made)
        else:
            messages.append(made | {"peer": info.ranks[peer] if peer >= 0 else -1})
    return collectives, messages


def _entry(entry: Entry, info: GroupInfo, wall: int) -> Record:
    op = _NAMES.get(entry[r.OP], entry[r.OP])
    inputs, outputs = _sizes(entry[r.INPUTS]), _sizes(entry[r.OUTPUTS])
    if op == "all_gather":
        uneven = len({prod(size) for size in outputs}) > 1
        # the analyzer requires equal sizes in an all_gather, not in an all_to_all
        op, outputs = ("all_to_all", outputs) if uneven else (op, _as_one(outputs))
        inputs = inputs * len(entry[r.OUTPUTS]) if uneven else inputs
    if op == "reduce_scatter":
        inputs = _as_one(inputs)
    done = entry[r.ENDED] and entry[r.ERROR] is None
    names, dtype = _dtype_to_storage_type_map(), entry[r.DTYPE]
    dtypes = [names.get(dtype, str(dtype)).removesuffix("Storage")] if dtype else []
    made: Record = {
        "record_id": 0,
        "pg_id": 0,
        "process_group": (info.name, info.desc),
        "collective_seq_id": entry[r.NUMBER],
        "p2p_seq_id": 0,
        "op_id": entry[r.NUMBER],
        "profiling_name": f"{analysed_backend()}:{op}",  # the analyzer does not know shm
        "backend": "shm",
        "op": entry[r.OP],
        "time_created_ns": entry[r.CREATED] + wall,
        "time_discovered_started_ns": entry[r.STARTED] + wall if entry[r.STARTED] else None,
        "time_discovered_completed_ns": entry[r.ENDED] + wall if entry[r.ENDED] else None,
        "state": "completed" if done else "started" if entry[r.STARTED] else "scheduled",
        "input_sizes": inputs,
        "input_dtypes": dtypes * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": dtypes * len(outputs),
        "retired": bool(done),
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [read_line((entry[r.CODE], entry[r.INSTRUCTION]))],
        "waits_ns": {info.ranks[peer]: waited for peer, waited in (entry[r.WAITS] or {}).items()},
    }
    if entry[r.ERROR] is not None:
        made["error"] = entry[r.ERROR]
    return made


def _as_one(sizes: list[list[int]]) -> list[list[int]]:
    """Return the size of the concatenated tensors."""
    return [[sum(map(prod, sizes))]]


def _sizes(shapes: Shapes) -> list[list[int]]:
    return [list(shapes)] if isinstance(shapes, torch.Size) else [list(s) for s in shapes]


def _torchs_entries(groups: dict[str, GroupInfo], on_shm: set[str]) -> list[Record]:
    """Return the entries of Gloo and NCCL for known groups, given by name."""
    found: dict[str, list[Record]] = {name: [] for name in groups}
    for data in torchs_flight_records():
        for entry in loads(data).get("entries", ()):
            name, is_gloos = entry["process_group"][0], entry["profiling_name"].startswith("gloo:")
            of_group = found.get(name)
            # shm replaces Gloo in the groups `on_shm`: Gloo's entries for these names belong to an
            # earlier job
            if of_group is None or (is_gloos and name in on_shm):
                continue
            number = entry["collective_seq_id"]
            if of_group and of_group[-1]["collective_seq_id"] > number:  # an earlier group's
                of_group.clear()
            backend, _, op = entry["profiling_name"].partition(":")
            if is_gloos:  # the analyzer of 2.11 rejects Gloo's entries
                profiled = f"{analysed_backend()}:{_NAMES.get(op, op)}"
                entry |= {"profiling_name": profiled, "backend": backend, "op": op}
            # the user's own code before packages
            frames = entry.get("frames", ())
            entry["frames"] = sorted(frames, key=lambda frame: not is_users(frame["filename"]))
            of_group.append(entry)
    return [
        entry
        for name, of_group in found.items()
        for entry in _of_this_job(of_group, groups[name].count())
    ]


def _of_this_job(entries: list[Record], count: int | None) -> list[Record]:
    """Return the last `count` entries, which belong to the current group of this name."""
    if count is None:
        return entries
    # torch keeps the entries of earlier groups of the same name, whose numbers also began at 1
    found: list[Record] = []
    for entry in reversed(entries):
        number = entry["collective_seq_id"]
        if not entry.get("is_p2p") and not number <= count:
            break
        if found and not entry.get("is_p2p") and number >= found[-1]["collective_seq_id"] > 0:
            break
        found.append(entry)
    return found[::-1]


def _add_buckets(entries: list[Record], references: dict[Any, str], wall: int) -> None:
    """Set the parameters of the collectives that carried buckets."""
    by_number = {(e["process_group"][0], e["collective_seq_id"]): e for e in entries}
    for bucket in list(ring.buckets):
        for number in range(bucket.first, bucket.last + 1):
            entry = by_number.get((references.get(bucket.group, ""), number))
            if entry is not None:
                entry["parameters"], entry["step"] = list(bucket.names), bucket.step
                if entry.get("backend") != "shm" and bucket.done:
                    entry["time_discovered_completed_ns"] = bucket.done + wall
