"""Teams: the ranks of a group that share memory with each other. Integers alone, no connections."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def find_teams(reached: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """The teams, which every rank finds alike: in each, every rank reached every other.

    A rank joins the team of the lowest rank with whose whole team so far it is connected.

    Args:
        reached: For each rank, the lower ranks that it connected to.

    Example:
        >>> from gradwire.shm.teams import find_teams
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
    """A group's teams, as one of its ranks sees them.

    Args:
        ranks: Of each team, in order.
        team: The index of this rank's team.
        place: This rank's index in its team.
    """

    ranks: tuple[tuple[int, ...], ...]
    team: int
    place: int

    @classmethod
    def of(cls, ranks: tuple[tuple[int, ...], ...], rank: int) -> Teams:
        """The teams as this rank sees them."""
        team = next(i for i, members in enumerate(ranks) if rank in members)
        return cls(ranks, team, ranks[team].index(rank))

    @property
    def count(self) -> int:
        """How many teams."""
        return len(self.ranks)

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this rank's team."""
        return self.ranks[self.team]

    @property
    def others(self) -> list[int]:
        """The indices of the other teams, the next one first: no two teams begin with the same."""
        return [(self.team + i) % self.count for i in range(1, self.count)]

    @property
    def owners(self) -> int:
        """How many places own a share of what is reduced: as many as the smallest team has."""
        return min(map(len, self.ranks))

    def carrier(self, team: int, place: int) -> int:
        """The rank of a team that acts for a place, which a larger team may have and it may not."""
        return self.ranks[team][place % len(self.ranks[team])]
