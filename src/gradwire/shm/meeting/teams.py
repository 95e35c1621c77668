"""Teams: ranks of a group that share memory with each other. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def find_teams(reached: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the teams, equal on all ranks: in each, every rank is connected to every other.

    A rank joins the first team to all of whose ranks so far it is connected.

    Args:
        reached: Lower ranks to which each rank connected.

    Example:
        >>> from gradwire.shm.meeting.teams import find_teams
        >>> find_teams([[], [0], [], [2], [2, 3]])
        ((0, 1), (2, 3, 4))
    """
    teams: list[list[int]] = []
    for rank, lower in enumerate(reached):
        team = next((team for team in teams if set(team) <= set(lower)), None)
        if team is None:
            teams.append([rank])
        else:
            team.append(rank)
    return tuple(map(tuple, teams))


@dataclass(frozen=True)
class Teams:
    """Teams of a group, as one of its ranks sees them.

    Args:
        ranks: Ranks of each team, in order.
        team: Index of this rank's team.
        place: Index of this rank in its team.
    """

    ranks: tuple[tuple[int, ...], ...]
    team: int
    place: int

    @classmethod
    def of(cls, ranks: tuple[tuple[int, ...], ...], rank: int) -> Teams:
        """Return the teams as this rank sees them."""
        team = next(i for i, members in enumerate(ranks) if rank in members)
        return cls(ranks, team, ranks[team].index(rank))

    @property
    def count(self) -> int:
        """Number of teams."""
        return len(self.ranks)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this rank's team."""
        return self.ranks[self.team]

    @property
    def others(self) -> list[int]:
        """Indices of the other teams, the next first: no two teams begin with the same one."""
        return [(self.team + i) % self.count for i in range(1, self.count)]

    @property
    def owners(self) -> int:
        """Number of ranks per team that own a share of reduced data: size of the smallest team."""
        return min(map(len, self.ranks))

    def carrier(self, team: int, place: int) -> int:
        """Return the rank of a team that acts for a place, which may exist only in larger teams."""
        return self.ranks[team][place % len(self.ranks[team])]
