"""Which parameters are exchanged together, and after which steps: integers only."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import ArgumentError

__all__ = ["assign_fragments", "due"]


def assign_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cut a sequence into runs of about equal size.

    Args:
        sizes: Of each entry, ≥ 0.
        count: How many runs, from 1 to the number of entries.

    Returns:
        The indices in each run, at least one.

    Raises:
        ArgumentError: There cannot be so many.

    Example:
        >>> assign_fragments([5, 1, 1, 1, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    if not 1 <= count <= len(sizes):
        raise ArgumentError(
            f"fragments is {count}: give 1 to {len(sizes)}, as there are {len(sizes)} parameters"
        )
    total = max(1, sum(sizes))
    runs: list[list[int]] = [[]]
    passed = 0
    for index, size in enumerate(sizes):
        left = len(sizes) - index  # entries, this one included
        needed = count - len(runs)  # runs that are yet to begin
        # the run that the entry's middle lies in, were all of the same size to the byte
        beyond = (2 * passed + size) * count >= 2 * total * len(runs)
        if runs[-1] and needed and (beyond or left == needed):
            runs.append([])
        runs[-1].append(index)
        passed += size
    return runs


def due(step: int, every: int, fragments: int) -> list[int]:
    """The fragments that are exchanged after this step, the first of which is 1.

    Each is exchanged once in `every` steps; their turns are spread evenly over these.

    Example:
        >>> [due(step, every=4, fragments=2) for step in range(1, 9)]
        [[], [0], [], [1], [], [0], [], [1]]
    """
    phase = step % every
    return [f for f in range(fragments) if (f + 1) * every // fragments % every == phase]
