"""Verdict on a directory of dumps: the rank and the cause.

`dumps` reads them, `evidence` derives facts from them, and the table in `rules` decides.
If nothing failed, `slow` looks for slow ranks and transfers.
"""

from gradwire.recorder.verdict.evidence import Finding, Kind, Verdict, list_ranks
from gradwire.recorder.verdict.rules import explain

__all__ = ["Finding", "Kind", "Verdict", "explain", "list_ranks"]
