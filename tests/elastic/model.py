"""Every order of events of a few members that go by `gradwire.elastic.protocol`.

A model of what the runtime does with effects: a store, groups whose operations need all members,
and members that may die between any two effects, be taken for dead, or come later. Run as a script
it searches the larger worlds and prints their numbers.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire.elastic import protocol as p
from gradwire.elastic.shards import deal

SHARDS = 4
Transition = Callable[[p.Member, p.Event], tuple[p.Member, tuple[p.Effect, ...]]]
History = tuple[tuple[int, int], ...]  # step, and the generation whose sum was applied


class Violated(AssertionError):
    """A state that must never be reached."""


class Proc(NamedTuple):
    member: p.Member
    queue: tuple[p.Effect, ...] = ()
    entered: int = 0  # operations of this generation's group that it has entered
    waiting: bool = False  # in the last one of them
    history: History = ()
    held: int = -1  # the generation whose sum it holds; -1: none
    results: History | None = None  # state from which it computed the shards whose results it holds
    alive: bool = True
    finished: bool = False


class Entry(NamedTuple):
    """A member in an operation of a group."""

    member: int
    kind: str
    step: int
    history: History
    leave: bool
    stop: bool = False


class World(NamedTuple):
    procs: tuple[Proc, ...]
    arrived: tuple[tuple[int, frozenset[p.Arrival]], ...] = ()
    decisions: tuple[p.Decision, ...] = ()
    groups: tuple[tuple[int, tuple[frozenset[Entry], ...]], ...] = ()
    left: frozenset[tuple[int, int]] = frozenset()
    crashes: int = 0
    suspicions: int = 0
    suspected: frozenset[int] = frozenset()
    sources: tuple[int, ...] = (0,)  # of all decisions, by generation
    first: int = 0  # the generation in which a member was done first


@dataclass
class Model:
    """Configuration: members that start together, members that come later, and faults."""

    members: int
    joiners: int = 0
    crashes: int = 0
    suspicions: int = 0
    steps: int = 2
    stops: tuple[tuple[int, int], ...] = ()
    """Members that ask to stop, and the step in which they begin to."""
    transition: Transition = p.transition
    decided_by: Callable[[World, p.Decision], p.Decision | None] = field(
        default=lambda world, decision: None
    )

    def start(self) -> World:
        numbers = range(1, self.members + self.joiners + 1)
        procs = tuple(Proc(p.Member(number, self.steps)) for number in numbers)
        return World(procs, crashes=self.crashes, suspicions=self.suspicions)

    # -- what can happen next --------------------------------------------------------------

    def following(self, world: World) -> Iterator[tuple[bool, World]]:
        """Worlds that may follow, and whether by a fault."""
        for number in world.suspected:  # it shows signs of life again
            yield False, world._replace(suspected=world.suspected - {number})
        for index, proc in enumerate(world.procs):
            if not proc.alive or _is_done(proc):
                continue
            if world.crashes:
                dead = proc._replace(alive=False, queue=(), waiting=False)
                yield True, put(world._replace(crashes=world.crashes - 1), index, dead)
            if world.suspicions and proc.member.number not in world.suspected:
                suspected = world.suspected | {proc.member.number}
                yield (
                    True,
                    world._replace(suspicions=world.suspicions - 1, suspected=suspected),
                )
            if proc.queue:
                yield False, self._execute(world, index)
            else:
                for after in self._events(world, index):
                    yield False, after

    def _events(self, world: World, index: int) -> Iterator[World]:
        proc = world.procs[index]
        phase = proc.member.phase
        if phase is p.Phase.NEW:
            generation = world.decisions[-1].generation if world.decisions else 0
            yield self._handle(world, index, p.Start(generation))
        elif phase is p.Phase.ARRIVED:
            yield from self._rendezvous(world, index)
        elif proc.waiting:
            yield from self._operation(world, index)

    def _rendezvous(self, world: World, index: int) -> Iterator[World]:
        member = world.procs[index].member
        for decision in world.decisions:
            if decision.generation == member.rendezvous:
                yield self._handle(world, index, p.Decided(decision))
                return
        seen = self._seen(world, member.rendezvous, member.number)
        if p.is_over(seen):
            yield self._handle(world, index, p.Over())
        elif p.may_close(seen):
            yield self._handle(world, index, seen)

    def _seen(self, world: World, number: int, me: int) -> p.Seen:
        dead = {q.member.number for q in world.procs if not q.alive or _is_done(q)}
        arrived = dict(world.arrived).get(number, frozenset())
        previous = next((d for d in world.decisions if d.generation == number - 1), None)
        expected = {q.member.number for q in world.procs[: self.members] if q.alive}
        enough = expected <= {r.member for r in arrived}
        gone = frozenset((dead | world.suspected) - {me})
        ordered = tuple(sorted(arrived, key=lambda r: r.member))
        finished = any(q.finished for q in world.procs)
        return p.Seen(previous, ordered, gone, frozenset(dead), enough, finished)

    def _operation(self, world: World, index: int) -> Iterator[World]:
        """Yield the possible outcomes of the current operation of a member."""
        proc = world.procs[index]
        decision = proc.member.decision
        assert decision is not None
        entries = dict(world.groups)[decision.generation][proc.entered - 1]
        if {e.member for e in entries} == set(decision.members):
            self._check_operation(decision, entries)
            yield self._passed(world, index, decision, entries)
        others = set(decision.members) - {proc.member.number}
        over = p.Phase.OVER
        dead = {q.member.number for q in world.procs if not q.alive or q.member.phase is over}
        away = {m for generation, m in world.left if generation == decision.generation}
        # alone, nobody's leaving tells a member that others have gone on without it
        outdated = not others and len(world.sources) > decision.generation + 1
        if outdated or others & (dead | away | world.suspected):
            lost = put(world, index, proc._replace(waiting=False))
            yield self._handle(lost, index, p.Lost())

    def _passed(
        self, world: World, index: int, decision: p.Decision, entries: frozenset[Entry]
    ) -> World:
        proc = world.procs[index]._replace(waiting=False)
        kind = next(iter(entries)).kind
        if kind == "transfer":
            history = next(e.history for e in entries if e.member == decision.members[0])
            if proc.member.number not in decision.holders:
                proc = proc._replace(history=history, results=None)
            return self._handle(put(world, index, proc), index, p.Transferred())
        if kind == "form":
            return self._handle(put(world, index, proc), index, p.Formed())
        if kind == "reduce":
            proc = proc._replace(held=decision.generation)
            stop = any(e.stop for e in entries)
            return self._handle(put(world, index, proc), index, p.Reduced(stop))
        leave = any(e.leave for e in entries)
        return self._handle(put(world, index, proc), index, p.Passed(leave))

    def _handle(self, world: World, index: int, event: p.Event) -> World:
        proc = world.procs[index]
        member, effects = self.transition(proc.member, event)
        proc = proc._replace(member=member)
        if not member.complete and not (effects and isinstance(effects[0], p.Commit)):
            proc = proc._replace(held=-1)
        world = put(world, index, proc._replace(queue=effects))
        # nobody else sees a commit: it is one with the event before it
        while world.procs[index].queue and isinstance(world.procs[index].queue[0], p.Commit):
            world = self._execute(world, index)
        return world

    # -- effects ---------------------------------------------------------------------------

    def _execute(self, world: World, index: int) -> World:
        proc = world.procs[index]
        effect, proc = proc.queue[0], proc._replace(queue=proc.queue[1:])
        number = proc.member.number
        match effect:
            case p.Arrive(rendezvous, arrival):
                arrived = dict(world.arrived)
                arrived[rendezvous] = arrived.get(rendezvous, frozenset()) | {arrival}
                world = world._replace(
                    arrived=tuple(sorted(arrived.items())),
                    suspected=world.suspected - {number},
                )
            case p.Propose(decision):
                if mine := self.decided_by(world, decision):
                    return self._handle(put(world, index, proc), index, p.Decided(mine))
                world = self._propose(world, decision)
            case p.Leave(generation):
                world = world._replace(left=world.left | {(generation, number)})
            case p.Commit(step):
                proc = self._commit(world, proc, step)
            case p.Finish():
                return self._finish(world, index, proc)
            case p.Form():
                proc = proc._replace(entered=0)
                world, proc = _enter(world, proc, "form", 0)
            case p.Transfer():
                world, proc = _enter(world, proc, "transfer", 0)
            case p.Reduce(step):
                stop = any(number == n and step >= since for n, since in self.stops)
                proc = self._use_results(proc, step)
                world, proc = _enter(world, proc, "reduce", step, stop=stop)
            case p.Barrier():
                world, proc = _enter(world, proc, "barrier", proc.member.committed)
        return put(world, index, proc)

    def _finish(self, world: World, index: int, proc: Proc) -> World:
        number, decision = proc.member.number, proc.member.decision
        assert decision is not None
        _require(len(proc.history) == proc.member.steps, f"{number} is done without all steps")
        least = min((since + 1 for _, since in self.stops), default=self.steps)
        everybody = len(self.stops) >= self.members + self.joiners
        most = least if everybody else self.steps
        _require(least <= len(proc.history) <= most, f"{number} stopped too early or late")
        first = world.first or decision.generation
        if not p.same_lineage(decision.generation, first, world.sources.__getitem__):
            return self._handle(put(world, index, proc), index, p.Over())
        others = {q.history for q in world.procs if q.finished}
        _require(others <= {proc.history}, f"{number} is done with another result")
        return put(world._replace(first=first), index, proc._replace(finished=True))

    def _propose(self, world: World, decision: p.Decision) -> World:
        if any(d.generation == decision.generation for d in world.decisions):
            return world
        holders = [q for q in world.procs if q.member.number in decision.holders]
        ahead = [q.member.number for q in holders if q.member.committed > decision.committed]
        _require(not ahead, f"{decision}: {ahead} have committed more")
        decisions, sources = (*world.decisions, decision), (*world.sources, decision.source)
        return world._replace(decisions=decisions, sources=sources)

    def _commit(self, world: World, proc: Proc, step: int) -> Proc:
        _require(proc.held >= 0, f"{proc.member.number} commits {step} without gradients")
        _require(len(proc.history) == step, f"{proc.member.number} commits {step} out of order")
        mine = proc.member.decision
        for decision in world.decisions:
            # a decision on members of this generation binds all of its members
            if (
                mine
                and decision.generation == mine.generation + 1
                and set(decision.holders) & set(mine.members)
            ):
                _require(
                    decision.committed > step,
                    f"{proc.member.number} commits {step} outside of {decision}",
                )
        return proc._replace(history=(*proc.history, (step, proc.held)), held=-1, results=None)

    def _use_results(self, proc: Proc, step: int) -> Proc:
        """Use held results of local steps, as a repeated step does, and hold all its results.

        A member that lost the step before may hold fewer: each result is checked alike.
        """
        if proc.results is not None and len(proc.results) == step:
            _require(proc.results == proc.history, f"{proc.member.number} has results of elsewhere")
        return proc._replace(results=proc.history)

    def _check_operation(self, decision: p.Decision, entries: frozenset[Entry]) -> None:
        what = {(e.kind, e.step) for e in entries}
        _require(len(what) == 1, f"members of {decision} are in different operations: {what}")
        kind, step = next(iter(what))
        holding = {e.history for e in entries if e.member in decision.holders}
        if kind in ("form", "transfer"):
            _require(len(holding) == 1, f"holders of {decision} differ: {holding}")
        else:
            _require(len({e.history for e in entries}) == 1, f"states differ in {decision}")
        if kind == "reduce":
            _require(all(len(e.history) == step for e in entries), "a step that is not the next")
            runs = deal(SHARDS, len(decision.members))
            counted = [s for m in decision.members for s in runs[decision.members.index(m)]]
            _require(sorted(counted) == list(range(SHARDS)), f"shards counted: {counted}")

    # -- ends ------------------------------------------------------------------------------

    def is_end(self, world: World) -> bool:
        """Return True if every live member is done, or came after the others were."""
        live = [q for q in world.procs if q.alive]
        return all(_is_done(q) for q in live)


def _is_done(proc: Proc) -> bool:
    return proc.finished or proc.member.phase is p.Phase.OVER


def _enter(
    world: World, proc: Proc, kind: str, step: int, *, stop: bool = False
) -> tuple[World, Proc]:
    decision = proc.member.decision
    assert decision is not None
    arrived = dict(world.arrived)
    wanted = any(
        not any(q.member.number == r.member and not q.alive for q in world.procs)
        for r in arrived.get(decision.generation + 1, frozenset())
    )
    entry = Entry(proc.member.number, kind, step, proc.history, kind == "barrier" and wanted, stop)
    groups = dict(world.groups)
    operations = list(groups.get(decision.generation, ()))
    if proc.entered == len(operations):
        operations.append(frozenset())
    operations[proc.entered] |= {entry}
    groups[decision.generation] = tuple(operations)
    world = world._replace(groups=tuple(sorted(groups.items())))
    return world, proc._replace(entered=proc.entered + 1, waiting=True)


def put(world: World, index: int, proc: Proc) -> World:
    """Return the world with another state of a member."""
    procs = (*world.procs[:index], proc, *world.procs[index + 1 :])
    return _forget(world._replace(procs=procs))


def _forget(world: World) -> World:
    """Drop what no live member can read any more: fewer worlds differ."""
    live = [q for q in world.procs if q.alive and not q.finished]
    new = any(q.member.phase is p.Phase.NEW for q in live)
    oldest = min(
        (q.member.rendezvous for q in live if q.member.phase is not p.Phase.NEW), default=0
    )
    if world.decisions and (new or not live):
        oldest = min(oldest or world.decisions[-1].generation, world.decisions[-1].generation)
    groups = []
    for generation, operations in world.groups:
        inside = [
            q for q in live if q.member.decision and q.member.decision.generation == generation
        ]
        least = min((q.entered for q in inside if q.member.phase != p.Phase.ARRIVED), default=-1)
        if generation >= oldest and least >= 0:
            cut = tuple(
                frozenset() if i < least - 1 else entries for i, entries in enumerate(operations)
            )
            groups.append((generation, cut))
        elif generation >= oldest and any(
            q.member.rendezvous == generation and q.member.phase is p.Phase.ARRIVED for q in live
        ):
            groups.append((generation, operations))
    return world._replace(
        arrived=tuple(r for r in world.arrived if r[0] >= oldest),
        decisions=tuple(d for d in world.decisions if d.generation >= oldest - 1),
        groups=tuple(groups),
        left=frozenset(x for x in world.left if x[0] >= oldest),
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violated(what)


class Result(NamedTuple):
    worlds: int
    ends: int
    seconds: float


def search(model: Model, limit: int = sys.maxsize) -> Result:
    """Visit every reachable world.

    Raises:
        Violated: One breaks an invariant, or no end can be reached from it without more faults.
    """
    began = time.monotonic()
    start = model.start()
    numbers = {hash(start): 0}  # 64 bits: whole worlds would take 3 KB each
    queue, ends = deque([start]), []
    sources, targets = array("i"), array("i")
    while queue:
        world = queue.popleft()
        number = numbers[hash(world)]
        if model.is_end(world):
            ends.append(number)
        for fault, after in model.following(world):
            known = numbers.get(key := hash(after))
            if known is None:
                known = numbers[key] = len(numbers)
                queue.append(after)
                if known >= limit:
                    raise RuntimeError(f"more than {limit} worlds")
            if not fault:
                sources.append(number)
                targets.append(known)
    _check_all_can_end(len(numbers), sources, targets, ends)
    return Result(len(numbers), len(ends), time.monotonic() - began)


def _check_all_can_end(
    count: int, sources: array[int], targets: array[int], ends: list[int]
) -> None:
    """From every world an end is reached, though nothing else fails."""
    heads = array("i", itertools.repeat(-1, count))
    nexts = array("i", itertools.repeat(-1, len(targets)))
    for edge, target in enumerate(targets):
        nexts[edge], heads[target] = heads[target], edge
    reached = bytearray(count)
    stack = list(ends)
    for end in ends:
        reached[end] = 1
    while stack:
        edge = heads[stack.pop()]
        while edge >= 0:
            source = sources[edge]
            if not reached[source]:
                reached[source] = 1
                stack.append(source)
            edge = nexts[edge]
    stuck = count - sum(reached)
    _require(not stuck, f"no end can be reached from {stuck} of {count} worlds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("members", 2), ("joiners", 0), ("crashes", 1), ("suspicions", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=2)
    model = Model(**vars(parser.parse_args()))
    print(model, search(model), flush=True)


if __name__ == "__main__":
    main()
