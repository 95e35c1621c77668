"""The page "When something goes wrong" lists all errors and verdicts."""

from __future__ import annotations

from pathlib import Path

from gradwire import errors
from gradwire.recorder.verdict import Kind

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "debug.md"
BASES = {"DistributedError", "GradwireError"}  # never raised themselves


def first_column(heading: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(" `") for cell in cells[1:] for name in cell.split(",")}


def test_page_lists_all_verdicts():
    kinds = {value for name, value in vars(Kind).items() if name.isupper()}
    assert first_column("Verdicts") == kinds


def test_page_lists_all_errors():
    assert first_column("Errors") == set(errors.__all__) - BASES
