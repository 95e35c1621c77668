"""The error protocol as a model, checked through every order in which things can happen.

A model rank runs steps: forward, some messages, the result. Exceptions may come anywhere (before
any message, between two, after the last, while resynchronizing), ranks may die anywhere. What they
decide, they decide by the functions that the runtime calls; what they send is an entry in a list.
A breadth-first search visits every reachable state and holds each against what must never be.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

import pytest

from gradwire.ddp.faults import protocol as rules
from gradwire.ddp.faults.protocol import (
    TRANSITIONS,
    BackwardState,
    Event,
    Phase,
    after,
    missing,
    next_phase,
)

S, E = BackwardState, Event


@dataclass(frozen=True)
class Rank:
    step: int = 0
    state: BackwardState = S.LOCAL
    key: int = 0  # what the ranks know the running backward by
    index: int = 0  # messages of this step that were sent
    end: int = 0
    own: str | None = None  # the error that it stated in the running round
    phase: Phase | None = None
    waiting: bool = False  # an error of another rank's, to be raised
    round: int = 0
    positions: tuple[int, ...] = ()
    fate: str = ""  # "", "dead", "broken", "left"
    # "took", "raised" its own exception, "heard" of another's, "undecided", "diverged"
    results: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    sent: tuple[tuple[object, ...], ...]  # by rank: labels of messages, None for zeros
    reported: frozenset[int] = frozenset()
    statements: frozenset[tuple[int, int, str | None, int, int | None]] = frozenset()
    joined: frozenset[tuple[int, int]] = frozenset()
    lost: bool = False
    faults: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class Model:
    steps: int
    messages: int
    by_step: bool = True  # backwards are known by the program's steps, not by round and position
    may_finish: object = staticmethod(rules.may_finish)
    diverged: object = staticmethod(rules.diverged)
    all_took_part: object = staticmethod(rules.all_took_part)

    def start(self, size: int, faults: int, deaths: int) -> World:
        return World((Rank(),) * size, ((),) * size, faults=faults, deaths=deaths)

    # -- what can happen next --------------------------------------------------------------

    def following(self, w: World):
        for r, rank in enumerate(w.ranks):
            if not rank.fate:
                yield from self._of(w, r, rank)
                if w.deaths:
                    yield put(replace(w, deaths=w.deaths - 1), r, replace(rank, fate="dead"))

    def _of(self, w, r, rank):
        if w.lost and (rank.phase or rank.state in (S.COMMITTING, S.RUNNING)):
            yield put(w, r, self._break(rank))
        if rank.phase is not None:
            yield from self._resynchronize(w, r, rank)
        elif rank.state in (S.RUNNING, S.COMMITTING):
            yield from self._backward(w, r, rank)
        else:
            yield from self._forward(w, r, rank)

    def _forward(self, w, r, rank):
        if rank.step == self.steps:
            yield put(w, r, replace(rank, fate="left"))
        elif rank.state in (S.INTERRUPTED, S.UNDECIDED) and rank.waiting:
            yield put(w, r, self._level(rank, []))
        elif rank.state in (S.INTERRUPTED, S.UNDECIDED):
            yield self._state(w, r, replace(rank, own="interrupted"))
        elif rank.waiting:
            yield put(w, r, self._raised(rank))
        else:
            begun = after(after(rank.state, E.PREPARE), E.BEGIN)
            key = rank.step if self.by_step else 100 * rank.round + len(w.sent[r])
            yield put(w, r, replace(rank, state=begun, index=0, key=key))

    def _backward(self, w, r, rank):
        if rank.state is S.RUNNING:
            last = rank.index + 1 == self.messages
            sent = tuple_set(w.sent, r, (*w.sent[r], (rank.key, rank.index)))
            moved = replace(rank, index=rank.index + 1)
            if last:
                moved = replace(moved, state=after(rank.state, E.SEND_LAST), end=len(sent[r]))
            yield put(replace(w, sent=sent), r, moved)
        elif self._ended(w, r):
            done = after(rank.state, E.COMMIT)
            results = (*rank.results, (rank.key, "took"))
            yield put(w, r, replace(rank, state=done, step=rank.step + 1, results=results))
        elif self._engine_fails(w, r):
            yield put(replace(w, lost=True), r, self._break(rank))
        if w.faults:
            yield put(replace(w, faults=w.faults - 1), r, self._interrupted(rank))
        if rank.round in w.reported and rank.index and not rank.waiting:
            yield self._state(w, r, rank)

    def _state(self, w, r, rank):
        """States where it is, and reports where it has an error of its own."""
        position = len(w.sent[r])
        undecided = rank.end if rank.state is S.UNDECIDED else None
        statements = w.statements | {(rank.round, r, rank.own, position, undecided)}
        reported = w.reported | {rank.round} if rank.own else w.reported
        w = replace(w, statements=statements, reported=reported)
        return put(w, r, replace(rank, phase=Phase.STATED))

    def _resynchronize(self, w, r, rank):
        stated = {who: said for n, who, *said in w.statements if n == rank.round}
        joined = {who for n, who in w.joined if n == rank.round}
        everyone = range(len(w.ranks))
        phase = next_phase(
            rank.phase,
            stated=len(stated) == len(w.ranks),
            ended=rank.phase is Phase.JOINING and self._ended(w, r),
            joined=len(joined) == len(w.ranks),
        )
        if phase is Phase.JOINING and rank.phase is Phase.STATED:
            positions = tuple(stated[who][1] for who in everyone)
            told = [(at, list(enumerate(("m",) * at, 1))) for at in positions]
            zeros = (None,) * len(missing(positions[r], told))
            after_zeros = replace(w, sent=tuple_set(w.sent, r, (*w.sent[r], *zeros)))
            yield put(after_zeros, r, replace(rank, phase=phase, positions=positions))
        elif phase is Phase.JOINED and rank.phase is Phase.JOINING:
            said = replace(w, joined=w.joined | {(rank.round, r)})
            yield put(said, r, replace(rank, phase=phase))
        elif phase is Phase.DONE:
            ends = [stated[who][2] for who in everyone]
            diverged = self.diverged(ends, rank.positions)
            level = replace(rank, phase=None, round=rank.round + 1)
            yield put(w, r, self._level(level, diverged))
        elif self._deaf(w, r, rank, stated, joined):
            yield put(replace(w, lost=True), r, self._break(rank))
        if w.faults and rank.state in (S.RUNNING, S.COMMITTING):
            yield put(replace(w, faults=w.faults - 1), r, self._interrupted(rank))

    def _deaf(self, w, r, rank, stated, joined):
        """It waits for a rank that will not answer: the backend or the deadline says so."""
        if rank.phase is Phase.JOINING:
            return self._engine_fails(w, r)
        there = stated if rank.phase is Phase.STATED else joined
        return any(other.fate and who not in there for who, other in enumerate(w.ranks))

    def _level(self, rank, diverged):
        """All ranks are level, as in `FaultDomain.poll` and `FaultDomain.report_interrupted`."""
        rank = replace(rank, own=None)
        if rank.state in (S.INTERRUPTED, S.UNDECIDED):
            untold = not diverged and rank.state is S.UNDECIDED
            if untold and self.all_took_part(rank.end, rank.positions):
                return replace(rank, waiting=False)  # it tells of this in a round of its own
            rank = replace(rank, state=after(rank.state, E.RESET), waiting=False)
            if not diverged:
                return rank
            return self._raised(self._diverged(rank))
        if self.may_finish(rank.state, rank.end, rank.positions):
            return replace(rank, waiting=True)
        return self._raised(replace(rank, state=after(rank.state, E.RESET)))

    def _diverged(self, rank):
        named = {"undecided": "diverged"}
        results = tuple((key, named.get(r, r)) for key, r in rank.results)
        return replace(rank, results=results)

    def _raised(self, rank):
        key = rank.step if self.by_step else -1
        results = (*rank.results, (key, "heard"))
        return replace(rank, step=rank.step + 1, waiting=False, results=results)

    def _interrupted(self, rank):
        state = after(rank.state, E.INTERRUPT)
        result = "undecided" if state is S.UNDECIDED else "raised"
        results = (*rank.results, (rank.key, result))
        return replace(rank, state=state, step=rank.step + 1, results=results)

    def _break(self, rank):
        return replace(rank, fate="broken")

    def _ended(self, w, r):
        return all(len(sent) >= len(w.sent[r]) for sent in w.sent)

    def _engine_fails(self, w, r):
        """A message that it waits in will never be joined: the backend tells, or times out."""
        return any(
            rank.fate and len(sent) < len(w.sent[r])
            for rank, sent in zip(w.ranks, w.sent, strict=True)
        )

    # -- what must never be ----------------------------------------------------------------

    def problem(self, w: World) -> str | None:
        for labels in itertools.zip_longest(*w.sent):
            if len({label for label in labels if label is not None}) > 1:
                return f"messages of different kinds met: {labels}"
        for key, results in self._results(w).items():
            if "took" in results.values():
                if {"raised", "heard"} & set(results.values()):
                    return f"backward {key}: {results}"
                own = {(key, i) for i in range(self.messages)}
                if not all(own <= set(sent) for sent in w.sent):
                    return f"backward {key} was taken without the data of all ranks"
        return None

    def stuck(self, w: World) -> str | None:
        """Of a state that nothing follows: whether a rank waits there, or divergence was silent."""
        waiting = [r for r, rank in enumerate(w.ranks) if not rank.fate]
        if waiting:
            return f"ranks {waiting} wait for good"
        for key, results in self._results(w).items():
            if not {"undecided", "diverged"} & set(results.values()):
                continue
            for r, result in results.items():
                if result != "raised" and "took" in results.values():
                    own = w.ranks[r].results
                    later = [name for _, name in own[own.index((key, result)) + 1 :]]
                    if "took" in later and "heard" not in later[: later.index("took")]:
                        return f"backward {key}: {results}, and rank {r} was not told"
        return None

    def _results(self, w: World) -> dict[int, dict[int, str]]:
        """By backward and rank."""
        found: dict[int, dict[int, str]] = {}
        for r, rank in enumerate(w.ranks):
            for key, result in rank.results:
                if key >= 0:
                    found.setdefault(key, {})[r] = result
        return found


def put(w: World, r: int, rank: Rank) -> World:
    return replace(w, ranks=tuple_set(w.ranks, r, rank))


def tuple_set(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def search(model: Model, size: int, faults: int, deaths: int) -> tuple[int, str | None]:
    """How many states there are, and the first problem with the states that lead to it."""
    first = model.start(size, faults, deaths)
    before: dict[World, World | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        following = list(model.following(world))
        wrong = model.problem(world) or (None if following else model.stuck(world))
        if wrong:
            path = [world]
            while (earlier := before[path[-1]]) is not None:
                path.append(earlier)
            lines = [str([(r.step, r.state.name, r.phase) for r in p.ranks]) for p in path[::-1]]
            return len(before), "\n".join([wrong, *lines, str(world)])
        for other in following:
            if other not in before:
                before[other] = world
                queue.append(other)
    return len(before), None


QUICK = [
    # ranks, steps, messages a step, exceptions, deaths
    (2, 3, 2, 1, 1),
    (2, 3, 2, 2, 1),
    (2, 4, 1, 3, 0),
    (3, 2, 2, 1, 0),
    (3, 2, 1, 1, 1),
]
WIDE = [(2, 4, 2, 2, 1), (3, 2, 2, 1, 1), (3, 2, 1, 2, 0)]


@pytest.mark.parametrize(
    "bounds", [*QUICK, *(pytest.param(b, marks=pytest.mark.wide) for b in WIDE)]
)
def test_all_event_orders_end_with_equal_ranks(bounds):
    size, steps, messages, faults, deaths = bounds
    # several exceptions on one rank may cost it more of its program's steps than another rank
    model = Model(steps, messages, by_step=faults < 2)
    states, problem = search(model, size, faults, deaths)
    print(f"{size} ranks, {steps} steps of {messages}, {faults} faults, {deaths} deaths: {states}")
    assert problem is None, problem


def test_the_search_finds_protocol_errors():
    """Rules that are almost right."""
    always = Model(2, 2, may_finish=lambda state, end, positions: state is S.COMMITTING)
    assert "{0: 'took', 1: 'raised'}" in (search(always, 2, 1, 0)[1] or "")
    silent = Model(
        3, 1, diverged=lambda ends, positions: [], all_took_part=lambda end, positions: False
    )
    assert "undecided" in (search(silent, 2, 1, 0)[1] or "")


def test_all_states_are_reachable_and_can_be_left():
    """Of the runtime's table: no state is a trap, and each can be reached."""
    reached = {S.LOCAL}
    for _ in TRANSITIONS:
        reached |= {to for state in reached for to in TRANSITIONS[state].values()}
    assert reached == set(S)
    for state in S:
        assert E.RESET in TRANSITIONS[state]
        assert E.PREPARE in TRANSITIONS[after(state, E.RESET)]
