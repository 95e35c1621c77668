"""Names of the files in a directory of dumps, after which the rank comes."""

PREFIX, FIRST = "rank_", "first_"
"""Prefixes of a rank's dump, and of the one at its first failure."""
RING, CRASH, STACKS = "ring-{}", "crash-{}.txt", "stacks-{}.txt"
"""Files that outlive any end of the process."""
