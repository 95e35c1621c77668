"""Teams of ranks, and the division of tensors for them: pure functions of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.shm import across_hosts
from gradwire.shm.across_hosts import Cut, pipelined
from gradwire.shm.rendezvous import Teams, find_teams

HOSTS = st.lists(st.integers(0, 4), min_size=1, max_size=12)  # each rank's


@given(HOSTS)
def test_teams_are_the_hosts(hosts):
    reached = [[r for r in range(rank) if hosts[r] == hosts[rank]] for rank in range(len(hosts))]
    teams = find_teams(reached)
    assert sorted(rank for team in teams for rank in team) == list(range(len(hosts)))
    assert len(teams) == len(set(hosts))
    assert all(len({hosts[rank] for rank in team}) == 1 for team in teams)


@given(st.data(), st.integers(1, 8))
def test_ranks_of_a_team_all_reached_each_other(data, size):
    reached = [data.draw(st.sets(st.integers(0, r - 1))) if r else set() for r in range(size)]
    teams = find_teams(reached)
    assert sorted(rank for team in teams for rank in team) == list(range(size))
    for team in teams:
        assert all(low in reached[high] for low in team for high in team if low < high)


@given(HOSTS)
def test_every_rank_sees_the_same_teams(hosts):
    reached = [[r for r in range(rank) if hosts[r] == hosts[rank]] for rank in range(len(hosts))]
    ranks = find_teams(reached)
    for rank in range(len(hosts)):
        teams = Teams(ranks, rank)
        assert teams.own[teams.place] == rank
        assert sorted([teams.team, *teams.others]) == list(range(teams.count))
        assert 1 <= teams.owners <= len(teams.own)


@given(st.integers(0, 50_000_000), st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16]))
def test_pieces_partition_the_elements(count, parts, itemsize):
    cut = Cut.of(count, parts, itemsize)
    spans = cut.spans()
    assert len(spans) == len(cut.blocks)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])][: len(spans)]
    assert (spans[-1][1] if spans else 0) == count
    for (start, stop), block in zip(spans, cut.blocks, strict=True):
        assert 0 < stop - start <= block * parts
        assert block * itemsize <= max(across_hosts.LARGE_BYTES, itemsize)
    for (start, stop), block in zip(spans[:-1], cut.blocks, strict=False):
        assert stop - start == block * parts  # the last one alone has to be filled up


@given(st.integers(0, 20), st.integers(1, 4))
def test_each_phase_has_each_piece_in_order_and_after_the_phase_before(pieces, phases):
    calls: list[tuple[int, int]] = []
    pipelined(pieces, [lambda n, p=phase: calls.append((p, n)) for phase in range(phases)])
    for phase in range(phases):
        assert [n for p, n in calls if p == phase] == list(range(pieces))
    for phase, number in calls:
        if phase:
            assert calls.index((phase - 1, number)) < calls.index((phase, number))
